"""Which verdict the numbers of a window give: a decision procedure, each branch with its evidence.

| fewer than 20 steps | WARM_UP |
| waited below 5 % | BATCHES_KEPT, NOISY_NEIGHBOUR, BATCH_OVERHEAD, COMPUTE_BOUND |
| waited for the first batch only, and not for much longer since | START_UP |
| workers=0 | BATCH_OVERHEAD, CPUS_FULL, TOO_FEW_WORKERS |
| workers are busy | MEMORY_BANDWIDTH, CPUS_FULL, STRAGGLERS, SOURCE_LIMIT, SOURCE_WAITS, TOO_FEW_WORKERS |
| workers are idle | what is before, in or behind the ring; or as if they were busy, where they are too slow anyhow |
| nothing of that, or CPU time was not measured | INCOMPLETE; in the first seconds WARM_UP |
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable

from loaderpool.errors import counted, readable_bytes, readable_s
from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.trainer.explain import advice, changes
from loaderpool.trainer.explain.case import Case
from loaderpool.trainer.explain.demand import cpus_of_others
from loaderpool.trainer.explain.observed import (
    BLOCKS_BELOW,
    CHEAP_BATCH_S,
    CLEAR_CALLS,
    CLEAR_S,
    CONTESTED,
    COPIED_OFTEN,
    FULL,
    GAINS,
    HEAVY_BYTES_PER_S,
    LEAST_STEPS,
    MOST_OF_IT,
    MOST_TIMES_LARGER,
    SLOW_CALLS_ARE,
    SLOWED_DOWN,
    TOLERANCE,
    USUALLY_LENT,
    WAITS_ABOVE,
    Observed,
    Pace,
)


class Verdict(enum.Enum):
    """Why training waits for data, or why it does not, with the word for it."""

    COMPUTE_BOUND = "compute-bound"
    TOO_FEW_WORKERS = "too few workers"
    CPUS_FULL = "CPUs full"
    SOURCE_WAITS = "source waits"
    SOURCE_LIMIT = "limit of the source"
    MEMORY_BANDWIDTH = "memory bandwidth"
    MEMORY_LIMIT = "memory limit"
    STRAGGLERS = "stragglers"
    BATCH_OVERHEAD = "batch overhead"
    BATCHES_KEPT = "batches are kept"
    STREAM_READER = "stream's reader"
    NOISY_NEIGHBOUR = "noisy neighbour"
    EPOCH_START = "epoch start"
    START_UP = "start-up"
    WARM_UP = "warm-up"
    INCOMPLETE = "incomplete"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A verdict with its evidence, and what to do about it."""

    verdict: Verdict
    why: str
    change: str = ""  # code that can be pasted; empty: there is nothing to change, or it cannot be told
    expect: str = ""  # what the change brings; empty: that cannot be told
    step_s: float | None = None  # how long a step is with the change; None: that cannot be told


_Branch = Callable[[Case], Finding | None]


def find_verdict(observed: Observed, waits_above: float = WAITS_ABOVE) -> Finding:
    """Return the first verdict whose evidence the numbers are. Equal numbers give an equal finding.

    Args:
        observed: the window.
        waits_above: the share of the time from which on waiting is to be explained.
    """
    if observed.steps < LEAST_STEPS or observed.seconds <= 0:
        return Finding(Verdict.WARM_UP, f"{counted(observed.steps, 'step')} so far, and {LEAST_STEPS} are needed")
    case = Case.of(observed)
    findings = (branch(case) for branch in _branches(case, waits_above))
    found = next((finding for finding in findings if finding is not None), None) or _incomplete(case)
    return _without_small_gain(case, found)


def _without_small_gain(case: Case, found: Finding) -> Finding:
    """Advise no change for what noise hides; fewer workers are advised for their memory."""
    if found.verdict is Verdict.COMPUTE_BOUND or found.step_s is None or advice.is_worth_it(case, found.step_s):
        return found
    times = f"{GAINS:.2f} times"
    return dataclasses.replace(found, change="", expect=f"no known change makes steps {times} as fast", step_s=None)


