"""What `tune` varies, and how a loader is made that has it: the one place that knows the loader's arguments for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from loaderpool.config import LoaderConfig
from loaderpool.settings.groups import WorkerOptions
from loaderpool.system.readable import counted
from loaderpool.trainer.epochs.statistics import Statistics


class Measurable(Protocol):
    """The part of a `Loader` that is needed to measure it."""

    @property
    def config(self) -> LoaderConfig: ...

    def __iter__(self) -> Iterator[Any]: ...

    def statistics(self) -> Statistics: ...

    def replace(self, **changes: Any) -> Measurable: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """How many workers a loader has, and how many threads each; of two, the smaller one takes less memory."""

    workers: int  # 0: samples are made in this process
    threads: int = 1  # calls of the function that each worker makes at the same time; 1 where there are no workers
    # What the loader has beside, where threads are varied: only then do the words of a setting name them.
    beside: WorkerOptions | None = dataclasses.field(default=None, compare=False)

    @property
    def names_threads(self) -> bool:
        """Whether threads are a part of what it is called."""
        return self.beside is not None

    @property
    def calls(self) -> int:
        """Calls of the function under way at the same time."""
        return self.workers * self.threads or 1

    @property
    def processes(self) -> int:
        """Processes that make samples."""
        return max(1, self.workers)

    @property
    def label(self) -> str:
        """What it is called in a sentence."""
        workers = counted(self.workers, "worker")
        if not self.names_threads or not self.workers:
            return workers
        return f"{workers} with {counted(self.threads, 'thread')}{' each' * (self.workers != 1)}"

    @property
    def arguments(self) -> str:
        """What to write in a loader's call to have it."""
        if self.beside is None or not self.workers:
            return f"workers={self.workers}"
        seeds = self.beside.seed_globals
        others = "" if seeds == "auto" else f", seed_globals={seeds}"
        return f"workers={self.workers}, worker_options=lp.WorkerOptions(threads={self.threads}{others})"

    def apply(self, loader: Measurable) -> Measurable:
        """A loader like this one that has the setting.

        Raises:
            ArgumentError: the loader can have no threads, for it has a cache, generators or `seed_globals=True`.
        """
        options = dataclasses.replace(loader.config.worker_options, threads=self.threads)
        return loader.replace(workers=self.workers, worker_options=options)


def default_counts(cpus: int) -> tuple[int, ...]:
    """0, 1, 2, 4, ... and `cpus` itself, up to twice `cpus`: blocking work gains from more workers than CPUs."""
    counts = {0, cpus, 2 * cpus}
    count = 1
    while count <= 2 * cpus:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


def settings_of(counts: Sequence[int], threads: Sequence[int] | None, config: LoaderConfig) -> tuple[Setting, ...]:
    """Each number of workers with each number of threads, ascending; 0 workers come once, for they have no threads.

    Args:
        counts: numbers of workers, at least 0.
        threads: numbers of threads; None: all workers have as many as the loader's.
        config: the loader's.
    """
    each = threads or (config.worker_options.threads,)
    beside = config.worker_options if threads else None
    return tuple(sorted({Setting(count, number if count else 1, beside) for count in counts for number in each}))
