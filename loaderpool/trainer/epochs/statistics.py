"""What a loader tells of itself: `Statistics`, and how they are taken."""

from __future__ import annotations

import dataclasses
from typing import Literal

from loaderpool.cache.counters import CacheCounts
from loaderpool.system import clock
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.engine.engine_statistics import EngineStatistics, HostStatistics, WorkerStatistics
from loaderpool.trainer.epochs.counters import Counters
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.observer import Observer
from loaderpool.trainer.explain.decision import Decision
from loaderpool.trainer.explain.explanation import SlowItem, slow_items


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """The consumer's steps since the loader was made; `explain()` is about the last minute.

    A step is the time from one batch's hand-over to the next one's. Time between passes is in none.
    """

    count: int  # batches handed over, but for each pass's first one
    seconds: float  # that they took, with the waits at the beginnings of epochs but the first
    wait_s: float  # of these: data was waited for
    mean_s: float | None  # on average; None: there was none yet
    wait_share: float | None  # wait_s / seconds
    ready_share: float | None  # of the steps: how many found their batch ready, 0.0 to 1.0
    ready_mean_s: float | None  # of these steps: what a step takes with data ready; None: there was none yet
    first_batch_s: float | None  # the wait for the loader's first batch: workers start, import, make a first sample


@dataclasses.dataclass(frozen=True)
class CallStatistics:
    """How long calls of the function took, as workers have measured them since the loader was made.

    Percentiles are of counts in powers of two, so they are right within a factor of two; the slowest are exact.
    """

    of: str  # what a call makes: a "sample", or a "batch"
    timed: int  # of which mean and percentiles are: about one in eight
    mean_s: float  # on average
    p50_s: float  # half of the calls took at most so long
    p90_s: float  # nine of ten
    p99_s: float  # 99 of 100
    slowest: tuple[SlowItem, ...]  # of all calls, by item, the longest first, at most 16


@dataclasses.dataclass(frozen=True)
class Statistics:
    """A loader's counts since it was made; `workers` and `restarts` are the pool's."""

    passes: int  # passes that delivered at least a batch
    epoch: int  # epoch of the next pass
    batches: int  # batches handed to consumers
    samples: int  # rows handed to consumers
    bytes: int  # bytes of the batches handed to consumers
    elapsed_s: float  # seconds between the first and the latest hand-over, all passes
    samples_per_s: float  # samples after the first hand-over / elapsed_s; 0.0 before there are two
    bytes_per_s: float  # bytes after the first hand-over / elapsed_s
    steps: StepStatistics  # the consumer's: how long they take, and what is waited for
    calls: CallStatistics | None  # None: none was timed yet; nor are any under `workers=0`, or by hosts
    # Measured every two seconds, from the first batch on; of a pool that loaders share it is that of all of them.
    cpu_s_per_sample: float | None  # of workers, for a sample that they make; None: not yet, of hosts, `workers=0`
    padding_share: float  # of the elements of padded components that were delivered: how many are padding, 0.0 to 1.0
    consumer_wait_s: float  # seconds that consumers waited for workers; 0.0 under `workers=0`
    worker_wait_s: float  # seconds that workers waited for a slot or for work, summed
    slots: int  # slots in the ring
    slot_bytes: int  # bytes of one slot
    slots_lent: int  # slots that the consumer's arrays look at now
    bytes_pinned: int  # bytes of slots that are pinned (page-locked) for a GPU
    not_pinned_because: str | None  # why slots are not, where `Limits.pin` would have it
    batches_lent: int  # batches handed over without a copy
    batches_copied: int  # batches copied out, as too few slots were free to lend one
    batches_oversize: int  # batches that outgrew their slot and came in memory of their own
    repeated_rows: int  # rows repeated in each epoch, so that all shards have the same number of batches
    skipped_indices: tuple[int, ...]  # source indices left out by on_error="skip" (the latest 1000)
    replaced_indices: tuple[int, ...]  # source indices replaced by on_error="replace" (the latest 1000)
    errors: int  # samples skipped or replaced in the batches handed to consumers
    restarts: int  # workers that died and were replaced; of a `RayPool` those of all hosts
    supervisor_restarts: int  # supervisors that died and were replaced
    items_packed: int  # of the source, which workers read from bytes and not as objects
    captured_packed: tuple[str, ...]  # long lists and dicts of functions and objects that are packed, with their bytes
    captured_not_packed: tuple[str, ...]  # large ones that each worker copies as it reads them: why, and the cure
    data_bytes_shared: int  # of arrays of function and source that stand in memory once: adopted, or made by `share`
    data_bytes_copied: int  # of those that were copied into shared memory
    data_copied_because: tuple[str, ...]  # why, a line for each reason with its bytes
    stream_read_by: Literal["process", "thread"] | None  # of its own, or of this one; None: no stream, or workers=0
    stream_on_thread_because: str  # why it is read on a thread
    cache_hits: int  # results of `fn` that came from the cache
    cache_misses: int  # those that it gave, where there is a cache
    cache_damaged: int  # entries of the cache that did not have what was written, and were made again
    cache_bytes: int  # that the cache takes
    cache_is_full: bool  # whether a result was not kept for lack of room
    # exec: modules start threads on import; spawn: Pool(start="spawn"), or no fork; None: workers=0
    workers_start: Literal["fork", "exec", "spawn"] | None
    workers: tuple[WorkerStatistics, ...]
    decisions: tuple[Decision, ...]  # changes of the number of workers by `workers="auto"`, the latest 64
    hosts: tuple[HostStatistics, ...]  # of a `RayPool`, those that run or start; of workers of this machine ()
    hosts_lost: int  # hosts that died, were silent for too long, or whose node left, and were replaced where possible
    hosts_wait_because: str  # why hosts have to wait for slots, and the `Limits.memory` with which they need not
    batches_redone: int  # batches of hosts that are gone, which other hosts made


