"""How fast a loader is with each setting: rates over windows of time, nothing concluded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterator, Sequence

from loaderpool.errors import ArgumentError
from loaderpool.system import clock
from loaderpool.system.cpu_time import queued_s
from loaderpool.tools.tuning.setting import Measurable, Setting
from loaderpool.tools.tuning.window import Measurement, Window
from loaderpool.trainer.engine.engine_statistics import WorkerStatistics
from loaderpool.trainer.epochs.statistics import Statistics

# The start is not the steady state: first calls import and open files, first batches fault the slots' pages in.
# Smaller counts some of that; larger only lengthens the measuring, and slow batches have no ring to fill anyway.
_WARM_UP_S = 1.0
# A window ends where as many batches are made and not handed over as at its beginning, and at the latest after so many
# times its length. Smaller, what threads made ahead counts as made in the window; larger, uneven work takes too long.
_LONGEST = 2.0
# A bar needs no more, and each report costs the time of a cheap batch.
_REPORT_EVERY_S = 0.1


class Watcher:
    """Is told how the measuring goes, in its thread; this one does not care."""

    def begin(self, setting: Setting, round_number: int) -> None:
        """A window for this setting begins, in this round (from 1)."""

    def advance(self, fraction: float) -> None:
        """This much of the window's time is over, 0.0 to 1.0."""

    def end(self, window: Window) -> None:
        """The window is over."""

    def skip(self, setting: Setting, round_number: int) -> None:
        """The window is left out, as an earlier one of the same setting was long enough."""


def measure_settings(
    loader: Measurable,
    settings: Sequence[Setting],
    seconds: float,
    *,
    rounds: int = 2,
    watcher: Watcher | None = None,
    measure_one: Callable[[Measurable, float, Callable[[float], None]], Window] | None = None,
) -> tuple[Measurement, ...]:
    """Each setting's measurement, in the order of `settings`; `loader` itself is not iterated.

    The rounds go forth and back through the settings (workers 1, 2, 4, 0, 0, 4, 2, 1), so that a machine that gets
    slower or busier meanwhile is not held against the later ones. 0 workers come behind the others: a function that
    ends its process ends this one then, and in a worker it is an error that names the sample.

    Blocks: `seconds` for each setting, and longer where batches take longer.

    Args:
        loader: each setting is measured on a loader made of it.
        settings: what to measure.
        seconds: for each setting, over all rounds.
        rounds: windows for each setting, at least 1.
        watcher: is told how it goes.
        measure_one: a window over a loader of these seconds, which tells how much of them is over; None: `measure`.
    """
    watcher = watcher or Watcher()
    measure_one = measure_one or (lambda measured, for_s, advance: measure(measured, for_s, on_progress=advance))
    windows: dict[Setting, list[Window]] = {setting: [] for setting in settings}
    order = sorted(settings, key=lambda setting: setting.workers == 0)
    for number in range(1, rounds + 1):
        for setting in order if number % 2 else reversed(order):
            # A window that lasted for all rounds together has the accuracy of all of them: slow batches end sooner.
            if any(window.elapsed_s >= seconds for window in windows[setting]):
                watcher.skip(setting, number)
                continue
            watcher.begin(setting, number)
            with contextlib.closing(setting.apply(loader)) as measured:
                window = measure_one(measured, seconds / rounds, watcher.advance)
            windows[setting].append(window)
            watcher.end(window)
    return tuple(Measurement(setting, tuple(windows[setting])) for setting in settings)


