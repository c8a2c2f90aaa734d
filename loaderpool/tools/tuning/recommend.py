"""Which number of workers and threads to use, and why: pure functions over measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loaderpool.errors import ArgumentError
from loaderpool.tools.tuning.explain import describe_ideal, explain_excess, give_notes, give_reason
from loaderpool.tools.tuning.ideal import compute_in_turns, cpu_share, ideal_speedup
from loaderpool.tools.tuning.setting import Setting
from loaderpool.tools.tuning.window import Measurement
from loaderpool.trainer.explain.thresholds import TOLERANCE


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One setting beside the smallest that was measured, and beside what would be ideal."""

    measurement: Measurement
    speedup: float  # samples per second over those of the smallest setting
    ideal_speedup: float  # what it would be if calls did not get in each other's way

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
    """A setting, with the reason and with what else the measurements show."""

    setting: Setting  # what to use
    reason: str  # why, in a sentence
    notes: tuple[str, ...]  # what else to know, a sentence each
    ideal: str  # which ideal the comparisons are with, and what decided it
    comparisons: tuple[Comparison, ...]  # by setting, ascending
    excess: str  # why some have more than 100 % of the ideal, in a sentence; empty: none has


def recommend(measurements: Sequence[Measurement], cpus: int) -> Recommendation:
    """The smallest setting whose rate is within 5 % of the best one: as few workers as do, and then as few threads.

    Args:
        measurements: of different settings, at least one.
        cpus: CPUs that may be used, at least 1.

    Raises:
        ArgumentError: there are no measurements.
    """
    if not measurements:
        raise ArgumentError("measurements is empty: measure at least one number of workers")
    ascending = sorted(measurements, key=lambda each: each.setting)
    base = ascending[0]
    best = max(ascending, key=lambda each: each.samples_per_s)
    chosen = next(each for each in ascending if each.samples_per_s >= (1 - TOLERANCE) * best.samples_per_s)
    varies = base.setting.names_threads
    share, in_turns = cpu_share(base), compute_in_turns(measurements)

    def ideal_of(measurement: Measurement) -> float:
        return ideal_speedup(measurement.setting, cpus, share, in_turns)

    # One worker does what this process does, but beside the consumer, and tiny batches some at a time: the faster of
    # the two shows what one process can.
    alone = [each for each in ascending if each.workers <= 1 and (each.setting.calls == 1 or not varies)] or [base]
    unit = max(alone, key=lambda each: each.samples_per_s / ideal_of(each))
    unit_rate = unit.samples_per_s / ideal_of(unit)
    comparisons = tuple(
        Comparison(each, each.samples_per_s / base.samples_per_s, ideal_of(each) * unit_rate / base.samples_per_s)
        for each in ascending
    )
    above = {each.measurement: each.share_of_ideal for each in comparisons if each.is_above_ideal}
    return Recommendation(
        setting=chosen.setting,
        reason=give_reason(ascending, chosen, best, cpus, share, in_turns),
        notes=tuple(give_notes(ascending, chosen, best, cpus, share, in_turns)),
        ideal=describe_ideal(ascending, unit, cpus, share, in_turns),
        comparisons=comparisons,
        excess=explain_excess(above, unit) if above else "",
    )