def take_statistics(tracker: EpochTracker, engine: Engine | None, observer: Observer) -> Statistics:
    """Return the counts of a loader's passes, what its engine knows (None: it has none), and what its observer does."""
    counters = tracker.counters
    elapsed_s = (counters.last_ns - counters.first_ns) / 1e9
    samples_per_s = (counters.samples - counters.first_samples) / elapsed_s if elapsed_s > 0 else 0.0
    told = EngineStatistics() if engine is None else engine.statistics()
    cached = CacheCounts() if engine is None else engine.cache_counts()
    return Statistics(
        **vars(told),
        passes=counters.passes,
        epoch=tracker.epoch,
        batches=counters.batches,
        samples=counters.samples,
        bytes=counters.nbytes,
        elapsed_s=elapsed_s,
        samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * counters.nbytes / max(1, counters.samples),
        steps=_steps(counters),
        calls=_calls(observer),
        cpu_s_per_sample=observer.cpu_s_per_sample,
        decisions=observer.autotuned().decisions,
        padding_share=counters.padding / max(1, counters.padded),
        consumer_wait_s=counters.wait_ns / 1e9,
        worker_wait_s=sum(worker.wait_s for worker in told.workers),
        repeated_rows=tracker.plan.repeated_rows,
        skipped_indices=tuple(counters.skipped),
        replaced_indices=tuple(counters.replaced),
        errors=counters.errors,
        cache_hits=cached.hits,
        cache_misses=cached.misses,
        cache_damaged=cached.damaged,
        cache_bytes=cached.bytes,
        cache_is_full=cached.is_full,
    )


def _steps(counters: Counters) -> StepStatistics:
    counts = counters.times.counts(clock.monotonic_ns())
    steps, ready = counts.steps, counts.ready_steps
    whole_ns = counts.steps_ns + counts.epoch_starts_ns
    waited_ns = min(whole_ns, counts.wait_ns + counts.epoch_starts_ns)
    return StepStatistics(
        count=steps,
        seconds=whole_ns / 1e9,
        wait_s=waited_ns / 1e9,
        mean_s=counts.steps_ns / 1e9 / steps if steps else None,
        wait_share=waited_ns / whole_ns if whole_ns else None,
        ready_share=ready / steps if steps else None,
        ready_mean_s=counts.ready_steps_ns / 1e9 / ready if ready else None,
        first_batch_s=counts.start_ns / 1e9 if counters.first_ns else None,
    )


def _calls(observer: Observer) -> CallStatistics | None:
    calls = observer.calls()
    if not calls.calls:
        return None
    return CallStatistics(
        of=observer.about.calls_of,
        timed=calls.calls,
        mean_s=calls.sum_ns / 1e9 / calls.calls,
        p50_s=calls.quantile_ns(0.5) / 1e9,
        p90_s=calls.quantile_ns(0.9) / 1e9,
        p99_s=calls.quantile_ns(0.99) / 1e9,
        slowest=slow_items(calls),
    )