def _branches(case: Case, waits_above: float) -> Iterable[_Branch]:
    if case.seen.wait_share < waits_above:
        return _FED
    if not case.seen.workers:
        return _IN_PROCESS
    if case.busy_share >= FULL:
        return (_start_up, *_BUSY)
    return (_start_up, *_IDLE, *(_BUSY if case.is_outpaced else ()))


# -- data are ready


def _noisy_neighbour(case: Case) -> Finding | None:
    """The consumer could have gone on, and had no CPU."""
    seen = case.seen
    least_s = max(CONTESTED * seen.whole_s, MOST_OF_IT * seen.wait_s)
    if seen.trainer_queued_s < least_s:
        return None
    share = seen.trainer_queued_s / seen.whole_s
    quiet_s = (1 - min(share, 0.99)) * seen.step_s
    workers = case.enough_workers(quiet_s)
    why = f"The training thread waited for a CPU {share:.0%} of the time. {case.what_cpus_did()}"
    if workers == seen.workers or seen.cpu_s < cpus_of_others(seen) * seen.whole_s:
        return Finding(Verdict.NOISY_NEIGHBOUR, why)
    expect = f"at best {readable_s(quiet_s)} a step, if training has a CPU to itself"
    return Finding(Verdict.NOISY_NEIGHBOUR, why, *advice.with_workers(case, workers, expect))


def _batch_overhead(case: Case) -> Finding | None:
    """Steps are so short that the way of a batch from process to process is a good part of them."""
    seen = case.seen
    if seen.step_s >= CHEAP_BATCH_S or (not seen.workers and seen.wait_share < WAITS_ABOVE):
        return None
    why = (
        f"A step takes {readable_s(seen.step_s)}, and loading its batch {readable_s(case.demand.making_s)}. Both are "
        "so short that transferring each batch is a large part of the step."
    )
    if seen.by_tf_data:
        return Finding(Verdict.BATCH_OVERHEAD, why, changes.without_tf_data(), "less overhead for each batch")
    if seen.calls_of != "sample":
        return Finding(Verdict.BATCH_OVERHEAD, why)
    if not seen.workers:
        return Finding(Verdict.BATCH_OVERHEAD, why, *(advice.batched(case) or advice.NOTHING))
    times = min(MOST_TIMES_LARGER, 2 ** math.ceil(math.log2(CHEAP_BATCH_S / seen.step_s)))
    rows = max(2, times * round(seen.samples / seen.steps))
    return Finding(Verdict.BATCH_OVERHEAD, why, changes.with_batch_size(rows), f"{times} times fewer batches")


def _tiny_batches(case: Case) -> Finding | None:
    """Making them takes so little that workers are busy with handing them over, whatever the CPUs do."""
    return _batch_overhead(case) if case.demand.making_s < CHEAP_BATCH_S / 3 else None


def _compute_bound(case: Case) -> Finding:
    """Nothing is to be gained from data; perhaps some workers can be given back."""
    seen = case.seen
    waited = readable_s(seen.wait_s / seen.steps)
    why = f"Data was ready: a step takes {readable_s(seen.step_s)}, {waited} of it waiting."
    if not seen.workers:
        return Finding(Verdict.COMPUTE_BOUND, why)
    why += f" {case.what_workers_did()}"
    workers = case.enough_workers(seen.step_s)
    if workers == seen.workers or seen.most_workers:  # "auto" has taken back what is worth it
        return Finding(Verdict.COMPUTE_BOUND, why)
    expect = f"the same step time, without the memory of {counted(seen.workers - workers, 'worker')}"
    return Finding(Verdict.COMPUTE_BOUND, why, changes.with_workers(workers), expect, seen.step_s)


# -- the beginning

# Of a shorter load nothing is said: beside it interpreters take longer to start.
_LOAD_TOLD_FROM_S = 0.2


def _start_up(case: Case) -> Finding | None:
    seen = case.seen
    if not seen.start_s or case.start_wait_share >= WAITS_ABOVE:
        return None
    later_s = (seen.seconds - seen.start_s) / seen.steps
    why = f"The first batch came after {readable_s(seen.start_s)}. "
    if seen.load_s >= _LOAD_TOLD_FROM_S:
        why += (
            f"Loading the function and its imports took {readable_s(seen.load_s)}. Then workers started and loaded the "
            "first sample."
        )
    else:
        why += "In that time workers start, import modules and load the first sample."
    expect = f"nothing to change: it happens once, and later steps take {readable_s(later_s)}"
    return Finding(Verdict.START_UP, why, expect=expect, step_s=later_s)


