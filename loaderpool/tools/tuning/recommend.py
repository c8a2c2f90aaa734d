"""Which number of workers to use, and why: pure functions over measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loaderpool.errors import ArgumentError
from loaderpool.tools.tuning.explain import describe_ideal, explain_excess, give_notes, give_reason
from loaderpool.tools.tuning.ideal import cpu_share, ideal_speedup
from loaderpool.tools.tuning.window import Measurement

# A count this close to the fastest is as good: each worker costs memory, and CPU time that the training wants too.
# Smaller, noise decides; larger, throughput is given away.
_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One count beside the smallest that was measured, and beside what would be ideal."""

    measurement: Measurement
    speedup: float  # samples per second over those of the smallest count
    ideal_speedup: float  # what it would be if workers did not get in each other's way

    @property
    def share_of_ideal(self) -> float:
        """How much of the ideal was reached; 1.0 for all of it."""
        return self.speedup / self.ideal_speedup

    @property
    def is_above_ideal(self) -> bool:
        """Whether its share is more than 100 % as it is printed; `Recommendation.excess` says why then."""
        return round(100 * self.share_of_ideal) > 100


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A number of workers, with the reason and with what else the measurements show."""

    workers: int  # how many to use
    reason: str  # why, in a sentence
    notes: tuple[str, ...]  # what else to know, a sentence each
    ideal: str  # which ideal the comparisons are with, and what decided it
    comparisons: tuple[Comparison, ...]  # by number of workers, ascending
    excess: str  # why some have more than 100 % of the ideal, in a sentence; empty: none has


def recommend(measurements: Sequence[Measurement], cpus: int, threads: int = 1) -> Recommendation:
    """The smallest number of workers whose rate is within 5 % of the best one.

    Args:
        measurements: of different numbers of workers, at least one.
        cpus: CPUs that may be used, at least 1.
        threads: calls that a worker makes at the same time.

    Raises:
        ArgumentError: there are no measurements.
    """
    if not measurements:
        raise ArgumentError("measurements is empty: measure at least one number of workers")
    by_count = sorted(measurements, key=lambda each: each.workers)
    base = by_count[0]
    best = max(by_count, key=lambda each: each.samples_per_s)
    chosen = next(each for each in by_count if each.samples_per_s >= (1 - _TOLERANCE) * best.samples_per_s)
    share = cpu_share(base, threads)

    def ideal_of(workers: int) -> float:
        return ideal_speedup(workers, cpus, share, threads)

    # One worker does what this process does, but beside the consumer, and tiny batches some at a time: the faster of
    # the two shows what one process can.
    alone = [each for each in by_count if each.workers <= 1] or [base]
    unit = max(alone, key=lambda each: each.samples_per_s / ideal_of(each.workers))
    unit_rate = unit.samples_per_s / ideal_of(unit.workers)
    comparisons = tuple(
        Comparison(
            each, each.samples_per_s / base.samples_per_s, ideal_of(each.workers) * unit_rate / base.samples_per_s
        )
        for each in by_count
    )
    above = {each.measurement: each.share_of_ideal for each in comparisons if each.is_above_ideal}
    return Recommendation(
        workers=chosen.workers,
        reason=give_reason(by_count, chosen, best, cpus, share),
        notes=tuple(give_notes(by_count, chosen, best, cpus, share, threads)),
        ideal=describe_ideal(base, unit, cpus, share, threads),
        comparisons=comparisons,
        excess=explain_excess(above, unit) if above else "",
    )
