"""`Statistics` of a loader, and the function that collects them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from loaderpool.cache.setting import FULL, NO_COUNTS, Count
from loaderpool.engine.engine_statistics import EngineStatistics
from loaderpool.memory.call_times import SlowItem
from loaderpool.system import clock, ranks
from loaderpool.trainer.counters import StepTimes
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.explain.window import Decision, Snapshot
from loaderpool.trainer.observer import Observer

if TYPE_CHECKING:
    from loaderpool.engine.contracts import Engine


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """Times of training steps, each from one batch to the next.

    Means and shares are `None` before the first step.
    """

    count: int  # Number of steps.
    seconds: float  # Total seconds of all steps, including waits at the start of later epochs.
    wait_s: float  # Seconds spent waiting for data.
    mean_s: float | None  # Mean time of a step in seconds.
    wait_share: float | None  # Share of the time spent waiting for data: `wait_s / seconds`.
    ready_share: float | None  # Share of steps whose batch was ready.
    ready_mean_s: float | None  # Mean time in seconds of steps whose batch was ready.
    first_batch_s: float | None  # Seconds spent waiting for the first batch.


@dataclasses.dataclass(frozen=True)
class CallStatistics:
    """Times of function calls. Percentiles are accurate within a factor of two."""

    of: str  # Result of a call: `"sample"` or `"batch"`.
    timed: int  # Number of calls that were timed, about one in eight.
    mean_s: float  # Mean time of a call in seconds.
    p50_s: float  # Median time of a call in seconds.
    p90_s: float  # 90th percentile of call times in seconds.
    p99_s: float  # 99th percentile of call times in seconds.
    slowest: tuple[SlowItem, ...]  # Slowest items, at most 16, longest first.


@dataclasses.dataclass(frozen=True)
class CacheStatistics:
    """Counts of a loader's cache; all 0 without a cache."""

    hits: int  # Results read from the cache.
    misses: int  # Results computed by `fn`.
    damaged: int  # Damaged entries that were computed again.
    bytes: int  # Size of the cache in bytes.
    is_full: bool  # `True` if an item did not fit.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics(EngineStatistics):
    """Counts since the loader was made, or since a worker started. Shares are from 0.0 to 1.0."""

    iterations: int  # Iterations that delivered at least one batch.
    epoch: int  # Epoch number of the next iteration.
    batches: int  # Batches delivered.
    samples: int  # Rows of the delivered batches.
    bytes: int  # Size of the delivered batches in bytes.
    elapsed_s: float  # Seconds from the first batch to the latest.
    samples_per_s: float  # Rows delivered per second, after the first batch.
    steps: StepStatistics  # Times of training steps.
    # Times of function calls; `None` before the first one, and with `workers=0`.
    calls: CallStatistics | None
    cpu_s_per_sample: float | None  # CPU seconds of the workers per sample; `None` if unknown.
    padding_share: float  # Share of padding in padded components.
    cache: CacheStatistics  # Counts of the cache.
    # Latest 1000 source indices that `on_error` skipped. For generators: `(generator, item)`.
    skipped_indices: tuple[int | tuple[int, int], ...]
    # Latest 1000 source indices that `on_error` replaced. For generators: `(generator, item)`.
    replaced_indices: tuple[int | tuple[int, int], ...]
    errors: int  # Samples that `on_error` skipped or replaced.
    decisions: tuple[Decision, ...]  # Latest 64 changes made by `workers="auto"`.


def take_statistics(tracker: EpochTracker, engine: Engine | None, observer: Observer) -> Statistics:
    """Return the statistics of a loader, from its counters, its engine and its observer.

    `engine` is None if the loader makes no batches in this process.
    """
    counters, plan = tracker.counters, tracker.plan
    repeated = 0 if plan.order.is_drawn else plan.repeated_rows
    elapsed_s = (counters.steps.last_ns - counters.steps.first_ns) / 1e9
    told = EngineStatistics() if engine is None else engine.statistics()
    cached = NO_COUNTS if engine is None or engine.cache is None else engine.cache.counts()
    of_shards = (
        (
            f"{repeated:,} rows are repeated in each epoch, so that all shards have equally many "
            "batches"
        ),
    )
    processes = ranks.local_count()
    of_ranks = (
        (
            f"this is one of {processes} processes of a training: defaults for memory and workers "
            "are divided"
        ),
    )
    return Statistics(
        **{
            **vars(told),
            "notes": told.notes + of_shards * bool(repeated) + of_ranks * (processes > 1),
        },
        iterations=counters.passes,
        epoch=tracker.epoch,
        batches=counters.taken.batches,
        samples=counters.taken.samples,
        bytes=counters.taken.nbytes,
        elapsed_s=elapsed_s,
        samples_per_s=(counters.taken.samples - counters.first_samples) / elapsed_s
        if elapsed_s > 0
        else 0.0,
        steps=_steps(counters.steps),
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
        skipped_indices=tuple(counters.failed.skipped),
        replaced_indices=tuple(counters.failed.replaced),
        errors=counters.failed.count,
    )


def _steps(times: StepTimes) -> StepStatistics:
    now = Snapshot(**times.sums(clock.monotonic_ns()))
    steps, ready, seconds = now.steps, now.ready_steps, now.seconds
    waited_s = min(seconds, now.wait_s)
    return StepStatistics(
        count=steps,
        seconds=seconds,
        wait_s=waited_s,
        mean_s=(seconds - now.epoch_starts_s) / steps if steps else None,
        wait_share=waited_s / seconds if seconds else None,
        ready_share=ready / steps if steps else None,
        ready_mean_s=now.ready_steps_s / ready if ready else None,
        first_batch_s=now.start_s if times.first_ns else None,
    )


def _calls(observer: Observer) -> CallStatistics | None:
    calls = observer.calls()
    if not calls.calls:
        return None
    return CallStatistics(
        of=observer.constants["calls_of"],
        timed=calls.calls,
        mean_s=calls.sum_ns / 1e9 / calls.calls,
        p50_s=calls.quantile_ns(0.5) / 1e9,
        p90_s=calls.quantile_ns(0.9) / 1e9,
        p99_s=calls.quantile_ns(0.99) / 1e9,
        slowest=calls.slowest,
    )
