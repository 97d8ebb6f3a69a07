"""The side that decides, in vLLM's scheduler process.

    vLLM asks                     here                                  the tier
    get_num_new_matched_tokens -> lookup: how far every group goes      lookup, narrow
    update_state_after_alloc   -> start_load: into these blocks         plan_load, or release
    build_connector_meta       -> plan: loads, and what to store        plan_store
    update_connector_output    -> take: results of all ranks            complete
    request_finished           -> finish: the rest waits to be stored   release

Blocks that a transfer reads or writes are held by a reference of our own, whatever becomes of the
request: those of a load until its final result, so that a late copy never meets a block's next owner;
those of a store until then or its deadline, after which it is no good any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache.connectors.adapters.vllm.groups import CachedGroup, CachedGroups
from kvcache.connectors.adapters.vllm.lookups import Lookups
from kvcache.connectors.adapters.vllm.records import StepPlan, StepResults, merge
from kvcache.connectors.adapters.vllm.requests import BlockDigests, Hit, Tracked
from kvcache.connectors.adapters.vllm.stores import MAX_STORES, Stores
from kvcache.connectors.base import (
    KEYED_DTYPE,
    Direction,
    KeyedPages,
    TierScheduler,
    Transfer,
    TransferResult,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

MAX_FAILED_LOADS = 3
"""After so many a request is computed without the tier, so that it ends whatever the tier does."""

MAX_ASKED = 8
"""So often a request whose load has failed may be promised another one and not get its blocks: vLLM
counts what it would have loaded as taken, which may leave too little for ever."""

COSTLY_TOKENS = 1 << 17
"""Of prompts from so long on, a longer hit than the one that is promised is looked for ..."""

COSTLY_REPEATS = 8
"""... each so many times that it is asked."""

SHARED_PART = 0.5
"""Of what a request would load: as much must be on its way for another one for it to wait."""


@dataclass(slots=True, eq=False)
class _Moving:
    """A transfer, the blocks that it holds, and the results of the ranks so far."""

    transfer: Transfer
    blocks: list[KVCacheBlock]
    items: NDArray[np.void]
    request: Tracked | None = None
    """Whose load it is."""
    late: bool = False
    final: tuple[TransferResult, int] | None = field(default=None)


class SchedulerSide:
    """Lookups, plans and results over one tier's scheduler. One thread.

    Args:
        tier: its deciding side, which belongs to this object from now on.
        groups: those that the tier keeps.
        namespace: 32 bytes: whose keys these are.
        drop_tokens: a hit leaves out its last ones, which draft layers write anew.
        prompt_only: blocks that hold generated tokens are not stored.
        wait: a step ends its loads, and vLLM is told of failed ones by block.
        ranks: workers that must each have ended a transfer.
        manager: vLLM's.
        told: as for `Stores`.
    """

    def __init__(
        self,
        tier: TierScheduler,
        groups: CachedGroups,
        namespace: bytes,
        *,
        drop_tokens: int,
        prompt_only: bool,
        wait: bool,
        ranks: int,
        manager: KVCacheManager,
        told: Callable[[CachedGroup, int, Tracked], None] | None = None,
    ) -> None:
        self.tier = tier
        self._groups = groups
        self._lookups = Lookups(tier, groups, namespace, drop_tokens=drop_tokens)
        self._wait = wait
        self._ranks = ranks
        self._manager = manager
        self._pool: BlockPool = manager.block_pool
        self.stores = Stores(tier, groups, self._pool, prompt_only=prompt_only, told=told)
        self._numbers = count(1)
        self._requests: dict[str, Tracked] = {}
        self._moving: dict[int, _Moving] = {}
        self._arrived: set[Tracked] = set()
        """Whose load has ended, and vLLM has not come to them since: they hold blocks."""
        self._plan = StepPlan()
        self.unknown = 0
        """Results that nobody waits for."""
        self.given_up = False
        """The tier is closed: what it has cannot be loaded."""

    def _tracked(self, request: Request) -> Tracked:
        r = self._requests.get(request.request_id)
        if r is None or r.request is not request:
            digests = BlockDigests(self._groups.hash_tokens)
            r = Tracked(next(self._numbers), request, digests, [0] * len(self._groups.groups))
            self._requests[request.request_id] = r
        if r.digests.update(request.block_hashes):
            r.restart()
        return r

    # ---- lookup --------------------------------------------------------------------------------

    def lookup(self, request: Request, begin: int) -> int | None:
        """Tokens behind `begin` that the tier has for every group; None: ask again later.

        O(1) when repeated while nothing was stored or evicted.
        """
        r = self._tracked(request)
        most = request.num_tokens - 1
        self._arrived.discard(r)
        if r.faults.loads and self._arrived:
            # vLLM keeps it at the head of those that hold blocks: what it waits for may be behind it.
            return None
        if begin and self._wait and self._may_fail(r):
            return None
        if r.faults.loads >= MAX_FAILED_LOADS or self.given_up or self._hangs:
            self._forget_hit(r)
            return 0
        if r.hit is None or self._may_have_changed(r, r.hit, begin, most):
            r.hit = self._lookups.ask(r, begin, most)
        hit = r.hit
        if hit is None or (hit.end > begin and self._comes_by_itself(r, hit)):
            return None
        if r.faults.loads and hit.end > begin:
            r.faults.asked += 1
            if r.faults.asked > MAX_ASKED:
                r.faults.loads = MAX_FAILED_LOADS
        return hit.end - begin

    @property
    def namespace(self) -> bytes:
        """Whose keys are found."""
        return self._lookups.namespace

    @property
    def _hangs(self) -> bool:
        """Whether a load is late, and keeps its blocks: others would lose theirs, too."""
        return any(it.late and it.request is not None for it in self._moving.values())

    def _forget_hit(self, r: Tracked) -> None:
        r.hit = None
        self._lookups.release(r)

    def _may_have_changed(self, r: Tracked, hit: Hit, begin: int, most: int) -> bool:
        """What was promised stands: where that was costly, it is not asked for more each time."""
        if (begin, most, r.faults.loads) != (hit.begin, hit.most, hit.faults):
            return True
        if hit.version is not None and hit.version == self.tier.version:
            return False
        hit.repeats += 1
        return hit.end <= begin or most < COSTLY_TOKENS or hit.repeats % COSTLY_REPEATS == 0

    def _may_fail(self, r: Tracked) -> bool:
        """Whether what the device has of it may be blocks that this very step is to load."""
        unit = self._groups.hash_tokens
        return any(
            other is not None
            and other.loading
            and np.array_equal(r.digests.at(unit), other.digests.at(unit))
            for other in (it.request for it in self._moving.values())
        )

    def _comes_by_itself(self, r: Tracked, hit: Hit) -> bool:
        """Whether a load in flight brings a good part of it: then it will be a hit on the device."""
        for it in self._moving.values():
            other = it.request
            if other is None or other is r or it.late or other.loading <= hit.begin:
                continue
            shared = (
                min(other.loading, hit.end) // self._groups.hash_tokens * self._groups.hash_tokens
            )
            if shared - hit.begin >= SHARED_PART * (hit.end - hit.begin) and np.array_equal(
                r.digests.at(shared), other.digests.at(shared)
            ):
                return True
        return False

    # ---- loads ---------------------------------------------------------------------------------

    def start_load(
        self, request: Request, tables: Sequence[Sequence[KVCacheBlock]], tokens: int
    ) -> None:
        """The request got its blocks. `tokens`: that are to be loaded; 0: none, or others bring them."""
        r = self._tracked(request)
        hit = r.hit
        if hit is None:
            return  # blocks beyond those of its first call
        r.restart()
        end = hit.begin + tokens
        for g, group in enumerate(self._groups.groups):
            r.offered[g] = end // group.span
        present = self._lookups.presence(r, hit.begin)
        self.stores.offer_missing(r, tables, hit.begin, present)
        if tokens:
            items, blocks = self._wanted(r, hit, tables, end)
            transfer = self.tier.plan_load(r.number, KeyedPages(items, [self.namespace]))
            self._pool.touch(blocks)
            self._moving[transfer.id] = _Moving(transfer, blocks, items, r)
            self._plan.loads.append((request.request_id, transfer))
            r.asked, r.loading = False, end
        else:
            self._lookups.release(r)
        r.hit = None

    def _wanted(
        self, r: Tracked, hit: Hit, tables: Sequence[Sequence[KVCacheBlock]], end: int
    ) -> tuple[NDArray[np.void], list[KVCacheBlock]]:
        """Blocks that a load up to `end` fills: those that a hit there reads and the device lacks."""
        blocks: list[KVCacheBlock] = []
        parts: list[NDArray[np.void]] = []
        for g, group in enumerate(self._groups.groups):
            where, keys = self._lookups.needed(r, hit, g, end)
            chosen = tables[group.id][where]
            items = np.zeros(len(chosen), KEYED_DTYPE)
            items["group"] = group.tier_group
            items["page"] = [block.block_id for block in chosen]
            items["digest"] = keys
            real = [i for i, block in enumerate(chosen) if not block.is_null]
            parts.append(items if len(real) == len(items) else items[real])
            blocks += [chosen[i] for i in real]
        return np.concatenate(parts), blocks

    # ---- steps ---------------------------------------------------------------------------------

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """What the workers are to move with this step. Once for each step."""
        state = output.kv_connector_block_state
        gone = set(output.finished_req_ids) | set(output.preempted_req_ids or ())
        for name in output.num_scheduled_tokens:
            r = self._requests.get(name)
            if r is not None:
                r.loading = 0
                self._arrived.discard(r)
                r.digests.update(r.request.block_hashes)
                if not self.given_up:
                    self.stores.offer(r, self._manager.get_blocks(name).blocks)
        if state is not None:
            for name, offers in state.boundary_state_offloads.items():
                r = self._requests.get(name)
                if r is not None and name not in gone:
                    self.stores.offer_states(r, offers)
        for transfer, blocks in self.stores.plan(self._stores_in_flight, self.namespace):
            self._moving[transfer.id] = _Moving(transfer, blocks, np.zeros(0, KEYED_DTYPE))
            self._plan.stores.append(transfer)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """It has ended: what is complete and was not offered waits to be stored."""
        r = self._requests.pop(request.request_id, None)
        if r is None:
            return
        self._arrived.discard(r)
        r.digests.update(request.block_hashes)
        if not r.loading:
            tables = [[self._pool.blocks[b] for b in ids] for ids in block_ids]
            self.stores.offer(r, tables)
        self._lookups.release(r)

    def finish_states(self, request: Request, offers: Sequence[tuple[int, int, int]]) -> None:
        """States at the end of a request, that are valid as long as nothing else is computed."""
        r = self._requests.get(request.request_id)
        if r is not None:
            r.digests.update(request.block_hashes)
            self.stores.offer_states(r, offers)

    # ---- results -------------------------------------------------------------------------------

    def take(self, results: StepResults) -> None:
        """What the workers say has ended."""
        self.unknown += results.unknown
        if results.given_up:
            self.given_up = True
            self.stores.clear()
        for result, ranks in results.results:
            it = self._moving.get(result.id)
            if it is None or it.transfer.direction is not result.direction:
                self.unknown += 1
            elif result.late:
                self._take_late(it, result)
            else:
                whole = (result, ranks) if it.final is None else merge(*it.final, result, ranks)
                it.final = whole
                if whole[1] >= self._ranks:
                    self._end(it, whole[0])

    def _take_late(self, it: _Moving, result: TransferResult) -> None:
        if it.late:
            return
        it.late = True
        self._fault(it, np.zeros(len(it.items), np.bool_))
        self.tier.complete(result)
        if it.transfer.direction is Direction.STORE:
            self._give_back(it)

    def _end(self, it: _Moving, result: TransferResult) -> None:
        del self._moving[it.transfer.id]
        if it.late and it.transfer.direction is Direction.STORE:
            result = replace(result, ok=result.ok * 0)  # its blocks may have been others' meanwhile
        if not it.late:
            ok = result.ok if len(result.ok) == len(it.items) else np.zeros(len(it.items), np.uint8)
            self._fault(it, ok == 1)
        self.tier.complete(result)
        self._give_back(it)

    def _give_back(self, it: _Moving) -> None:
        blocks, it.blocks = it.blocks, []
        # The last first, so that the head of a prefix is the last to be given away.
        self._pool.free_blocks(reversed(blocks))

    def _fault(self, it: _Moving, ok: NDArray[np.bool_]) -> None:
        r = it.request
        if r is None:
            return
        r.loading = 0
        if not self._wait and r.request.request_id in self._requests:
            self._arrived.add(r)
        if ok.all():
            return
        r.restart()
        r.faults.loads += 1
        r.faults.asked = 0
        r.faults.lost.update(key.tobytes() for key in it.items["digest"][~ok])
        if self._wait:
            self._forget(r, it.items["page"][~ok])

    def _forget(self, r: Tracked, lost: NDArray[np.uint64]) -> None:
        """These blocks and what follows are computed once more: until then nobody else may find them."""
        (ids,) = self._manager.get_block_ids(r.request.request_id)
        first = min((ids.index(block) for block in lost.tolist() if block in ids), default=len(ids))
        self._manager.evict_blocks(set(ids[first:]))

    @property
    def _stores_in_flight(self) -> int:
        """Those that hold blocks."""
        return sum(
            it.transfer.direction is Direction.STORE and not it.late for it in self._moving.values()
        )

    @property
    def pending(self) -> bool:
        """Whether steps are needed though no request may be left: something is in flight, or may be."""
        waiting = len(self.stores) > 0 and self._stores_in_flight < MAX_STORES
        return waiting or any(not it.late for it in self._moving.values())

    def reset(self, namespace: bytes) -> bool:
        """From now on nothing is known that was stored before; stores in flight go on unseen.

        False: loads are in flight, and bring what was.
        """
        self._lookups.namespace = namespace
        self.stores.clear()
        for r in self._requests.values():
            self._forget_hit(r)
        return not any(it.transfer.direction is Direction.LOAD for it in self._moving.values())
