"""What was measured: windows of time, and all windows of one setting."""

from __future__ import annotations

import dataclasses

from loaderpool.tools.tuning.setting import Setting
from loaderpool.trainer.engine.engine_statistics import WorkerStatistics


@dataclasses.dataclass(frozen=True)
class Window:
    """What one loader handed over in one span of time."""

    wanted_s: float  # seconds that were asked for
    elapsed_s: float  # seconds that it took: longer, up to the next burst of batches
    batches: int  # batches handed over
    samples: int  # rows handed over
    nbytes: int  # bytes of these batches
    consumer_wait_s: float  # seconds that this process waited for a batch
    own_cpu_s: float  # CPU seconds of this process
    queued_s: float  # seconds that the makers of samples (workers, else this process) waited for a CPU, summed
    workers: tuple[WorkerStatistics, ...]  # each worker's counts over this window

    @property
    def samples_per_s(self) -> float:
        """Rows per second."""
        return self.samples / self.elapsed_s

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.elapsed_s

    @property
    def batch_s(self) -> float:
        """Seconds from one hand-over to the next, on average."""
        return self.elapsed_s / self.batches

    @property
    def workers_cpu_s(self) -> float:
        """CPU seconds of all workers."""
        return sum(worker.cpu_s for worker in self.workers)

    @property
    def cpu_use(self) -> float:
        """CPUs in use by this process and its workers, on average."""
        return (self.own_cpu_s + self.workers_cpu_s) / self.elapsed_s


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All windows of one setting."""

    setting: Setting  # what the loader had
    windows: tuple[Window, ...]  # one for each round, at least one

    @property
    def workers(self) -> int:
        """How many workers there were; 0: samples were made in this process."""
        return self.setting.workers

    @property
    def best(self) -> Window:
        """The fastest window: whatever else runs on the machine only ever makes one slower."""
        return max(self.windows, key=lambda window: window.samples_per_s)

    @property
    def samples_per_s(self) -> float:
        """Rows per second in the fastest window."""
        return self.best.samples_per_s

    @property
    def spread(self) -> float:
        """By what share the slowest window is behind the fastest; 0.0 for a single one."""
        rates = [window.samples_per_s for window in self.windows]
        return 1 - min(rates) / max(rates) if max(rates) > 0 else 0.0

    @property
    def cpu_use(self) -> float:
        """CPUs in use in the fastest window."""
        return self.best.cpu_use
