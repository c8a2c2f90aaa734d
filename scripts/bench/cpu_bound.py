"""How much of two cores is left for CPU-bound Python once loaderpool deals it out?

Work: about 5 ms of pure Python a sample, in batches of 32, with two workers.
Baseline: two bare processes that only run the same function, and hand nothing to anybody.
Bar: at least 0.97 of them.
Verified: every batch's first and last result against the closed form of the recurrence, all rows of the first batches.
Command: scripts/bench/run cpu_bound

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    cpu_bound   bare               344 samples/s [339 .. 345]
    cpu_bound   loader             320 samples/s [317 .. 325]       0.93 x bare (best 0.94; bar ≥ 0.97) MISSED
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bare import bare_rate
from common import Bar, Figure, Measured, Question, Window, deliveries, main, require

WORKERS = 2
BATCH_SIZE = 32
# A linear congruential generator: pure Python that nothing can shorten, with a closed form to verify it by.
STEPS, FACTOR, ADDEND, MODULUS = 40_000, 1_103_515_245, 12_345, 2**31


def slow(item: int, steps: int = STEPS) -> int:
    """The generator's state so many steps after `item`; STEPS take about 5 ms."""
    state = item
    for _ in range(steps):
        state = (state * FACTOR + ADDEND) % MODULUS
    return state


def closed_form(item: int) -> int:
    """What `slow` gives, by squaring the step: x -> FACTOR^n x + ADDEND (FACTOR^n - 1) / (FACTOR - 1)."""
    power = pow(FACTOR, STEPS, MODULUS * (FACTOR - 1))
    return (power * item + ADDEND * ((power - 1) // (FACTOR - 1))) % MODULUS


def bare(window: Window) -> Measured:
    def work(number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        state = {"next": number * 10**6, "last": -1, "result": -1}

        def one_batch() -> None:
            start = state["next"]
            for item in range(start, start + BATCH_SIZE):
                result = slow(item)
            state.update(next=start + BATCH_SIZE, last=item, result=result)

        def check() -> None:
            require(state["result"] == closed_form(state["last"]), "a wrong result")

        return one_batch, check

    return Measured({"bare": bare_rate(work, WORKERS, window) * BATCH_SIZE})


def loader(window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(10**6), slow, batch_size=BATCH_SIZE, workers=WORKERS) as batches:
        for position, batch in zip(range(2), batches):  # noqa: B905 - only the first ones
            start = position * BATCH_SIZE
            require(batch.tolist() == [closed_form(start + row) for row in range(BATCH_SIZE)], "a wrong batch")

        def look(batch: Any) -> tuple[int, int]:
            return batch.item(0), batch.item(-1)

        rate, seen = deliveries(batches, window, look, turn=WORKERS)
    for position, ends in enumerate(seen):
        start = position * BATCH_SIZE
        require(ends == (closed_form(start), closed_form(start + BATCH_SIZE - 1)), f"batch {position} is wrong")
    return Measured({"loader": rate * BATCH_SIZE})


QUESTION = Question(
    name="cpu_bound",
    figures=(
        Figure("bare", "samples/s", "two bare processes"),
        Figure("loader", "samples/s", "CPU-bound Python, 5 ms a sample, 2 workers"),
    ),
    contestants={"bare": bare, "loader": loader},
    bars=(Bar("loader", "bare", at_least=0.97),),
    seconds=3.2,
    warm_s=0.8,
)

if __name__ == "__main__":
    main(QUESTION)
