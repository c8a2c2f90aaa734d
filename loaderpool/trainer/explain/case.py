"""A window of a training as verdicts look at it: what was observed, what a step demands, and the shares of both."""

from __future__ import annotations

import dataclasses
import math

from loaderpool.errors import counted, readable_s
from loaderpool.trainer.explain.demand import Demand, cpus_of_others, cpus_used, demand_of
from loaderpool.trainer.explain.observed import (
    BRINGS_LITTLE,
    COMPUTES_ABOVE,
    CONTESTED,
    FEWER_BY,
    FULL,
    SLOW_CALLS_EXPLAIN,
    SPARE,
    TOLERANCE,
    WAITS_ABOVE,
    Observed,
    Pace,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A window with at least one step, in shares."""

    seen: Observed
    demand: Demand

    @classmethod
    def of(cls, observed: Observed) -> Case:
        """Return the case of a window."""
        return cls(observed, demand_of(observed))

    @property
    def busy_share(self) -> float:
        """Of the workers' time since the first batch: at tickets."""
        seen = self.seen
        since_start_s = seen.workers * max(0.0, seen.whole_s - seen.start_s)
        had_s = max(seen.busy_s, min(seen.busy_s + seen.idle_s, since_start_s))
        return seen.busy_s / had_s if had_s else 0.0

    @property
    def cpu_share(self) -> float:
        """Of the time at tickets, waiting for a CPU left out: computing."""
        return min(1.0, self.demand.cpu_s / self.demand.making_s) if self.demand.making_s else 0.0

    @property
    def queued_share(self) -> float:
        """Of the time at tickets: waiting for a CPU."""
        return min(1.0, self.seen.queued_s / self.seen.busy_s) if self.seen.busy_s else 0.0

    @property
    def start_wait_share(self) -> float:
        """Of the time since the first batch: waiting."""
        seen = self.seen
        rest_s = seen.seconds - seen.start_s
        return max(0.0, seen.wait_s - seen.start_s) / rest_s if rest_s > 0 else 0.0

    @property
    def steady_wait_s(self) -> float:
        """Waiting within epochs."""
        return max(0.0, self.seen.wait_s - self.seen.start_s - self.seen.epoch_starts_s)

    @property
    def steady_wait_share(self) -> float:
        """Of the time within epochs: waiting. At their beginning more workers would not help."""
        seconds = self.seen.seconds - self.seen.start_s - self.seen.epoch_starts_s
        return self.steady_wait_s / seconds if seconds > 0 else 0.0

    @property
    def knows_cpu_time(self) -> bool:
        """Whether CPU time of workers was measured, which it is not on other machines, or not on each system."""
        return self.seen.cpu_s > 0

    @property
    def computes(self) -> bool:
        """Whether the function computes, rather than waits for anything else than a CPU."""
        return self.cpu_share >= COMPUTES_ABOVE

    @property
    def has_full_cpus(self) -> bool:
        """Whether workers and consumer use what others leave them, or workers have to wait for it."""
        used = cpus_used(self.seen)
        return used >= FULL * self.demand.cpus_left or self.queued_share >= CONTESTED

    @property
    def is_outpaced(self) -> bool:
        """Whether making takes longer than a step with data ready, whatever workers wait for besides."""
        return self.demand.making_s / self.demand.workers > (1 + WAITS_ABOVE) * self.demand.ready_s

    @property
    def lacks_slots(self) -> bool:
        """Whether the memory limit leaves far fewer slots than there would be."""
        return 0 < self.seen.slots * FEWER_BY <= self.seen.slots_wanted

    @property
    def has_slow_calls(self) -> bool:
        """Whether a few calls explain the waiting, those left out that are slow as they had no CPU for a while."""
        least_s = max(SLOW_CALLS_EXPLAIN * self.steady_wait_s, 1e-9)
        return self.seen.slow_s - self.seen.queued_s >= least_s

    @property
    def would_hide_slow_calls(self) -> bool:
        """Whether the slots that the memory limit takes would hold what is consumed during the slowest call."""
        more_s = (self.seen.slots_wanted - self.seen.slots) * self.demand.ready_s
        return self.lacks_slots and more_s * 1e9 >= max((call.ns for call in self.seen.calls.slowest), default=0)

    @property
    def call_s(self) -> float:
        """How long a worker takes for a sample."""
        return self.demand.making_s * max(1, self.seen.threads) * self.seen.steps / max(1, self.seen.samples)

    @property
    def bytes_per_s(self) -> float:
        """Of finished batches."""
        return self.seen.bytes / self.seen.seconds

    def slower_paces(self) -> list[Pace]:
        """Return the paces of so few workers that they should have been slower by far, the fewest first."""
        fewer = [pace for pace in self.seen.paces if 0 < pace.workers * FEWER_BY <= self.seen.workers]
        return sorted(fewer, key=lambda pace: pace.workers)

    def fewer_as_fast(self) -> Pace | None:
        """Return the pace of the fewest workers that were no slower than these, though they should have been."""
        enough = (1 - TOLERANCE) * self.seen.samples_per_s
        return next((pace for pace in self.slower_paces() if pace.samples_per_s >= enough), None)

    def fewer_about_as_fast(self) -> Pace | None:
        """Return the pace of the fewest workers beside which these bring next to nothing."""
        now = Pace(self.seen.workers, self.seen.samples_per_s)
        return next((pace for pace in self.slower_paces() if _is_in_vain(pace, now)), None)

    def more_as_slow(self) -> Pace | None:
        """Return the pace of the fewest of so many more workers that they should have been faster, and were not."""
        now = Pace(self.seen.workers, self.seen.samples_per_s)
        more = [pace for pace in self.seen.paces if pace.workers >= FEWER_BY * now.workers and _is_in_vain(now, pace)]
        return min(more, key=lambda pace: pace.workers, default=None)

    def enough_workers(self, step_s: float) -> int:
        """Return how many workers feed such a step with some to spare; no more than there are."""
        seen = self.seen
        is_held_up = seen.slow_s > WAITS_ABOVE * seen.seconds  # and hidden by workers that go on meanwhile
        if is_held_up or not self.knows_cpu_time:
            return seen.workers
        return min(seen.workers, max(1, math.ceil(SPARE * self.demand.making_s / step_s)))

    def at_most_lanes(self, workers: int) -> int:
        """Return how many of so many workers would have something to do."""
        return min(workers, self.seen.lanes or workers)

    # -- phrases of several verdicts

    def how_busy(self) -> str:
        """Say how busy workers were."""
        return f"{counted(self.seen.workers, 'worker')} worked {self.busy_share:.0%} of the time."

    def what_workers_did(self) -> str:
        """Say how busy they were, and with what."""
        text = f"{self.how_busy()} A sample takes {readable_s(self.call_s)} of worker time"
        return f"{text}, {self.cpu_share:.0%} of it computing." if self.knows_cpu_time else f"{text}."

    def what_cpus_did(self) -> str:
        """Say who uses the CPUs, and who waits for one."""
        seen = self.seen
        text = f"Workers and training use {cpus_used(seen):.1f} of {counted(seen.cpus, 'usable CPU')}"
        if (others := cpus_of_others(seen)) >= 0.1:
            are_many = self.has_full_cpus and others >= CONTESTED * seen.cpus
            text += f", other programs {others:.1f}{'. Stop these programs first' * are_many}"
        if self.queued_share >= 0.01:
            text += f". Workers waited for a CPU {self.queued_share:.0%} of their time"
        if seen.throttled_s:
            text += f". The cgroup's CPU limit held processes back for {readable_s(seen.throttled_s)}"
        return f"{text}."

    def shorter(self, step_s: float) -> float | None:
        """Return it where that is shorter than steps are: one that is too long belies the window."""
        return step_s if step_s < self.seen.step_s else None

    def at_best(self, step_s: float) -> str:
        """Say how long a step may be, where that is shorter than it is: one that is too long belies the window."""
        return f"; at best {readable_s(step_s)} a step" if step_s < self.seen.step_s else ""

    def what_a_step_becomes(self, step_s: float) -> str:
        """Say how long a step will be, as surely as it is known."""
        seen, demand = self.seen, self.demand
        is_sure = step_s > demand.cpu_bound_s and (demand.is_ready_measured or step_s > demand.ready_s)
        about = "about" if is_sure else "at best"
        text = f"{about} {readable_s(step_s)} a step instead of {readable_s(seen.step_s)}"
        if step_s <= (1 + WAITS_ABOVE) * demand.ready_s:
            return f"{text}, as with data always ready ({seen.step_s / step_s:.2g}x)"
        return f"{text} ({seen.step_s / step_s:.2g}x); data always ready would mean {readable_s(demand.ready_s)}"


def _is_in_vain(few: Pace, many: Pace) -> bool:
    """Whether more workers brought next to nothing: noise, or a small part of what so many more should bring."""
    least = 1 + max(TOLERANCE, BRINGS_LITTLE * (many.workers / few.workers - 1))
    return many.samples_per_s <= least * few.samples_per_s
