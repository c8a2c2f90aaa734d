"""Changes that several verdicts advise, each with what it brings."""

from __future__ import annotations

import math

from loaderpool.errors import counted, readable_bytes, readable_s
from loaderpool.trainer.explain import changes
from loaderpool.trainer.explain.case import Case
from loaderpool.trainer.explain.demand import cpus_of_others, cpus_used
from loaderpool.trainer.explain.observed import CACHE_TAKES, CHEAP_CALL_S, FEEDS, GAINS

Advice = tuple[str, str]
NOTHING: Advice = ("", "")


def with_workers(case: Case, workers: int, expect: str) -> Advice:
    """Another number of workers; nothing to paste where it is found by itself."""
    most = case.seen.most_workers
    if not most:
        return changes.with_workers(workers), expect
    if workers > most:
        return changes.with_most_workers(workers), expect
    return "", f'workers="auto" tries {counted(workers, "worker")} by itself: {expect}'


def cheaper(case: Case) -> Advice:
    """Less work for each sample, by what there is for it."""
    change, expect = cached(case) or batched(case) or NOTHING
    lines = "`loaderpool profile` shows which lines of the function take the time"
    return change, f"{expect}. {lines}" if expect else lines


def batched(case: Case) -> Advice | None:
    """Where calls cost as much as samples.

    Not where others have most of the CPUs: cheaper calls would give these to them.
    """
    if case.seen.calls_of != "sample" or cpus_of_others(case.seen) > cpus_used(case.seen):
        return None
    if case.call_s >= CHEAP_CALL_S:
        return None
    return changes.with_batch_fn(), "fewer calls: one NumPy call can replace many Python calls"


def cached(case: Case) -> Advice | None:
    """What the function gives is kept, where that may be, memory is enough, and another epoch may read it."""
    seen = case.seen
    if not seen.can_have_cache or not seen.items or not seen.bytes or not is_worth_it(case, case.demand.ready_s):
        return None
    needed, room = seen.items * seen.bytes / max(1, seen.samples), CACHE_TAKES * seen.room_bytes
    if needed > room:
        return None
    expect = (
        f"after the first epoch, at best {readable_s(case.demand.ready_s)} a step, as with data always ready; "
        f"{seen.items:,} items take {readable_bytes(needed)}, and half of the free memory is {readable_bytes(room)}"
    )
    return changes.with_cache(), expect


def is_worth_it(case: Case, step_s: float) -> bool:
    """Whether a step of that length is shorter by more than a little; one that is longer belies the window."""
    return not step_s <= case.seen.step_s < GAINS * step_s


def more_generators(case: Case) -> tuple[str, str, str]:
    """Why more workers would have nothing to do, the change, and what it brings."""
    lanes = counted(case.seen.lanes, "generator")
    why = f"Only {lanes} run{'s' * (case.seen.lanes == 1)} at once, so more workers would have nothing to do."
    return why, changes.read_in_parts(), "as many generators at once as there are parts, up to cycle_length"


def read_in_parts(case: Case) -> tuple[str, str, float | None]:
    """Workers read, too: the change, what it brings, and how long a step is then."""
    seen, demand = case.seen, case.demand
    both_s = seen.step_s + demand.making_s
    workers = max(seen.workers, min(math.ceil(FEEDS * both_s / demand.target_s), math.ceil(seen.cpus)))
    step_s = case.shorter(max(demand.target_s, both_s / workers))
    expect = (
        f"{counted(workers, 'worker')} read in parallel, {readable_s(both_s)} of reading and processing for a batch"
    )
    if step_s is not None:
        expect += f"; at best {readable_s(step_s)} a step, with at least as many parts"
    is_set = workers > seen.workers and not seen.most_workers
    return changes.read_in_parts(workers if is_set else 0), expect, step_s


def fewer(case: Case) -> Advice | None:
    """As many workers as would be as fast; None: none are fewer."""
    pace = case.fewer_as_fast()
    if pace is None:
        return None
    return with_workers(case, pace.workers, "the same rate, with less memory; more workers would not help")