# -- workers=0: what is waited for is the making


def _in_process_workers(case: Case) -> Finding:
    seen, demand = case.seen, case.demand
    making = f"With workers=0, batches are loaded between steps ({readable_s(demand.making_s)} each)."
    workers = case.at_most_lanes(demand.least_workers())
    step_s = demand.step_s(workers)
    if step_s > (1 - TOLERANCE) * seen.step_s and workers < demand.least_workers():
        lanes, change, expect = advice.more_generators(case)
        return Finding(Verdict.TOO_FEW_WORKERS, f"{making} {lanes}", change, expect)
    if step_s > (1 - TOLERANCE) * seen.step_s:
        return Finding(Verdict.CPUS_FULL, f"{making} {case.what_cpus_did()}", *advice.cheaper(case))
    why = f"{making} Without loading, a step takes {readable_s(demand.ready_s)}."
    expect = case.what_a_step_becomes(step_s)
    return Finding(Verdict.TOO_FEW_WORKERS, why, changes.with_workers(workers), expect, step_s)


# -- workers are busy


def _unknown_cpu_time(case: Case) -> Finding | None:
    if case.knows_cpu_time:
        return None
    why = f"{case.what_workers_did()} Their CPU time was not measured, so it is unknown whether they compute or wait."
    return Finding(Verdict.INCOMPLETE, why)


def _memory_bandwidth(case: Case) -> Finding | None:
    """The same work takes more CPU time beside more workers, and many bytes go through memory."""
    seen = case.seen
    if not case.computes or case.bytes_per_s < HEAVY_BYTES_PER_S:
        return None
    now = Pace(seen.workers, seen.samples_per_s, seen.cpu_s / max(1, seen.samples))
    few = next((pace for pace in case.slower_paces() if pace.cpu_s_per_sample), now)
    many = case.more_as_slow() or now  # which was tried in vain
    growth = many.cpu_s_per_sample / few.cpu_s_per_sample
    if growth < SLOWED_DOWN:
        return None
    why = (
        f"With {counted(many.workers, 'worker')} a sample costs {growth:.2f} times the CPU time it costs with "
        f"{few.workers}, at {case.bytes_per_s / 1e9:.1f} GB/s of finished batches. Memory bandwidth is most likely "
        "full. Smaller dtypes (uint8 instead of float32) and a parameter named `out` help more than workers."
    )
    return Finding(Verdict.MEMORY_BANDWIDTH, why, *(advice.fewer(case) or advice.NOTHING))


def _cpus_full(case: Case) -> Finding | None:
    if not case.has_full_cpus:
        return None
    return Finding(Verdict.CPUS_FULL, f"{case.what_cpus_did()} {case.what_workers_did()}", *advice.cheaper(case))


def _source_limit(case: Case) -> Finding | None:
    """Fewer workers were as fast, or more no faster, and CPUs are free: they wait for something that they share."""
    seen, other = case.seen, case.fewer_about_as_fast()
    if other is None and not case.computes:  # those that compute may have had no CPUs then
        other = case.more_as_slow()
    rate = f"{seen.samples_per_s:,.3g} samples/s with {counted(seen.workers, 'worker')}"
    if other is not None:
        beside = f"{rate}, {other.samples_per_s:,.3g} with {other.workers}"
    elif seen.in_vain > seen.workers and not case.computes:
        beside = f'{rate}, and no more with the {seen.in_vain} that workers="auto" tried'
    else:
        return None
    shared = "Something that workers share is the limit (a disk, a network or a lock)"
    why = f"{beside}, although CPUs are free. {shared}.{_reads(case)}"
    return Finding(Verdict.SOURCE_LIMIT, why, *(advice.cached(case) or advice.fewer(case) or advice.NOTHING))


