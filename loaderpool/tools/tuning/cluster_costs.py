"""What more hosts would bring, and what that would cost the network and the trainer's machine: told, not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loaderpool.system.readable import counted, readable_s, readable_size
from loaderpool.tools.tuning.window import Window

# The network's rates that a forecast is held against, in Gbit/s.
NETWORKS = (10, 25, 100)


@dataclasses.dataclass(frozen=True)
class Cost:
    """CPU time that the trainer's machine spends on batches that other machines have made."""

    of: str
    source: str  # how it was measured
    cpus: float = 0.0  # in use at any time
    ms_per_mb: float = 0.0
    ms_per_ticket: float = 0.0
    ms_per_batch: float = 0.0


# The one place of these numbers. Who measures others writes them here.
COSTS = (
    Cost("Ray's transport: raylet and store", "batches of 38.5 MB, Ray 2.60: of both ends' 1.0", ms_per_mb=0.6),
    Cost("dispatcher: the copy into slots", "batches of 38.5 MB", ms_per_mb=0.085),
    Cost("dispatcher: calls of large batches", "batches of 38.5 MB, one a call, beside the copy", ms_per_mb=0.1),
    Cost("dispatcher: calls of small ones, and answers", "0.5 ms a call, with some tickets", ms_per_ticket=0.3),
    Cost("trainer: hand-over", "batches of 4 KB, some hundreds a ticket", ms_per_batch=0.01),
    Cost("raylet and dispatcher at rest", "6 batches a second", cpus=0.03),
)
# A ticket of a cluster is so much work, or a batch where that is more (docs/decisions/0024).
_TICKET_S = 0.064
# Where bringing a sample here takes this share of the CPU time that making it here would, there is little to gain.
_HARDLY_WORTH = 0.5


@dataclasses.dataclass(frozen=True)
class SampleCost:
    """What one worker of this machine needs for a sample."""

    seconds: float  # of a worker
    nbytes: float  # of a batch, a row's share
    rows: float  # of a batch

    @property
    def samples_per_s(self) -> float:
        """Of one worker."""
        return 1 / self.seconds


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a number of hosts would bring at best, and what it would take."""

    hosts: int
    workers: int
    samples_per_s: float
    bytes_per_s: float
    trainer_cpus: float  # CPUs of the trainer's machine in use: trainer, dispatcher, raylet

    def share_of(self, gbit_per_s: float) -> float:
        """How much of a network of this rate it would take; above 1.0 the network is the limit."""
        return self.bytes_per_s * 8 / (gbit_per_s * 1e9)


def sample_cost(window: Window) -> SampleCost:
    """What a sample takes, from a window of a loader with one worker."""
    (worker,) = window.workers
    # Waiting for a CPU is not the function's own: the cluster's are meant to be free.
    busy_s = max(worker.busy_s - window.queued_s, min(worker.cpu_s, worker.busy_s), 1e-9)
    made = max(1, worker.samples)
    return SampleCost(busy_s / made, window.nbytes / window.samples, window.samples / window.batches)


def forecast(sample: SampleCost, hosts: int, workers: int) -> Forecast:
    """What so many workers on so many hosts would bring, if each had a CPU as fast as those here.

    Args:
        sample: what one worker needs.
        hosts: how many.
        workers: of all of them.
    """
    samples_per_s = workers * sample.samples_per_s
    bytes_per_s = samples_per_s * sample.nbytes
    batches_per_s = samples_per_s / sample.rows
    tickets_per_s = min(batches_per_s, workers / _TICKET_S)
    cpus = sum(
        each.cpus
        + each.ms_per_mb * bytes_per_s / 1e9
        + each.ms_per_ticket * tickets_per_s / 1e3
        + each.ms_per_batch * batches_per_s / 1e3
        for each in COSTS
    )
    return Forecast(hosts, workers, samples_per_s, bytes_per_s, cpus)


def describe_sample(sample: SampleCost) -> str:
    """What a sample takes, in words."""
    return f"a sample takes {readable_s(sample.seconds)} of a worker and {readable_size(sample.nbytes)}"


def describe_forecast(most: Forecast) -> str:
    """What the largest number would bring, in words."""
    return (
        f"{counted(most.workers, 'worker')} on {counted(most.hosts, 'host')} would bring {most.samples_per_s:,.0f} "
        f"samples/s, {readable_size(most.bytes_per_s)}/s, which take {most.trainer_cpus:.1f} CPUs here"
    )


def find_limits(forecasts: Sequence[Forecast], cpus: int) -> tuple[str, ...]:
    """What would be in the way of that, a sentence each.

    Args:
        forecasts: ascending by workers, at least one.
        cpus: that the trainer's machine has to use.
    """
    most = forecasts[-1]
    full = [
        f"{gbit} Gbit/s carry what {_some_workers(most.workers / most.share_of(gbit))} make"
        for gbit in NETWORKS
        if most.share_of(gbit) > 1
    ]
    limits = [", ".join(full)] if full else []
    if most.trainer_cpus > cpus:
        enough = _some_workers(most.workers * cpus / most.trainer_cpus)
        limits.append(
            f"the batches of {enough} keep {counted(cpus, 'CPU')} here busy, and leave none for the training: smaller "
            "batches help (uint8 rather than float32, say)"
        )
    # A worker takes one CPU.
    share = (most.trainer_cpus - sum(each.cpus for each in COSTS)) / most.workers
    if share >= _HARDLY_WORTH:
        limits.append(
            f"to bring a sample here takes {share:.0%} of the time that it takes to make it here: give this work to "
            "workers of this machine"
        )
    return tuple(limits)


def _some_workers(count: float) -> str:
    return f"{count:,.0f} workers" if count >= 9.95 else f"{count:.2g} workers"
