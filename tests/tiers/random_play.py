"""Requests, results, preemptions, aborts and clears at random, on the stamp engine."""

from __future__ import annotations

import random

from tiers.stamp_engine import Engine, text


def play_at_random(e: Engine, chance: random.Random, steps: int) -> None:
    """Some requests side by side over few prompts; every read is checked by the engine."""
    texts = [text(i, 40) for i in range(3)]
    texts.append([*texts[0][:16], *text(9, 24)])
    operations = ("open", "step", "deliver", "recover", "preempt", "abort", "clear")
    for _ in range(steps):
        operation = chance.choices(operations, (4, 10, 4, 1, 1, 1, 0.3))[0]
        if operation == "open" and len(e.requests) < 4:
            salt = chance.choice(("", "", "x"))
            e.open(chance.choice(texts)[: chance.randint(1, 40)], chance.randint(0, 9), salt)
        elif operation == "step":
            e.step(chance.randint(1, 16))
        elif operation in {"deliver", "recover"} and e.faulty is not None:
            if operation == "deliver":
                e.faulty.deliver(chance.randint(1, 5))
            else:
                e.faulty.recover()
            e.poll()
        elif operation in {"preempt", "abort"} and e.requests:
            handle = chance.choice(list(e.requests))
            if operation == "abort" or e.requests[handle].state != "waiting":
                e.close(handle, operation)
        elif operation == "clear" and e.may_clear():
            e.manager.clear()
        e.check()
