"""Finds running trainings under /proc, and reads what they share; nothing is called or written there.

A trainer's descriptors of its memory files can be opened by who may look at the process: its user, and root. Files are
read, not mapped: a read of a file that got shorter ends, where a mapping's would end this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loaderpool.memory.board import BOARD_BYTES, Board
from loaderpool.memory.call_times import CALL_TIMES_OF_WORKER_BYTES
from loaderpool.memory.recorder import DELIVERIES, read_ring
from loaderpool.system import clock, cpu_time, machine
from loaderpool.tools.watching.snapshot import LoaderSnapshot, PoolMemory, take_snapshot
from loaderpool.trainer.explain.looks import Look
from loaderpool.trainer.explain.page import NAME, PAGE_BYTES, PageContent
from loaderpool.trainer.tracing.recording import LoaderRecords, PoolRecords, Recording, read_clocks, read_pool

_PAGE_LINK = f"/memfd:loaderpool-{NAME} (deleted)"
_ARENA_LINK = "/memfd:loaderpool-arena (deleted)"
# What bytes that are no page, or another version's, may raise when they are decoded.
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Descriptors are looked through again after so long: a loader has begun, or was closed.
_LIST_AGAIN_NS = 500_000_000
# Of a command line. Longer: one with a thousand arguments would fill the screen.
_MOST_CHARACTERS = 200

_Identity = tuple[int, int]


class UnwatchableError(Exception):
    """A process cannot be watched; the text is one sentence that says why."""


class TrainingEnded(Exception):
    """The process that was watched has ended; the text says which."""


@dataclasses.dataclass(frozen=True)
class TrainingSnapshot:
    """A training at this moment."""

    pid: int
    command: str  # its command line
    loaders: tuple[LoaderSnapshot, ...]  # those that have delivered a batch, and were not closed


class _Files(NamedTuple):
    """A process's memory files that count, each as where it can be opened."""

    pages: dict[_Identity, str]
    arenas: dict[_Identity, str]


def find_trainings() -> list[tuple[int, str]]:
    """Return pid and command line of each process that this one may look at and that has a page of looks."""
    found = []
    for name in sorted(filter(str.isdecimal, _listed("/proc")), key=int):
        pid = int(name)
        with contextlib.suppress(OSError):
            if _own_pages(pid):
                found.append((pid, command_line(pid)))
    return found


def _own_pages(pid: int) -> bool:
    """Whether it has a page that it has not inherited. One that cannot be read counts: watching it will say why."""
    for path in _files(pid).pages.values():
        try:
            page = _read_page(path)
            if page is not None and _is_own(page, pid):
                return True
        except _DAMAGED:
            return True
        except OSError:
            pass
    return False


