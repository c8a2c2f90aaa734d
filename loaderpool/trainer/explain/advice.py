"""Changes that several verdicts advise, each with what it brings."""

from __future__ import annotations

from loaderpool.system.readable import counted, readable_s
from loaderpool.trainer.explain import changes
from loaderpool.trainer.explain.case import Case
from loaderpool.trainer.explain.demand import cpus_of_others, cpus_used

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
    return change, f"{expect}; {lines}" if expect else lines


def batched(case: Case) -> Advice | None:
    """Not where others have most of the CPUs: cheaper calls would give these to them."""
    if case.seen.calls_of != "sample" or cpus_of_others(case.seen) > cpus_used(case.seen):
        return None
    return changes.with_batch_fn(), "fewer calls, where one of NumPy's does what many of Python's do"


def cached(case: Case) -> Advice | None:
    """What the function gives is kept, where that may be."""
    if not case.seen.can_have_cache:
        return None
    ready = readable_s(case.demand.ready_s)
    return changes.with_cache(), f"fn is called once for each item; with data always ready a step is {ready}"


def more_generators(case: Case) -> tuple[str, str, str]:
    """Why more workers would have nothing to do, the change, and what it brings."""
    lanes = counted(case.seen.lanes, "generator")
    why = f"only {lanes} run{'s' * (case.seen.lanes == 1)} at once: more workers would have nothing to do"
    return why, changes.read_in_parts(), "as many generators at once as there are parts, up to cycle_length"


def fewer(case: Case) -> Advice | None:
    """As many workers as would be as fast; None: none are fewer."""
    pace = case.fewer_as_fast()
    if pace is None:
        return None
    expect = "the same rate, with the memory of fewer workers; more would not help"
    return with_workers(case, pace.workers, expect)