def measure(
    loader: Measurable,
    seconds: float,
    *,
    now_s: Callable[[], float] = clock.monotonic_s,
    own_cpu_ns: Callable[[], int] = clock.process_cpu_ns,
    queued_s: Callable[[int], float] = queued_s,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> Window:
    """One window over a loader in its steady state; passes follow each other for as long as it takes.

    Workers that began together finish together, and a ticket may cover several batches, so batches come in bursts. A
    window therefore begins and ends with the first batch of a burst: a cut elsewhere would be off by up to all of one.
    Threads have many batches under way, and what they have made ahead is handed over at once: a window ends with as
    many batches in stock as it began with.

    Blocks: until `seconds` are over after the warm-up, and in any case for a batch of each worker.

    Args:
        loader: what is measured; it is not closed.
        seconds: length of the window, above 0.
        now_s: the clock.
        own_cpu_ns: the CPU time of this process.
        queued_s: how long a process, by its id, has waited for a CPU so far.
        on_progress: called now and then with the share of the time that is over.

    Raises:
        ArgumentError: a pass over the loader has no batch.
    """
    with contextlib.closing(_batches(loader)) as batches:
        bursts = _Bursts(now_s)
        _warm_up(loader, batches, bursts)
        before = loader.statistics()
        queued_before_s = _queued(before, queued_s)
        cpu_before_ns, start_s = own_cpu_ns(), now_s()
        fewest = max(1, len(before.workers))
        taken, reported_s = 0, start_s
        while True:
            next(batches)
            taken += 1
            is_first = bursts.is_first()
            end_s = bursts.latest_s
            if end_s - start_s >= seconds and taken >= fewest and is_first:
                is_late = end_s - start_s >= _LONGEST * seconds
                if is_late or abs(_backlog(loader.statistics()) - _backlog(before)) <= fewest:
                    break
            if end_s - reported_s >= _REPORT_EVERY_S:
                reported_s = end_s
                on_progress(min(1.0, (end_s - start_s) / seconds))
        cpu_after_ns, after = own_cpu_ns(), loader.statistics()
        queued_after_s = _queued(after, queued_s)
    return Window(
        wanted_s=seconds,
        elapsed_s=end_s - start_s,
        batches=after.batches - before.batches,
        samples=after.samples - before.samples,
        nbytes=after.bytes - before.bytes,
        consumer_wait_s=after.consumer_wait_s - before.consumer_wait_s,
        own_cpu_s=(cpu_after_ns - cpu_before_ns) / 1e9,
        queued_s=sum(after_s - queued_before_s.get(pid, 0.0) for pid, after_s in queued_after_s.items()),
        workers=_differences(before.workers, after.workers),
    )


def _batches(loader: Measurable) -> Generator[None, None, None]:
    """Hand-overs without end, pass after pass; a batch is let go when the next one is asked for, as training does."""
    while True:
        is_empty = True
        for _ in loader:
            is_empty = False
            yield
        if is_empty:
            raise ArgumentError("a pass over the loader has no batch, so there is nothing to measure")


class _Bursts:
    """Tells the first batch of a burst from those that were ready with it: it alone was waited for."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._taken = 0
        self.first_s = self.latest_s = 0.0  # when the first and the latest batch were handed over

    def is_first(self) -> bool:
        """Whether the batch that was handed over just now begins a burst; to be asked once for each."""
        now_s = self._now_s()
        if not self._taken:
            self.first_s = self.latest_s = now_s
        # Half of the mean gap: in a burst gaps are next to none, before one they are its size times the mean, and
        # in an even stream all of them are near the mean.
        is_first = now_s - self.latest_s >= 0.5 * (now_s - self.first_s) / max(1, self._taken)
        self._taken += 1
        self.latest_s = now_s
        return is_first


def _warm_up(loader: Measurable, batches: Iterator[None], bursts: _Bursts) -> None:
    """Take batches until each worker has made one and each slot was used, or for a while; up to a burst's first."""
    while True:
        next(batches)
        if not bursts.is_first():
            continue
        seen = loader.statistics()
        if all(worker.samples for worker in seen.workers) and seen.batches >= seen.slots:
            return
        if bursts.latest_s - bursts.first_s >= _WARM_UP_S:
            return


def _backlog(statistics: Statistics) -> float:
    """Batches that workers have made and that are not handed over."""
    if not statistics.workers:
        return 0.0
    made = sum(worker.samples for worker in statistics.workers)
    return (made - statistics.samples) * statistics.batches / max(1, statistics.samples)


def _queued(statistics: Statistics, queued_s: Callable[[int], float]) -> dict[int, float]:
    """How long each process that makes samples has waited for a CPU so far."""
    pids = [worker.pid for worker in statistics.workers if worker.pid is not None] or [os.getpid()]
    return {pid: queued_s(pid) for pid in pids}


def _differences(before: Sequence[WorkerStatistics], after: Sequence[WorkerStatistics]) -> tuple[WorkerStatistics, ...]:
    """What each worker that lives at the end did in between."""
    starts = {worker.index: worker for worker in before}
    return tuple(_difference(starts.get(worker.index), worker) for worker in after)


def _difference(start: WorkerStatistics | None, end: WorkerStatistics) -> WorkerStatistics:
    if start is None:
        return end
    # The counts go on when a worker is replaced; its process, and with it the CPU time, begins again.
    cpu_before_s = start.cpu_s if start.pid == end.pid else 0.0
    return dataclasses.replace(
        end,
        batches=end.batches - start.batches,
        samples=end.samples - start.samples,
        busy_s=end.busy_s - start.busy_s,
        wait_s=end.wait_s - start.wait_s,
        cpu_s=max(0.0, end.cpu_s - cpu_before_s),
    )
