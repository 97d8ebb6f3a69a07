"""KV events from a manager to a router's index, over ZMQ.

Run it: python examples/events.py

Needs the extra `events` (pyzmq). Requests share a system prompt; the arena is too small for them all.
"""

from __future__ import annotations

import tempfile

from kvcache import Geometry, Manager, RecurrentState, SlidingWindow, Sparse
from kvcache.core.events import BlockStored, ReferenceIndex
from kvcache.core.events.publisher import EventPublisher
from kvcache.core.events.subscriber import EventSubscriber, Received

window = SlidingWindow(name="window", layers=2, kv_heads=1, head_dim=8, window=32, block_tokens=16)
state = RecurrentState(name="state", layers=2, state_bytes_per_layer=1024)
geometry = Geometry((window, state))
manager = Manager(geometry, slabs=8, retention=Sparse(), events=True)


def serve(prompt: list[int], session: str) -> int:
    """One request in one step; your engine computes it. Returns the hit."""
    request = manager.open(prompt, boundaries=[64], session=session)
    step = manager.begin_step()
    hit = manager.lookup(request).hit_tokens
    grant = manager.allocate(request, len(prompt) - hit)
    assert grant, "alone it always gets space"
    manager.commit(request, grant.end)
    manager.end_step(step)
    manager.finish(request)
    return hit


def main() -> None:
    """Publishes after each request; the subscriber keeps an index of what the manager holds."""
    system, index = list(range(64)), ReferenceIndex()
    with tempfile.TemporaryDirectory() as folder:
        live, replay = f"ipc://{folder}/live", f"ipc://{folder}/replay"
        publisher = EventPublisher(live, replay_endpoint=replay)
        with EventSubscriber(live, replay_endpoint=replay, probe_seconds=0.2) as subscriber:
            for session in range(3):
                own = list(range(1000 * (session + 1), 1000 * (session + 1) + 50))
                hit = serve(system + own, f"session-{session}")
                print(f"session {session}: {hit} of {len(system + own)} tokens were there")
                publisher.publish(manager.take_events())
                received = subscriber.receive(timeout_seconds=10.0)
                assert isinstance(received, Received), received
                index.apply(received.batch.events)
                for event in received.batch.events:
                    keys = getattr(event, "block_hashes", ())
                    group = geometry.groups[getattr(event, "group_idx", None) or 0].name
                    tokens = len(event.token_ids) if isinstance(event, BlockStored) else 0
                    print(f"  {type(event).__name__}: {len(keys)} keys of {group}, {tokens} tokens")
        publisher.close()
    held = sum(manager.group_stats(g).keyed for g in range(len(geometry.groups)))
    print(f"the index knows {len(index)} keys, the manager holds {held}")


if __name__ == "__main__":
    main()