def _source_waits(case: Case) -> Finding | None:
    """Workers wait for anything but a CPU: more calls at the same time."""
    if case.computes:
        return None
    seen, demand = case.seen, case.demand
    why = f"{case.what_workers_did()} The rest is waiting for a disk, a server or a lock.{_reads(case)}"
    threads = demand.least_threads()
    if seen.can_have_threads and case.cpu_share < BLOCKS_BELOW and threads > seen.threads:
        step_s = demand.step_s(seen.workers, threads)
        expect = _IF_SERVED + case.what_a_step_becomes(step_s)
        return Finding(Verdict.SOURCE_WAITS, why, changes.with_threads(threads), expect, step_s)
    return _more_workers(case, Verdict.SOURCE_WAITS, why, _IF_SERVED)


def _too_few_workers(case: Case) -> Finding:
    provided = "if memory bandwidth is not full, " if case.bytes_per_s >= HEAVY_BYTES_PER_S else ""
    why = f"{case.what_workers_did()} {case.what_cpus_did()}"
    return _more_workers(case, Verdict.TOO_FEW_WORKERS, why, provided)


def _more_workers(case: Case, verdict: Verdict, why: str, provided: str = "") -> Finding:
    workers = case.at_most_lanes(max(case.demand.least_workers(), case.seen.workers + 1))
    if workers <= case.seen.workers:
        lanes, change, expect = advice.more_generators(case)
        return Finding(verdict, f"{why} {lanes}", change, expect)
    if workers > MAX_WORKERS:
        return Finding(verdict, f"{why} Training needs {workers:,} workers, and a pool has at most {MAX_WORKERS:,}.")
    step_s = case.demand.step_s(workers)
    expect = provided + case.what_a_step_becomes(step_s)
    return Finding(verdict, why, *advice.with_workers(case, workers, expect), step_s)


# -- workers are idle, and yet training waits


def _epoch_start(case: Case) -> Finding | None:
    seen = case.seen
    if seen.epoch_starts_s < MOST_OF_IT * (seen.wait_s - seen.start_s):
        return None
    later_s = (seen.seconds - seen.epoch_starts_s) / seen.steps
    why = (
        f"Training waited {readable_s(seen.epoch_starts_s)} for the first batches of {counted(seen.epochs, 'epoch')}, "
        f"of {readable_s(seen.wait_s)} in all."
    )
    if not seen.by_tf_data or seen.is_stream:
        return Finding(Verdict.EPOCH_START, why)
    expect = f"at best {readable_s(later_s)} a step, because workers prefetch batches of the next epoch"
    return Finding(Verdict.EPOCH_START, why, changes.without_epoch_ends(), expect, later_s)


def _stream_reader(case: Case) -> Finding | None:
    seen = case.seen
    if not seen.is_stream or seen.idle_s < 1e-9:
        return None
    share = seen.idle_s / (seen.busy_s + seen.idle_s)
    why = (
        f"Workers were idle {share:.0%} of the time, because the stream had no items ready. Reading a batch takes up "
        f"to {readable_s(seen.step_s)}."
    )
    change, expect, step_s = advice.read_in_parts(case)
    return Finding(Verdict.STREAM_READER, why, change, expect, step_s)


def _stragglers(case: Case) -> Finding | None:
    """What a few calls took explains the waiting: the order stands until each is over.

    A call that had no CPU for a while is slow, too; but not the item.
    """
    seen = case.seen
    if not case.has_slow_calls or case.would_hide_slow_calls:
        return None
    median = readable_s(seen.calls.quantile_ns(0.5) / 1e9)
    why = (
        f"Calls longer than 8 times the median ({median}) exceeded it by {readable_s(seen.slow_s)} in total, and "
        f"training waited {readable_s(case.steady_wait_s)}. {case.how_busy()}"
    )
    step_s = case.demand.step_s(seen.workers)  # in any order
    if case.is_outpaced and step_s < GAINS * seen.step_s:  # then, too: what helps is what helps any work
        more = _source_waits(case) or _too_few_workers(case)
        if more.step_s is not None and more.step_s * GAINS < step_s:
            provided = "" if case.computes else _IF_SERVED
            expect = f"{provided}at best {readable_s(more.step_s)} a step, because slow calls still delay later batches"
            return Finding(Verdict.STRAGGLERS, why, more.change, expect, more.step_s)
    if not seen.deterministic:
        return Finding(Verdict.STRAGGLERS, why)
    expect = f"slow calls no longer delay other batches{case.at_best(step_s)}"
    return Finding(Verdict.STRAGGLERS, why, changes.in_any_order(), expect, case.shorter(step_s))


