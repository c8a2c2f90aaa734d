"""`PrometheusCollector`: what loaders count, as metrics that Prometheus collects, of `prometheus_client`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import loaderpool
from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.sources.extras import import_extra
from loaderpool.trainer.epochs.statistics import Statistics
from loaderpool.trainer.loader import Loader

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from loaderpool.memory.call_times import CallTimes

# By their names without `loaderpool_`: what they are of, and what they mean.
_COUNTERS = {
    "passes": "Passes that delivered at least a batch",
    "batches": "Batches handed to the training",
    "samples": "Rows handed to the training",
    "bytes": "Bytes of the batches handed to the training",
    "steps": "Steps of the training, from one batch's hand-over to the next one's",
    "step_seconds": "Seconds that steps took, with the waits at the beginnings of epochs",
    "step_wait_seconds": "Of the seconds that steps took, those in which data was waited for",
    "errors": "Samples that failed and were skipped or replaced",
    "batches_copied": "Batches copied out, as too few slots were free to lend one",
    "worker_restarts": "Workers of the loader's pool that died and were replaced",
    "supervisor_restarts": "Supervisors of the loader's pool that died and were replaced",
    "cache_hits": "Results of the function that came from the cache",
    "cache_misses": "Results of the function that the cache did not have",
}
_GAUGES = {
    "epoch": "Epoch of the next pass",
    "workers": "Worker processes of the loader's pool",
    "slots": "Slots for batches",
    "slots_lent": "Slots that arrays of the training look at",
    "slot_bytes": "Bytes of a slot",
    "pinned_bytes": "Bytes of slots that are pinned for a GPU",
    "cache_bytes": "Bytes that the cache takes",
    "first_batch_seconds": "Wait for the loader's first batch",
    "cpu_seconds_per_sample": "CPU time of workers for a sample",
}
_CALLS = "loaderpool_call_seconds", "Time of a call of the loader's function, of about one call in eight"
_VERSION = "loaderpool_build_info", "Version of loaderpool"
# Calls in less than a microsecond are no sample's: their buckets are taken together.
_FIRST_BUCKET = 10


class PrometheusCollector:
    """Tells Prometheus what loaders count; a collector for a registry of `prometheus_client`.

        prometheus_client.REGISTRY.register(PrometheusCollector(train=loader))
        prometheus_client.start_http_server(8000)

    `prometheus_client.generate_latest(PrometheusCollector(train=loader))` is the text alone. Metrics begin with
    `loaderpool_`, and their label `loader` has the name that a loader is given here. Each is read when it is collected,
    from whichever thread does that; of one that was not measured there is no sample. A loader that is dropped
    disappears, and is not kept by this.

    Args:
        **loaders: those that are told of, by name; all of a process in one collector.

    Raises:
        ArgumentError, ArgumentTypeError: there is none, or one has no name or is no loader.
        ImportError: `prometheus_client` is not installed.
    """

    def __init__(self, *unnamed: Loader, **loaders: Loader) -> None:
        if unnamed or not loaders:
            raise ArgumentError("PrometheusCollector takes loaders by name: PrometheusCollector(train=loader)")
        for name, loader in loaders.items():
            if not isinstance(loader, Loader):
                raise ArgumentTypeError(f"PrometheusCollector: {name} must be a Loader, got {type(loader).__name__}")
        self._loaders = {name: weakref.ref(loader) for name, loader in loaders.items()}
        self._metrics: Any = import_extra("prometheus_client.core", what="PrometheusCollector", extra="prometheus")

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, by which a registry finds that a second collector has the same."""
        return [*self._families({}), self._metrics.HistogramMetricFamily(*_CALLS), self._version()]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        alive = {name: loader for name, ref in self._loaders.items() if (loader := ref()) is not None}
        yield from self._families({name: loader.statistics() for name, loader in alive.items()})
        calls = self._metrics.HistogramMetricFamily(*_CALLS, labels=["loader"])
        for name, loader in alive.items():
            times = loader._core.observer.calls()
            if times.calls:
                calls.add_metric([name], list(_buckets(times)), sum_value=times.sum_ns / 1e9)
        yield calls
        yield self._version()

    def _families(self, told: Mapping[str, Statistics]) -> Iterator[Metric]:
        values = {name: _values(statistics) for name, statistics in told.items()}
        kinds = (self._metrics.CounterMetricFamily, _COUNTERS), (self._metrics.GaugeMetricFamily, _GAUGES)
        for kind, metrics in kinds:
            for metric, meaning in metrics.items():
                family = kind(f"loaderpool_{metric}", meaning, labels=["loader"])
                for name, found in values.items():
                    if (value := found[metric]) is not None:
                        family.add_metric([name], value)
                yield family

    def _version(self) -> Metric:
        family = self._metrics.GaugeMetricFamily(*_VERSION, labels=["version"])
        family.add_metric([loaderpool.__version__], 1)
        found: Metric = family
        return found


def _values(told: Statistics) -> dict[str, float | None]:
    """Return the value of each metric; None: it is not known."""
    return {
        "passes": told.passes,
        "batches": told.batches,
        "samples": told.samples,
        "bytes": told.bytes,
        "steps": told.steps.count,
        "step_seconds": told.steps.seconds,
        "step_wait_seconds": told.steps.wait_s,
        "errors": told.errors,
        "batches_copied": told.batches_copied,
        "worker_restarts": told.restarts,
        "supervisor_restarts": told.supervisor_restarts,
        "cache_hits": told.cache_hits,
        "cache_misses": told.cache_misses,
        "epoch": told.epoch,
        "workers": sum(host.workers for host in told.hosts) or len(told.workers),
        "slots": told.slots,
        "slots_lent": told.slots_lent,
        "slot_bytes": told.slot_bytes,
        "pinned_bytes": told.bytes_pinned,
        "cache_bytes": told.cache_bytes,
        "first_batch_seconds": told.steps.first_batch_s,
        "cpu_seconds_per_sample": told.cpu_s_per_sample,
    }


def _buckets(calls: CallTimes) -> Iterator[tuple[str, float]]:
    """Yield how many calls took at most so many seconds; a bucket counts those below a power of two of ns."""
    below = sum(calls.buckets[:_FIRST_BUCKET])
    for bucket in range(_FIRST_BUCKET, len(calls.buckets) - 1):
        below += calls.buckets[bucket]
        yield str((1 << bucket) / 1e9), below
    yield "+Inf", below + calls.buckets[-1]
