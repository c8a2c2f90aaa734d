"""Rounds of the storm: what is stormed in each, and what came of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from .killer import Budget, Counts
from .shapes import SHAPES, Shape

__all__ = ["WORKERS", "Plan", "Result", "Round", "plan_rounds"]

WORKERS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Round:
    """What is stormed, and how."""

    number: int
    shape: Shape
    is_ordered: bool
    workers: int
    budget: Budget
    draws: str  # the seed of all that is drawn in it
    is_resized: bool = False  # in mid-pass, time and again
    has_companion: bool = False  # another loader on the same pool, read by turns
    is_dataset: bool = False  # read through tf.data, its iterators saved by TensorFlow


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rounds are made: enough of each for one turn over all shapes, ordered and not."""

    seed: int
    kills: int = 36
    supervisor_kills: int = 1
    reader_kills: int = 2  # where there is one
    stops_every: int = 4  # rounds; 0: never
    resized_every: int = 3  # rounds
    companion_every: int = 5  # rounds
    shapes: tuple[str, ...] = tuple(SHAPES)
    is_dataset: bool = False  # all rounds are; no reader is killed then


@dataclasses.dataclass
class Result:
    """What came of a round."""

    round: Round
    passes: int = 0
    batches: int = 0
    counts: Counts = dataclasses.field(default_factory=Counts)
    faults: int = 0  # segmentation faults out of the function
    resizes: int = 0
    saves: int = 0  # passes that went on in another loader, at a saved place
    losses: int = 0  # passes that a reader's death has ended
    companion_batches: int = 0  # of the loader beside it
    restarts: int = 0  # as the loader counts them
    supervisor_restarts: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def plan_rounds(plan: Plan) -> Iterator[Round]:
    """Rounds without end: each shape ordered and not, then again with other numbers of workers."""
    draw = random.Random(plan.seed)
    kinds = [(SHAPES[name], is_ordered) for name in plan.shapes for is_ordered in (True, False)]
    draw.shuffle(kinds)
    number = 0
    while True:
        for shape, is_ordered in kinds:
            workers = WORKERS[(number + number // len(kinds)) % len(WORKERS)]
            has_stop = bool(plan.stops_every) and number % plan.stops_every == 0
            # A shape that may be killed but slowly is killed less.
            kills = max(4, int(plan.kills * min(1.0, 0.08 / shape.kill_every_s)))
            budget = Budget(
                kills,
                plan.supervisor_kills,
                int(has_stop),
                shape.kill_every_s,
                shape.spares_first,
                plan.reader_kills if shape.has_reader and not plan.is_dataset else 0,
            )
            yield Round(
                number,
                shape,
                is_ordered,
                workers,
                budget,
                f"{plan.seed}/{number}",
                is_resized=number % plan.resized_every == 1,
                has_companion=number % plan.companion_every == 2,
                is_dataset=plan.is_dataset,
            )
            number += 1