def _stragglers_beside_work(case: Case) -> Finding | None:
    """Workers have enough to do, and slow calls are a good part of it."""
    slow_s = case.seen.slow_s - case.seen.queued_s
    return _stragglers(case) if slow_s >= SLOW_CALLS_ARE * case.seen.busy_s else None


def _batches_kept(case: Case) -> Finding | None:
    """Batches are copied out as the consumer keeps those before; that takes time, or workers lack the slots."""
    seen = case.seen
    if seen.copied < COPIED_OFTEN * seen.steps or seen.slots_lent <= USUALLY_LENT:
        return None
    why = (
        f"Training keeps references to {seen.slots_lent} of {counted(seen.slots, 'batch buffer')}, so {seen.copied:,} "
        f"of {seen.steps:,} batches were copied ({readable_s(seen.copy_s / seen.steps)} a step). Drop old batches, or "
        "keep copies of the parts that you need."
    )
    return Finding(Verdict.BATCHES_KEPT, why)


def _copies_all_the_time(case: Case) -> Finding | None:
    """Data are ready, and yet handing them over takes its time."""
    return _batches_kept(case) if case.seen.copy_s >= WAITS_ABOVE * case.seen.seconds else None


def _memory_limit(case: Case) -> Finding | None:
    seen = case.seen
    if not case.lacks_slots:
        return None
    why = (
        f"Limits.memory allows {counted(seen.slots, 'batch buffer')} of {readable_bytes(seen.slot_bytes)}. Workers and "
        f"training need {seen.slots_wanted}. {case.how_busy()}"
    )
    step_s = case.demand.step_s(seen.workers)
    expect = f"workers do not wait for a free batch buffer{case.at_best(step_s)}"
    change = changes.with_memory(seen.slots_wanted * seen.slot_bytes)
    return Finding(Verdict.MEMORY_LIMIT, why, change, expect, case.shorter(step_s))


def _incomplete(case: Case) -> Finding:
    """In the first seconds a ring is still full from the beginning, and slow calls are not told from others yet."""
    seen = case.seen
    calls = seen.samples if seen.calls_of == "sample" else seen.steps
    if seen.seconds < CLEAR_S or (calls < CLEAR_CALLS and seen.seconds < 3 * CLEAR_S):
        sofar = f"{readable_s(seen.seconds)} and {counted(calls, 'call')}"
        return Finding(Verdict.WARM_UP, f"{sofar} so far, and {CLEAR_S:.0f} s and {CLEAR_CALLS} calls are needed")
    return Finding(Verdict.INCOMPLETE, f"{case.how_busy()} Training waited, and the measurements do not show why.")


# In this order: the one whose evidence is most its own comes first.
_FED: tuple[_Branch, ...] = (_copies_all_the_time, _noisy_neighbour, _batch_overhead, _compute_bound)
_IN_PROCESS: tuple[_Branch, ...] = (_start_up, _batch_overhead, _in_process_workers)
_BUSY: tuple[_Branch, ...] = (
    _tiny_batches, _unknown_cpu_time, _memory_bandwidth, _cpus_full, _stragglers_beside_work, _source_limit,
    _source_waits, _too_few_workers,
)  # fmt: skip
_IDLE: tuple[_Branch, ...] = (
    _epoch_start, _stream_reader, _copies_all_the_time, _stragglers, _batches_kept, _memory_limit, _noisy_neighbour,
    _batch_overhead,
)  # fmt: skip


_IF_SERVED = "if the source can serve more calls at once, "


def _reads(case: Case) -> str:
    seen = case.seen
    if not seen.read_bytes:
        return ""
    return f" Workers read {readable_bytes(seen.read_bytes / seen.seconds)} a second from disks."
