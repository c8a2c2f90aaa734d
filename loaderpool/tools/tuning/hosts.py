"""How fast a loader is with each number of a cluster's hosts, and which number to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loaderpool.config import LoaderConfig
from loaderpool.errors import ArgumentError, ClusterError
from loaderpool.ray.pool import RayPool
from loaderpool.system import clock, cpu_time
from loaderpool.system.readable import counted
from loaderpool.tools.tuning.cluster_costs import SampleCost
from loaderpool.tools.tuning.measure import Watcher, measure, measure_settings
from loaderpool.tools.tuning.setting import Measurable, Setting
from loaderpool.tools.tuning.window import Measurement, Window
from loaderpool.trainer.epochs.statistics import Statistics
from loaderpool.trainer.explain.thresholds import TOLERANCE
from loaderpool.trainer.session.supervisor_process import SupervisorProcess

# Hosts start within some seconds, and import what the function wants.
_START_S = 120.0


@dataclasses.dataclass(frozen=True, order=True)
class HostSetting(Setting):
    """A number of hosts: its `workers` are those that the cluster's books promise."""

    hosts: int = 1
    address: str = dataclasses.field(default="", compare=False)
    raylet_pid: int = dataclasses.field(default=0, compare=False)  # the one of this machine

    @property
    def label(self) -> str:
        """What it is called in a sentence."""
        return counted(self.hosts, "host")

    @property
    def arguments(self) -> str:
        """What to write in a loader's call to have it."""
        return f"workers=lp.RayPool(hosts={self.hosts})"

    def apply(self, loader: Measurable) -> OnHosts:
        """A loader like this one on so many hosts, which have all begun.

        Raises:
            ClusterError: they have not.
        """
        return OnHosts(loader, self)


class OnHosts:
    """A loader on a cluster's hosts, as it is measured."""

    def __init__(self, loader: Measurable, setting: HostSetting) -> None:
        self.setting = setting
        self._pool = RayPool(setting.address, hosts=setting.hosts)
        try:
            self._loader = loader.replace(workers=self._pool)
            self._wait()
        except BaseException:
            self._pool.close()
            raise
        # Those that take part in each batch: this process, the dispatcher, and the raylet with its store.
        self._pids = [dispatcher_pid(self._pool), *([setting.raylet_pid] if setting.raylet_pid else [])]

    @property
    def config(self) -> LoaderConfig:
        return self._loader.config

    @property
    def workers(self) -> int:
        """Of all hosts."""
        return self._pool.workers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def statistics(self) -> Statistics:
        return self._loader.statistics()

    def replace(self, **changes: Any) -> Measurable:
        return self._loader.replace(**changes)

    def cpu_ns(self) -> int:
        """CPU time of all that takes part on this machine, but for a host that may be here, too."""
        return clock.process_cpu_ns() + int(1e9 * sum(cpu_time.process_cpu_s(pid) for pid in self._pids))

    def close(self) -> None:
        """End loader and hosts."""
        self._loader.close()
        self._pool.close()

    def _wait(self) -> None:
        deadline_s = clock.monotonic_s() + _START_S
        while True:
            is_empty = True
            for _ in self._loader:
                is_empty = False
                found = len(self._loader.statistics().workers)
                if found >= self.setting.hosts:
                    return
                if clock.monotonic_s() > deadline_s:
                    raise ClusterError(f"{found} of {self.setting.label} have started after {_START_S:g} s")
            if is_empty:
                raise ArgumentError("a pass over the loader has no batch, so there is nothing to measure")


def dispatcher_pid(pool: RayPool) -> int:
    """The process id of a pool's dispatcher, which is a child of this process."""
    ends = pool.session._supervisor
    assert isinstance(ends, SupervisorProcess)
    return ends.pid


@dataclasses.dataclass(frozen=True)
class HostComparison:
    """One number of hosts beside what its workers would make if nothing got in their way."""

    measurement: Measurement
    hosts: int
    workers: int  # that they had
    ideal_per_s: float  # samples

    @property
    def share_of_ideal(self) -> float:
        """How much of it was reached; 1.0 for all of it."""
        return self.measurement.samples_per_s / self.ideal_per_s

    @property
    def trainer_cpus(self) -> float:
        """CPUs in use by trainer, dispatcher and raylet of this machine, on average."""
        return self.measurement.best.cpu_use


def measure_hosts(
    loader: Measurable,
    settings: Sequence[HostSetting],
    sample: SampleCost,
    seconds: float,
    *,
    rounds: int,
    watcher: Watcher,
) -> tuple[HostComparison, ...]:
    """Each number of hosts, ascending; as `measure_settings`.

    Args:
        loader: each is measured on a loader made of it.
        settings: what to measure.
        sample: what one worker of this machine needs, which the ideal is made of.
        seconds: for each, over all rounds.
        rounds: windows for each.
        watcher: is told how it goes.
    """
    workers: dict[int, int] = {}

    def measure_one(measured: Measurable, for_s: float, advance: Callable[[float], None]) -> Window:
        assert isinstance(measured, OnHosts)
        workers[measured.setting.hosts] = measured.workers
        return measure(measured, for_s, own_cpu_ns=measured.cpu_ns, on_progress=advance)

    measurements = measure_settings(loader, settings, seconds, rounds=rounds, watcher=watcher, measure_one=measure_one)
    return tuple(
        HostComparison(each, setting.hosts, workers[setting.hosts], workers[setting.hosts] * sample.samples_per_s)
        for setting, each in zip(settings, measurements, strict=True)
    )


def recommend_hosts(comparisons: Sequence[HostComparison]) -> tuple[HostComparison, str]:
    """The fewest hosts whose rate is within 5 % of the best one, and why, in a sentence.

    Args:
        comparisons: ascending by hosts, at least one.
    """
    best = max(comparisons, key=lambda each: each.measurement.samples_per_s)
    enough = (1 - TOLERANCE) * best.measurement.samples_per_s
    chosen = next(each for each in comparisons if each.measurement.samples_per_s >= enough)
    if len(comparisons) == 1:
        return chosen, "nothing else was measured"
    if chosen is comparisons[-1]:
        before = comparisons[-2]
        times = chosen.measurement.samples_per_s / before.measurement.samples_per_s
        return chosen, f"{times:.2f} times the rate of {counted(before.hosts, 'host')}; more may bring more"
    return chosen, f"more bring less than {TOLERANCE:.0%} more"


def shares_a_machine(addresses: Sequence[str]) -> bool:
    """Whether nodes are on the same machine, and so have the same CPUs between them."""
    return len(set(addresses)) < len(addresses)
