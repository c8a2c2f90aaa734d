"""What a loader tells of itself: `Statistics`, and how they are taken."""

from __future__ import annotations

import dataclasses
from typing import Literal

from loaderpool.cache.setting import FULL, NO_COUNTS, Count
from loaderpool.system import clock
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.engine.engine_statistics import (
    EngineStatistics,
    HostStatistics,
    MemoryStatistics,
    WorkerStatistics,
)
from loaderpool.trainer.epochs.counters import Counters
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.observer import Observer
from loaderpool.trainer.explain.explanation import SlowItem, slow_items
from loaderpool.trainer.explain.observed import Decision


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """The training's steps, from batch to batch; None: there was none yet."""

    count: int  # of steps
    seconds: float  # that they took
    wait_s: float  # of these, waiting for data
    mean_s: float | None
    wait_share: float | None  # wait_s / seconds
    ready_share: float | None  # of steps whose batch was ready
    ready_mean_s: float | None  # of those steps
    first_batch_s: float | None  # wait for the first batch


@dataclasses.dataclass(frozen=True)
class CallStatistics:
    """Times of the function's calls; percentiles are right within a factor of two."""

    of: str  # what a call makes: "sample" or "batch"
    timed: int  # about one call in eight
    mean_s: float
    p50_s: float  # half of the calls were faster
    p90_s: float
    p99_s: float
    slowest: tuple[SlowItem, ...]  # at most 16, longest first


@dataclasses.dataclass(frozen=True)
class CacheStatistics:
    """The loader's cache; all 0 without one."""

    hits: int  # results that came from it
    misses: int  # that `fn` made
    damaged: int  # entries made again
    bytes: int  # size
    is_full: bool  # something found no room


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts since the loader was made; of a worker, since it started. Shares are from 0.0 to 1.0."""

    passes: int  # that gave at least one batch
    epoch: int  # of the next pass
    batches: int  # handed over
    samples: int  # rows
    bytes: int  # of these batches
    elapsed_s: float  # from the first batch to the latest
    samples_per_s: float
    steps: StepStatistics
    calls: CallStatistics | None  # None: none yet, or workers=0
    cpu_s_per_sample: float | None  # of workers
    padding_share: float  # of what was padded
    memory: MemoryStatistics
    cache: CacheStatistics
    skipped_indices: tuple[int, ...]  # by `on_error`, latest 1000
    replaced_indices: tuple[int, ...]  # by `on_error`, latest 1000
    errors: int  # samples skipped or replaced
    restarts: int  # of workers that died
    supervisor_restarts: int
    workers_start: Literal["fork", "exec", "spawn"] | None  # "exec": modules start threads on import
    workers: tuple[WorkerStatistics, ...]
    decisions: tuple[Decision, ...]  # of workers="auto", latest 64
    hosts: tuple[HostStatistics, ...]  # of a `RayPool`
    hosts_lost: int  # that died or left
    notes: tuple[str, ...]  # what was shared or copied and why, and what is slow


def take_statistics(tracker: EpochTracker, engine: Engine | None, observer: Observer) -> Statistics:
    """Return the counts of a loader's passes, what its engine knows (None: it has none), and what its observer does."""
    counters, repeated = tracker.counters, tracker.plan.repeated_rows
    elapsed_s = (counters.last_ns - counters.first_ns) / 1e9
    told = EngineStatistics() if engine is None else engine.statistics()
    cached = NO_COUNTS if engine is None else engine.cache_counts()
    of_shards = (f"{repeated:,} rows are repeated in each epoch, so that all shards have as many batches",)
    return Statistics(
        **{**vars(told), "notes": told.notes + of_shards * bool(repeated)},
        passes=counters.passes,
        epoch=tracker.epoch,
        batches=counters.batches,
        samples=counters.samples,
        bytes=counters.nbytes,
        elapsed_s=elapsed_s,
        samples_per_s=(counters.samples - counters.first_samples) / elapsed_s if elapsed_s > 0 else 0.0,
        steps=_steps(counters),
        calls=_calls(observer),
        cpu_s_per_sample=observer.cpu_s_per_sample,
        decisions=observer.autotuned().decisions,
        padding_share=counters.padding / max(1, counters.padded),
        cache=CacheStatistics(
            hits=cached[Count.HITS],
            misses=cached[Count.MISSES],
            damaged=cached[Count.DAMAGED],
            bytes=cached[Count.BYTES],
            is_full=any(cached[each] for each in FULL),
        ),
        skipped_indices=tuple(counters.skipped),
        replaced_indices=tuple(counters.replaced),
        errors=counters.errors,
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