def command_line(pid: int) -> str:
    """Return how a process was started, on one line of characters that can be printed; empty: it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    text = "".join(each if each.isprintable() else "?" for each in text)  # a terminal would obey some of them
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


class WatchedTraining:
    """A training that is watched until it ends.

    Args:
        pid: of its process.

    Raises:
        UnwatchableError: there is none, or it may not be looked at, or has no loader.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._start_time = machine.start_time(pid)
        if not self._start_time:
            raise UnwatchableError(f"there is no process {pid}")
        self._command = command_line(pid)
        self._listed_ns = 0
        self._files = _Files({}, {})
        self._known: dict[_Identity, list[Look]] = {}
        self._has_begun = False

    def read(self) -> TrainingSnapshot:
        """Return what it is at.

        Raises:
            TrainingEnded: its process has.
            UnwatchableError: it may not be looked at, has no loader, or what it has left cannot be read.
        """
        with self._looking():
            loaders = tuple(self._loaders())
        if not loaders and not self._has_begun:
            raise self._has_no_loader()
        self._has_begun = True
        return TrainingSnapshot(self.pid, self._command, loaders)

    def recording(self) -> Recording:
        """Return what its processes have recorded.

        Raises:
            TrainingEnded, UnwatchableError: as `read` does.
        """
        with self._looking():
            self._files = _files(self.pid)
            pools: dict[_Identity, PoolRecords] = {}
            loaders = []
            for page, path in self._own_pages():
                with contextlib.suppress(FileNotFoundError):  # it was closed just now
                    loaders.append(self._recorded_of(page, path, pools))
            now_ns, wall_ns = read_clocks()
        if not loaders:
            raise self._has_no_loader()
        return Recording(self.pid, self._command, loaders, list(pools.values()), now_ns, wall_ns)

    def _recorded_of(self, page: PageContent, path: str, pools: dict[_Identity, PoolRecords]) -> LoaderRecords:
        """Return what a loader's ring holds; its pool's are added to these."""
        has_hosts = any(not worker.pid for worker in page.looks[-1].work.workers.values())
        found, place = page.more.get("arena"), None
        identity = tuple(found) if found is not None else None
        if identity in self._files.arenas:
            if identity not in pools:
                arena = self._files.arenas[identity]
                nbytes = os.stat(arena).st_size
                pools[identity] = read_pool(lambda at, nbytes: _read(arena, at, nbytes), nbytes, has_hosts)
            place = list(pools).index(identity)
        deliveries = read_ring(lambda at, nbytes: _read(path, at, nbytes), PAGE_BYTES, DELIVERIES)
        return LoaderRecords(page.more.get("loader"), place, page.about.calls_of, has_hosts, deliveries, page.asked_ns)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Have what goes wrong in the block be said in a sentence."""
        try:
            yield
        except OSError as error:
            if machine.start_time(self.pid) != self._start_time:
                raise self._ended() from None
            raise UnwatchableError(self._why_not(error)) from None
        except _DAMAGED:
            raise UnwatchableError(
                f"what process {self.pid} tells of a loader cannot be read: it runs another version of loaderpool, "
                "or memory of it was overwritten"
            ) from None
        if machine.start_time(self.pid) != self._start_time:
            raise self._ended()

    def _has_no_loader(self) -> UnwatchableError:
        return UnwatchableError(f"process {self.pid} has no loader that has delivered a first batch")

    def _ended(self) -> TrainingEnded:
        return TrainingEnded(f"there is no process {self.pid} any more")

    def _why_not(self, error: OSError) -> str:
        try:
            user = os.stat(f"/proc/{self.pid}").st_uid
        except OSError:
            user = os.geteuid()
        if user != os.geteuid():
            return f"process {self.pid} is another user's (uid {user}): it can be watched by that user alone"
        return f"process {self.pid} cannot be looked at: {error.strerror}"

    def _loaders(self) -> Iterator[LoaderSnapshot]:
        now_ns = clock.monotonic_ns()
        if not self._listed_ns or now_ns - self._listed_ns >= _LIST_AGAIN_NS:
            self._files, self._listed_ns = _files(self.pid), now_ns
            self._known = {each: looks for each, looks in self._known.items() if each in self._files.pages}
        pools: dict[_Identity, PoolMemory | None] = {}
        for page, _ in self._own_pages():
            pool = self._pool_of(page, pools)
            yield take_snapshot(page, pool, clock.monotonic_ns())  # no time in it is later

    def _own_pages(self) -> Iterator[tuple[PageContent, str]]:
        """Yield what its pages have, and where each is."""
        for identity, path in self._files.pages.items():
            try:
                page = _read_page(path, self._known.get(identity, ()))
            except FileNotFoundError:  # the loader was closed since they were listed
                continue
            if page is not None and page.looks and _is_own(page, self.pid):
                self._known[identity] = page.looks
                yield page, path

    def _pool_of(self, page: PageContent, pools: dict[_Identity, PoolMemory | None]) -> PoolMemory | None:
        """Return the pool that a loader has its workers of; None: it has none, or it is gone."""
        found = page.more.get("arena")
        if found is None:
            return None
        device, inode = found
        identity = (device, inode)
        if identity not in pools:
            path = self._files.arenas.get(identity)
            pools[identity] = _read_pool(path) if path is not None else None
        return pools[identity]


def _files(pid: int) -> _Files:
    """Return the memory files of a process.

    Raises:
        OSError: it is gone, or may not be looked at.
    """
    files = _Files({}, {})
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with contextlib.suppress(FileNotFoundError):  # closed since then
            link = os.readlink(path)
            if link in (_PAGE_LINK, _ARENA_LINK):
                status = os.stat(path)
                of = files.pages if link == _PAGE_LINK else files.arenas
                of.setdefault((status.st_dev, status.st_ino), path)
    return files


def _is_own(page: PageContent, pid: int) -> bool:
    """Whether the process has made it; a fork inherits those of the process that it is of."""
    return bool(page.more.get("pid") == pid)


def _read_page(path: str, known: Sequence[Look] = ()) -> PageContent | None:
    """Return what a page has; None: its first words, the version among them, are not written yet."""
    data = _read(path, 0, PAGE_BYTES)
    return PageContent(data, known) if any(data[:8]) else None


def _read_pool(path: str) -> PoolMemory | None:
    """Return what workers have written; None: it is gone."""
    try:
        board = _read(path, 0, BOARD_BYTES)
        pids = Board(board).pids()
        nbytes = (max(pids, default=-1) + 1) * CALL_TIMES_OF_WORKER_BYTES
        call_times = _read(path, BOARD_BYTES, nbytes)
    except FileNotFoundError:
        return None
    cpu_s = {pid: cpu_time.process_cpu_s(pid) for pid in pids.values() if machine.start_time(pid)}
    return PoolMemory(board, call_times, cpu_s)


def _read(path: str, at: int, nbytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no memory file")
        return os.pread(descriptor, nbytes, at)
    finally:
        os.close(descriptor)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
