"""Decision procedure from the numbers of a window to a verdict, with the evidence of each branch.

`_when_fed`, `_when_waiting`, `_when_busy` and `_when_idle` yield verdicts in order of priority. The
first one is used.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from loaderpool.config import MAX_WORKERS
from loaderpool.errors import counted, readable_bytes, readable_s
from loaderpool.trainer.explain.window import (
    CONTESTED,
    FEWER_BY,
    FULL,
    LEAST_STEPS,
    TOLERANCE,
    WAITS_ABOVE,
    Window,
)

# A change must make steps at least this many times as fast. A smaller effect is within the noise.
_GAINS = 1.05
# Time and number of calls after which the state is clear. Before that, slow calls are not counted,
# and slots are still full from the start.
_CLEAR_S, _CLEAR_CALLS = 10.0, 200
# A call shorter than this costs about as much as its sample. One call for many samples is cheaper.
_CHEAP_CALL_S = 20e-6
# A batch made in less time costs about as much to deliver (some 20 µs to 100 µs) as to make.
_CHEAP_BATCH_S = 300e-6
# Factor by which larger batches are advised. A larger one would change the training.
_TIMES_LARGER = 4
# Share of the free memory that a cache may take. With more, the training could run out of memory
# when it grows.
_CACHE_TAKES = 0.5
# Share of CPU time below which a function hardly computes, so threads of a worker do not block each
# other.
_BLOCKS_BELOW = 0.25
# Growth of the CPU time per sample from which other workers are the reason, and not chance.
_SLOWED_DOWN = 1.25
# One core copies some GB per second, a machine some ten. A function reads and writes each delivered
# byte several times.
_HEAVY_BYTES_PER_S = 0.5e9
# Share of a wait from which a cause explains it. No other cause can have a larger share.
_MOST_OF_IT = 0.5
# Share of the waiting from which slow calls explain it, if workers are idle. Not counted are calls
# that were slow before the median was known, and calls in progress. Smaller: causes that are not
# counted may have a larger share.
_SLOW_CALLS_EXPLAIN = 1 / 3
# Share of the work below which slow calls are no reason of their own, if workers have enough to do.
_SLOW_CALLS_ARE = 0.25
# Batches in use by an ordinary consumer: the present one, and some in tf.data or on their way to a
# device. A consumer with more keeps batches.
_USUALLY_LENT = 4
# Share of the steps from which copied batches count as a habit.
_COPIED_OFTEN = 0.1
_READ_IN_PARTS = (
    "lp.Loader.from_generator(read_part, shards=parts)  "
    "# read_part(part) yields the items of one part"
)
_SHARED = "Something that workers share is the limit (a disk, a network or a lock)"
_IF_SERVED = "if the source can serve more calls at once, "


class Verdict(enum.Enum):
    """Reasons why training waits for data, or does not. The value is the name for users."""

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


class Finding(NamedTuple):
    """A verdict with its evidence and advice."""

    verdict: Verdict
    why: str
    change: str = ""  # code to paste; empty: nothing to change, or unknown
    expect: str = ""  # effect of the change; empty: unknown
    expected_step_s: float | None = None  # length of a step with the change; None: unknown


_Advice = tuple[str, str]  # a change and its effect


def find_verdict(seen: Window, waits_above: float = WAITS_ABOVE) -> Finding:
    """Return the first verdict that the numbers support.

    A wait is explained if it is at least the share `waits_above` of the time.
    """
    if seen.steps < LEAST_STEPS or seen.seconds <= 0:
        return Finding(
            Verdict.WARM_UP, f"{counted(seen.steps, 'step')} so far, and {LEAST_STEPS} are needed"
        )
    found = next(_when_fed(seen) if seen.wait_share < waits_above else _when_waiting(seen))
    expected_s = found.expected_step_s
    # Verdicts that advise fewer workers, which are as fast.
    is_for_memory = found.verdict in (Verdict.COMPUTE_BOUND, Verdict.SOURCE_LIMIT)
    if is_for_memory or expected_s is None or _is_worth_it(seen, expected_s):
        return found
    return Finding(
        found.verdict, found.why, expect=f"no known change makes steps {_GAINS:.2f} times as fast"
    )


# -- branches, in order: the verdict with the most specific evidence comes first --


def _when_fed(seen: Window) -> Iterator[Finding]:
    """Yield verdicts for a training that has its data ready."""
    if seen.copy_s >= WAITS_ABOVE * seen.seconds:  # data is ready, but its delivery takes time
        yield from _batches_kept(seen)
    yield from _noisy_neighbour(seen)
    if seen.workers:
        yield from _batch_overhead(seen)
    yield _compute_bound(seen)


def _when_waiting(seen: Window) -> Iterator[Finding]:
    yield from _start_up(seen)
    if not seen.workers:
        yield from _batch_overhead(seen)
        yield _in_process(seen)
    elif seen.busy_share < FULL:
        yield from _when_idle(seen)
    if seen.busy_share >= FULL or seen.is_outpaced:
        yield from _when_busy(seen)
    yield _incomplete(seen)


def _when_busy(seen: Window) -> Iterator[Finding]:
    if seen.making_s < _CHEAP_BATCH_S / 3:  # workers are busy with transfers, whatever the CPUs do
        yield from _batch_overhead(seen)
    if not seen.cpu_s:
        unknown = "Their CPU time was not measured, so it is unknown whether they compute or wait."
        yield Finding(Verdict.INCOMPLETE, f"{_what_workers_did(seen)} {unknown}")
    yield from _memory_bandwidth(seen)
    if seen.has_full_cpus:
        yield Finding(
            Verdict.CPUS_FULL, f"{_what_cpus_did(seen)} {_what_workers_did(seen)}", *_cheaper(seen)
        )
    yield from _tried_limit(seen)
    if seen.slow_s - seen.queued_s >= _SLOW_CALLS_ARE * seen.busy_s:
        yield from _stragglers(seen)
    yield from _source_limit(seen)
    yield _more_calls(seen)


def _when_idle(seen: Window) -> Iterator[Finding]:
    """Yield verdicts for a training that waits although workers have nothing to do."""
    if seen.epoch_starts_s >= _MOST_OF_IT * (seen.wait_s - seen.start_s):
        yield _epoch_start(seen)
    if seen.is_stream and seen.idle_s >= 1e-9:
        yield _stream_reader(seen)
    yield from _batches_kept(seen)
    yield from _stragglers(seen)
    yield from _memory_limit(seen)
    yield from _noisy_neighbour(seen)
    yield from _batch_overhead(seen)


# -- texts of several verdicts --


def _how_busy(seen: Window) -> str:
    return f"{counted(seen.workers, 'worker')} worked {seen.busy_share:.0%} of the time."


def _what_workers_did(seen: Window) -> str:
    text = f"{_how_busy(seen)} A sample takes {readable_s(seen.call_s)} of worker time"
    return f"{text}, {seen.cpu_share:.0%} of it computing." if seen.cpu_s else f"{text}."


def _what_cpus_did(seen: Window) -> str:
    text = f"Workers and training use {seen.cpus_used:.1f} of {counted(seen.cpus, 'usable CPU')}"
    if (others := seen.cpus_of_others) >= 0.1:
        are_many = seen.has_full_cpus and others >= CONTESTED * seen.cpus
        text += f", other programs {others:.1f}{'. Stop these programs first' * are_many}"
    if seen.queued_share >= 0.01:
        text += f". Workers waited for a CPU {seen.queued_share:.0%} of their time"
    return f"{text}."


def _what_a_step_becomes(seen: Window, step_s: float) -> str:
    """Return a text with the expected length of a step, and how certain it is."""
    is_sure = step_s > seen.cpu_bound_s and (seen.is_ready_measured or step_s > seen.ready_s)
    about = "about" if is_sure else "at best"
    text = f"{about} {readable_s(step_s)} a step instead of {readable_s(seen.step_s)}"
    if step_s <= (1 + WAITS_ABOVE) * seen.ready_s:
        return f"{text}, as with data always ready ({seen.step_s / step_s:.2g}x)"
    return (
        f"{text} ({seen.step_s / step_s:.2g}x); "
        f"data always ready would mean {readable_s(seen.ready_s)}"
    )


# -- changes that several verdicts advise --


def _with_workers(seen: Window, workers: int, expect: str) -> _Advice:
    """Advise another number of workers.

    There is no code to paste if `workers="auto"` will find that number.
    """
    if not seen.autotuned.most:
        return f"lp.Loader(..., workers={workers})", expect
    if workers > seen.autotuned.most:
        return f"lp.Loader(..., workers=(1, {workers}))", expect
    return "", f'workers="auto" tries {counted(workers, "worker")} by itself: {expect}'


def _fewer_workers(seen: Window, workers: int) -> _Advice:
    expect = (
        f"the same step time, without the memory of {counted(seen.workers - workers, 'worker')}"
    )
    return f"lp.Loader(..., workers={workers})", expect


def _more_workers(seen: Window, verdict: Verdict, why: str, provided: str = "") -> Finding:
    # More workers than generators would have nothing to do.
    workers = min(max(seen.least_workers, seen.workers + 1), seen.lanes or MAX_WORKERS)
    if workers <= seen.workers:
        return _more_generators(seen, verdict, why) if seen.lanes else Finding(verdict, why)
    step_s = seen.step_with(workers)
    expect = provided + _what_a_step_becomes(seen, step_s)
    return Finding(verdict, why, *_with_workers(seen, workers, expect), step_s)


def _more_generators(seen: Window, verdict: Verdict, why: str) -> Finding:
    lanes = f"{counted(seen.lanes, 'generator')} run{'s' * (seen.lanes == 1)}"
    why = f"{why} Only {lanes} at once, so more workers would have nothing to do."
    return Finding(
        verdict,
        why,
        _READ_IN_PARTS,
        "as many generators at once as there are parts, up to cycle_length",
    )


def _cheaper(seen: Window) -> _Advice:
    """Advise a change that makes samples cheaper, and the profiler."""
    change, expect = _batched(seen) or _cached(seen) or ("", "")
    lines = "`loaderpool profile` shows which lines of the function take the time"
    return change, f"{expect}. {lines}" if expect else lines


def _batched(seen: Window) -> _Advice | None:
    """Advise `batch_fn` if calls cost as much as samples."""
    if seen.calls_of != "sample" or not seen.takes_batch_fn or seen.call_s >= _CHEAP_CALL_S:
        return None
    change = (
        "lp.Loader(..., batch_fn=make_batch)  "
        "# instead of fn: make_batch(items) returns a whole batch"
    )
    return change, "fewer calls: one NumPy call can replace many Python calls"


def _cached(seen: Window) -> _Advice | None:
    """Advise a cache if one is possible and memory is sufficient."""
    nbytes = seen.items_to_cache * seen.bytes / max(1, seen.samples)
    if (
        not nbytes
        or nbytes > _CACHE_TAKES * seen.room_bytes
        or not _is_worth_it(seen, seen.ready_s)
    ):
        return None
    expect = (
        f"after the first epoch, at best {readable_s(seen.ready_s)} a step, as with data always "
        f"ready; {seen.items_to_cache:,} items take {readable_bytes(nbytes)}"
    )
    return 'lp.Loader(..., cache="memory")  # a random part of fn goes into augment=', expect


def _is_worth_it(seen: Window, step_s: float) -> bool:
    """Return True if a step of `step_s` is noticeably shorter than the measured step.

    Also True if it is longer, because such a prediction contradicts the measurement.
    """
    return not step_s <= seen.step_s < _GAINS * step_s


# -- one function per verdict --


def _noisy_neighbour(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if the consumer was ready to run but had no CPU."""
    if seen.trainer_queued_s < max(CONTESTED * seen.whole_s, _MOST_OF_IT * seen.wait_s):
        return
    share = seen.trainer_queued_s / seen.whole_s
    why = f"The training thread waited for a CPU {share:.0%} of the time. {_what_cpus_did(seen)}"
    yield Finding(Verdict.NOISY_NEIGHBOUR, why)


