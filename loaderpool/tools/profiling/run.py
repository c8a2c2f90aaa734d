"""Runs a loader with samplers in its workers, for some seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from loaderpool.errors import ArgumentError, ClosedError, LoaderpoolError
from loaderpool.system import clock
from loaderpool.tools.profiling.profile import Profile, merge
from loaderpool.tools.profiling.recording import Recording, read_recordings
from loaderpool.tools.profiling.sampler import CONTROL, SamplingSetup
from loaderpool.trainer.loader import Loader

_LOOK_S = 0.05  # how often it is looked whether something has happened; a bar needs no more
# A worker whose function holds the interpreter's lock cannot write its last looks: those before are taken then.
_LAST_LOOKS_S = 1.0


@dataclasses.dataclass(frozen=True)
class ProfileRun:
    """A profile, and what became of the loader meanwhile."""

    profile: Profile
    workers: int
    batches: int  # handed over while it was looked
    samples: int
    is_whole: bool  # a batch was there before the time; False: calls take longer than that
    changes: tuple[str, ...]  # what was changed of the loader, and what cannot be seen, as sentences
    error: LoaderpoolError | None  # what ended it before the time

    @property
    def samples_per_s(self) -> float:
        """Rows per second while it was looked."""
        return self.samples / self.profile.window_s if self.profile.window_s else 0.0


def run_profile(
    loader: Loader,
    seconds: float,
    interval_s: float,
    workers: int | None = None,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> ProfileRun:
    """Run a loader like this one and look where its functions spend their time.

    It runs as it is, but without its cache; nothing is trained. It is looked from the first batch on, which is made
    with imports and files to open; where no batch comes in `seconds`, from the first call.

    Blocks: `seconds` behind that; with `workers=0` until the call is over that runs then.

    Args:
        loader: closed, or about to be; it is not iterated itself.
        seconds: how long it is looked.
        interval_s: from one look at a worker to the next.
        workers: how many there shall be; None: as many as the loader has.
        on_progress: called now and then with the share of the time that is over, by another thread.

    Raises:
        ArgumentError: the loader cannot have that number of workers.
    """
    arguments = loader._core.arguments
    changed, notes = _changes(loader, workers)
    with tempfile.TemporaryDirectory(prefix="loaderpool-profile-") as name:
        folder = Path(name)
        (folder / CONTROL).write_bytes(b"\0")
        threads = loader.config.worker_options.threads
        setup = SamplingSetup(arguments["setup"], name, interval_s, threads)
        with contextlib.closing(loader.replace(setup=setup, **changed)) as running:
            window = _Window(running, folder, seconds, on_progress)
            error = window.run()
            count = running.workers
        functions = (arguments[each] for each in ("fn", "augment", "batch_fn"))
        in_c = next((_name(each) for each in functions if each is not None and not _is_python(each)), "")
        profile = merge(window.recordings, window.since_ns, window.until_ns, in_c, window.elapsed_s)
    return ProfileRun(profile, count, window.batches, window.samples, window.is_whole, tuple(notes), error)


def _changes(loader: Loader, workers: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return what the loader that runs has in place of its own arguments, and what is to be said about it."""
    changed: dict[str, Any] = {} if workers is None else {"workers": workers}
    notes = []
    if loader._core.arguments["cache"] is not None:
        changed["cache"] = None
        notes.append("without the loader's cache, as in an epoch that fills it")
    if workers is None and loader._core.arguments["workers"].__class__.__name__ == "RayPool":
        changed["workers"] = "auto"
        notes.append("on workers of this machine, in place of the cluster's hosts")
    if loader._core.stream is not None:
        notes.append("what reading the stream takes is not in it: that is done by its reader, and not by workers")
    return changed, notes


class _Window:
    """The span of time in which it is looked."""

    def __init__(self, loader: Loader, folder: Path, seconds: float, on_progress: Callable[[float], None]) -> None:
        self._loader, self._folder, self._seconds, self._on_progress = loader, folder, seconds, on_progress
        self._first_batch_ns = 0
        self._is_over = threading.Event()
        self._failure: Exception | None = None  # of the thread that sees to the time
        self.since_ns = self.until_ns = 0
        self.batches = self.samples = 0
        self.is_whole = False
        self.recordings: list[Recording] = []

    @property
    def elapsed_s(self) -> float:
        return (self.until_ns - self.since_ns) / 1e9

    def run(self) -> LoaderpoolError | None:
        """Take batches until the time is over; returns what ended it before. What `on_progress` raises ends it, too."""
        timer = threading.Thread(target=self._wait, name="loaderpool-profile", daemon=True)
        timer.start()
        try:
            self._take()
        except ClosedError:
            return None
        except LoaderpoolError as error:
            return error
        finally:
            self._is_over.set()
            timer.join()
            if self._failure is not None:
                raise self._failure
        return None

    def _take(self) -> None:
        while not self._is_over.is_set():
            is_empty = True
            for _ in self._loader:
                is_empty = False
                self._first_batch_ns = self._first_batch_ns or clock.monotonic_ns()
                if self._is_over.is_set():
                    return
            if is_empty:
                raise ArgumentError("a pass over the loader has no batch, so there is nothing to profile")

    def _wait(self) -> None:
        """See to the time. Runs in: a thread of its own, for a call may last longer than all the time there is."""
        try:
            self._look_on()
        except Exception as error:  # else batches would be taken for ever
            self._failure = error
        finally:
            self._is_over.set()
            self._loader.close()

    def _look_on(self) -> None:
        while not any(self._folder.glob("*.jsonl")):
            if self._is_over.wait(_LOOK_S):
                break
        began_ns = clock.monotonic_ns()
        while not self._first_batch_ns and clock.monotonic_ns() - began_ns < self._seconds * 1e9:
            if self._is_over.wait(_LOOK_S):
                break
        self.is_whole = bool(self._first_batch_ns)
        self.since_ns = self._first_batch_ns or began_ns
        before = self._counts()
        while (passed_s := (clock.monotonic_ns() - self.since_ns) / 1e9) < self._seconds:
            self._on_progress(passed_s / self._seconds)
            if self._is_over.wait(min(_LOOK_S, self._seconds - passed_s)):
                break
        after = self._counts()
        self.until_ns = clock.monotonic_ns()
        self.batches, self.samples = after[0] - before[0], after[1] - before[1]
        self._collect()

    def _counts(self) -> tuple[int, int]:
        try:
            statistics = self._loader.statistics()
        except LoaderpoolError:  # it is broken, as who takes batches is told
            return 0, 0
        return statistics.batches, statistics.samples

    def _collect(self) -> None:
        with open(self._folder / CONTROL, "r+b") as control:
            control.write(b"\1")
        deadline_ns = clock.monotonic_ns() + int(_LAST_LOOKS_S * 1e9)
        while True:
            self.recordings = read_recordings(self._folder)
            if all(each.is_over or each.error for each in self.recordings) or clock.monotonic_ns() > deadline_ns:
                return
            threading.Event().wait(_LOOK_S)


def _is_python(function: Any) -> bool:
    """Whether a call of it has a place in Python code."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, FunctionType):
        return True
    return isinstance(getattr(type(function), "__call__", None), FunctionType)  # noqa: B004


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module else str(name)