def _batch_overhead(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if the transfer of batches between processes is a large part of the steps."""
    if seen.step_s >= _CHEAP_BATCH_S:
        return
    why = (
        f"A step takes {readable_s(seen.step_s)}, and loading its batch "
        f"{readable_s(seen.making_s)}. Both are so short that transferring each batch is a large "
        "part of the step."
    )
    change = expect = ""
    if seen.by_tf_data:
        change = (
            "model.fit(loader.for_keras())  "
            "# instead of as_dataset(); in your own loop: loader.tensors()"
        )
        expect = "less overhead for each batch"
    elif not seen.workers:
        change, expect = _batched(seen) or ("", "")
    elif seen.calls_of == "sample":
        argument, limits = seen.batch_limit
        if limits:
            larger = argument.format(*(_TIMES_LARGER * limit for limit in limits))
            change = f"lp.Loader(..., {larger})  # if the training allows larger batches"
            expect = f"{_TIMES_LARGER} times fewer batches"
    yield Finding(Verdict.BATCH_OVERHEAD, why, change, expect)


def _compute_bound(seen: Window) -> Finding:
    """Return the verdict that faster data would gain nothing. Perhaps advise fewer workers."""
    waited = readable_s(seen.wait_s / seen.steps)
    why = f"Data was ready: a step takes {readable_s(seen.step_s)}, {waited} of it waiting."
    if not seen.workers:
        return Finding(Verdict.COMPUTE_BOUND, why)
    why += f" {_what_workers_did(seen)}"
    workers = seen.enough_workers
    # True: slow calls are hidden by workers that continue in the meantime.
    has_slow_calls = seen.slow_s > WAITS_ABOVE * seen.seconds
    # "auto" has removed superfluous workers already.
    is_known = seen.cpu_s and not seen.autotuned.most
    if workers >= seen.workers or has_slow_calls or not is_known:
        return Finding(Verdict.COMPUTE_BOUND, why)
    return Finding(Verdict.COMPUTE_BOUND, why, *_fewer_workers(seen, workers), seen.step_s)


def _start_up(seen: Window) -> Iterator[Finding]:
    if not seen.start_s or seen.steady_wait_share >= WAITS_ABOVE:
        return
    later_s = (seen.seconds - seen.start_s) / seen.steps
    why = (
        f"The first batch came after {readable_s(seen.start_s)}. In that time workers start, "
        "import modules and load the first sample."
    )
    expect = f"nothing to change: it happens once, and later steps take {readable_s(later_s)}"
    yield Finding(Verdict.START_UP, why, expect=expect, expected_step_s=later_s)


def _in_process(seen: Window) -> Finding:
    """Return a verdict for workers=0: the waiting time is the time for making batches."""
    making = f"With workers=0, batches are loaded between steps ({readable_s(seen.making_s)} each)."
    workers = min(seen.least_workers, seen.lanes or seen.least_workers)
    if seen.step_with(workers) > (1 - TOLERANCE) * seen.step_s:
        if workers < seen.least_workers:
            return _more_generators(seen, Verdict.TOO_FEW_WORKERS, making)
        return Finding(Verdict.CPUS_FULL, f"{making} {_what_cpus_did(seen)}", *_cheaper(seen))
    why = f"{making} Without loading, a step takes {readable_s(seen.ready_s)}."
    return _more_workers(seen, Verdict.TOO_FEW_WORKERS, why)


def _memory_bandwidth(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if CPU time per sample grows with the workers, and the data rate is high."""
    bytes_per_s = seen.bytes / seen.seconds
    few = next((pace for pace in seen.slower_paces() if pace.cpu_s_per_sample), seen.pace)
    many = seen.more_as_slow() or seen.pace  # more workers that gave no speed-up
    growth = many.cpu_s_per_sample / few.cpu_s_per_sample if few.cpu_s_per_sample else 0.0
    if seen.computes and bytes_per_s >= _HEAVY_BYTES_PER_S and growth >= _SLOWED_DOWN:
        why = (
            f"With {counted(many.workers, 'worker')} a sample costs {growth:.2f} times the CPU "
            f"time it costs with {few.workers}, at {bytes_per_s / 1e9:.1f} GB/s of finished "
            "batches. Memory bandwidth is most likely full. Smaller dtypes (uint8 instead of "
            "float32) and a parameter named `out` help more than workers."
        )
        yield Finding(Verdict.MEMORY_BANDWIDTH, why)


def _tried_limit(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if a trial with fewer workers was as fast as all."""
    if (tried := seen.limit) is None:
        return
    few = counted(tried.enough, "worker")
    why = (
        f"{seen.samples_per_s:,.3g} samples/s with {counted(seen.workers, 'worker')}. In a trial, "
        f"{few} {'was' if tried.enough == 1 else 'were'} as fast as {tried.most}. {_SHARED}, so "
        "more workers or threads do not help."
    )
    if (cached := _cached(seen)) is not None:
        yield Finding(Verdict.SOURCE_LIMIT, why, *cached)
    elif FEWER_BY * tried.enough <= seen.workers:
        yield Finding(Verdict.SOURCE_LIMIT, why, *_fewer_workers(seen, tried.enough), seen.step_s)
    else:
        yield Finding(Verdict.SOURCE_LIMIT, why)


def _source_limit(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if fewer workers were as fast, or more were no faster, with free CPUs.

    Then the workers wait for something that they share.
    """
    other = next((pace for pace in seen.slower_paces() if seen.pace.is_in_vain_beside(pace)), None)
    # If they compute, there may have been no CPUs for more workers.
    if other is None and not seen.computes:
        other = seen.more_as_slow()
    rate = f"{seen.samples_per_s:,.3g} samples/s with {counted(seen.workers, 'worker')}"
    if other is not None:
        beside = f"{rate}, {other.samples_per_s:,.3g} with {other.workers}"
    elif seen.autotuned.in_vain > seen.workers and not seen.computes:
        beside = f'{rate}, and no more with the {seen.autotuned.in_vain} that workers="auto" tried'
    else:
        return
    why = f"{beside}, although CPUs are free. {_SHARED}."
    yield Finding(Verdict.SOURCE_LIMIT, why, *(_cached(seen) or ()))


def _more_calls(seen: Window) -> Finding:
    """Advise more calls at once, because workers compute or wait for something other than a CPU."""
    did = _what_workers_did(seen)
    if seen.computes:
        provided = "if memory bandwidth is not full, " * (
            seen.bytes / seen.seconds >= _HEAVY_BYTES_PER_S
        )
        return _more_workers(
            seen, Verdict.TOO_FEW_WORKERS, f"{did} {_what_cpus_did(seen)}", provided
        )
    why = f"{did} The rest is waiting for a disk, a server or a lock."
    threads = seen.least_threads
    if not seen.lanes and seen.cpu_share < _BLOCKS_BELOW and threads > seen.threads:
        step_s = seen.step_with(seen.workers, threads)
        change, expect = (
            f"lp.Loader(..., threads={threads})",
            _IF_SERVED + _what_a_step_becomes(seen, step_s),
        )
        return Finding(Verdict.SOURCE_WAITS, why, change, expect, step_s)
    return _more_workers(seen, Verdict.SOURCE_WAITS, why, _IF_SERVED)


def _epoch_start(seen: Window) -> Finding:
    later_s = (seen.seconds - seen.epoch_starts_s) / seen.steps
    why = (
        f"Training waited {readable_s(seen.epoch_starts_s)} for the first batches of "
        f"{counted(seen.epochs, 'epoch')}, of {readable_s(seen.wait_s)} in all."
    )
    if not seen.by_tf_data or seen.is_stream:
        return Finding(Verdict.EPOCH_START, why)
    change = "loader.as_dataset(epochs=None)  # and steps_per_epoch=len(loader) in fit"
    expect = (
        f"at best {readable_s(later_s)} a step, because workers prefetch batches of the next epoch"
    )
    return Finding(Verdict.EPOCH_START, why, change, expect, later_s)


def _stream_reader(seen: Window) -> Finding:
    """Return the verdict that the one process that reads the stream is the limit.

    If workers read parts of the stream, they share that work, too.
    """
    why = (
        f"Workers were idle {1 - seen.busy_share:.0%} of the time, because the stream had no items "
        "ready. "
    )
    why += f"Reading a batch takes up to {readable_s(seen.step_s)}."
    return Finding(
        Verdict.STREAM_READER, why, _READ_IN_PARTS, "workers read parts of it at the same time"
    )


def _stragglers(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if a few slow calls explain the wait: in-order delivery blocks on each.

    Time without a CPU is subtracted, because it does not make an item slow.
    """
    if seen.slow_s - seen.queued_s < max(_SLOW_CALLS_EXPLAIN * seen.steady_wait_s, 1e-9):
        return
    median = readable_s(seen.calls.quantile_ns(0.5) / 1e9)
    why = (
        f"Calls longer than 8 times the median ({median}) exceeded it by {readable_s(seen.slow_s)} "
        f"in total, and training waited {readable_s(seen.steady_wait_s)}. {_how_busy(seen)}"
    )
    if not seen.deterministic:
        yield Finding(Verdict.STRAGGLERS, why)
    else:
        change = (
            "lp.Loader(..., deterministic=False)  # if the order of batches may differ between runs"
        )
        yield Finding(Verdict.STRAGGLERS, why, change, "slow calls no longer delay other batches")


def _batches_kept(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if batches are copied out because the consumer keeps earlier ones.

    The copies take time, or workers lack slots.
    """
    if seen.copied >= _COPIED_OFTEN * seen.steps and seen.slots_lent > _USUALLY_LENT:
        why = (
            f"Training keeps references to {seen.slots_lent} of "
            f"{counted(seen.slots, 'batch buffer')}, so {seen.copied:,} of {seen.steps:,} batches "
            f"were copied ({readable_s(seen.copy_s / seen.steps)} a step). Drop old batches, or "
            "keep copies of the parts that you need."
        )
        yield Finding(Verdict.BATCHES_KEPT, why)


def _memory_limit(seen: Window) -> Iterator[Finding]:
    """Yield a verdict if the memory limit allows far fewer slots than wanted."""
    if not 0 < seen.slots * FEWER_BY <= seen.slots_wanted:
        return
    why = (
        f"Limits.memory allows {counted(seen.slots, 'batch buffer')} of "
        f"{readable_bytes(seen.slot_bytes)}. Workers and training need {seen.slots_wanted}. "
        f"{_how_busy(seen)}"
    )
    change = (
        "lp.Loader(..., limits=lp.Limits(memory="
        f'"{-(-seen.slots_wanted * seen.slot_bytes // (1 << 20))}MiB"))'
    )
    yield Finding(Verdict.MEMORY_LIMIT, why, change, "workers do not wait for a free batch buffer")


def _incomplete(seen: Window) -> Finding:
    """Return the verdict for measurements that are not clear.

    In the first seconds slots are still full from the start, and slow calls are not known yet.
    """
    calls = seen.samples if seen.calls_of == "sample" else seen.steps
    if seen.seconds < _CLEAR_S or (calls < _CLEAR_CALLS and seen.seconds < 3 * _CLEAR_S):
        sofar = f"{readable_s(seen.seconds)} and {counted(calls, 'call')}"
        return Finding(
            Verdict.WARM_UP,
            f"{sofar} so far, and {_CLEAR_S:.0f} s and {_CLEAR_CALLS} calls are needed",
        )
    return Finding(
        Verdict.INCOMPLETE,
        f"{_how_busy(seen)} Training waited, and the measurements do not show why.",
    )
