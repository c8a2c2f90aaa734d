"""Passes that are left early, hundreds of them, and what they leave behind: it must be nothing."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import loaderpool as lp
from tests.support.processes import count_fds, descendants, read_pss

from .shapes import SHAPES, Faults, make
from .watchdog import watched

__all__ = ["Growth", "Holdings", "growth", "run_abandoned", "take_holdings"]

# Row ranges take seconds a pass; the others are here.
_LEFT_OUT = ("row ranges of slow batches",)
_WORKERS = 2
_WAYS = ("break", "exception", "drop", "close", "cycle")
_FRESH_EVERY = 20  # passes, one is over a loader of its own, which is dropped with it
_SETTLE_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")
# A ring has as many slots as its most runs at once have needed: two iterators, the next epoch's run that stands ready,
# and one that was left and is not answered yet.
_MOST_RUNS = 4
_MOST_KEPT = 12  # batches, of an iterator
_MOST_TAKEN = 60
# Over 500 passes the trainer's own memory was seen to grow by 0.1 MiB. The whole tree's goes up and down by 4 MiB, for
# a worker that was forked a moment ago has few pages of its own. Smaller slacks cry wolf, larger ones miss small leaks.
_SLACKS = {"arena_bytes": 1 << 20, "trainer_bytes": 2 << 20, "own_bytes": 8 << 20, "file_bytes": 0}


class _ConsumerFailedError(Exception):
    """Of the loop's body."""


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What this process and those below it hold."""

    processes: int
    threads: int  # of all of them
    descriptors: int  # of all of them
    files: int  # in the folder for temporary files, where caches on disk are, too, and ours in /dev/shm
    arena_bytes: int  # pages of shared memory that are taken
    file_bytes: int  # of the files
    trainer_bytes: int  # this process's heap and anonymous memory
    own_bytes: int  # the same of all of them, shared pages counted once
    # All memory of all of them. Not judged: which pages of the arena happen to be mapped hangs on how old the workers
    # are (their number is above), and the share of a library's pages on who else on the machine has it mapped.
    pss_bytes: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """One kind of holding before and after, and what it may be after."""

    what: str
    before: int
    after: int
    at_most: int | None  # None: it is shown, not judged

    @property
    def is_leak(self) -> bool:
        """Whether it has grown."""
        return self.at_most is not None and self.after > self.at_most


def take_holdings() -> Holdings:
    """What is held now. A process that ends meanwhile is not counted."""
    tree = [os.getpid(), *descendants(os.getpid())]
    threads, descriptors, own, pss = (_sum_over(tree, look) for look in (_threads, count_fds, _own_bytes, read_pss))
    files = _files()
    return Holdings(
        len(tree),
        threads,
        descriptors,
        len(files),
        _arena_bytes(),
        sum(files.values()),
        _own_bytes(os.getpid()),
        own,
        pss,
    )


def growth(before: Holdings, after: Holdings) -> list[Growth]:
    """Each holding, and whether it grew: numbers not at all, memory by no more than its slack."""
    found = []
    for field in dataclasses.fields(Holdings):
        was, is_now = getattr(before, field.name), getattr(after, field.name)
        at_most = None if field.name == "pss_bytes" else was + _SLACKS.get(field.name, 0)
        found.append(Growth(field.name, was, is_now, at_most))
    return found


def run_abandoned(
    passes: int, shapes: Iterable[str], seed: int, deadline_s: float, say: Callable[[str], None]
) -> list[Growth]:
    """Leave so many passes early, in every way there is.

    Args:
        passes: how many, after as many again as it takes to know each loader.
        shapes: over which.
        seed: of what is drawn.
        deadline_s: for each, and for the loaders' start.
        say: is told how far it is.
    """
    draw = random.Random(f"{seed}/abandon")
    names = [name for name in shapes if name not in _LEFT_OUT]
    with _temporary_folder() as folder, lp.Pool(_WORKERS) as pool:
        faults = Faults(folder, os.getpid(), 0)
        loaders = {name: make(SHAPES[name], faults, seed, pool=pool) for name in names if not SHAPES[name].is_one_shot}

        def leave_one(number: int) -> None:
            name = draw.choice(names)
            shape = SHAPES[name]
            is_fresh = number % _FRESH_EVERY == 0 or shape.is_one_shot
            where: dict[str, Any] = {"pool": pool} if number % (2 * _FRESH_EVERY) else {"workers": 1}
            loader = make(shape, faults, seed, **where) if is_fresh else loaders[name]
            ways = [*_WAYS, *(() if shape.is_one_shot else ("two at once",))]
            with watched(deadline_s, f"abandoned pass {number} ({name})"):
                _leave(loader, draw, ways if shape.is_one_shot or shape.is_sequence else [*ways, "saved"])

        def settle() -> Holdings:
            # Every loader in the same state: a worker is as large as what it did last.
            for name, loader in loaders.items():
                with watched(deadline_s, f"a whole pass of {name}"):
                    for _ in range(2):
                        for _batch in loader:
                            pass
                        del _batch
            return _settled()

        for loader in loaders.values():
            _grow_ring(loader)
        for number in range(max(2 * _FRESH_EVERY, passes // 5)):
            leave_one(number)
        before = settle()
        for number in range(passes):
            leave_one(number)
            if (number + 1) % 100 == 0:
                say(f"{number + 1} passes abandoned")
        after = settle()
        return growth(before, after)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Where temporary files of this process and those that it starts come from now on, so that they can be counted."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


def _grow_ring(loader: lp.Loader) -> None:
    """Have as many slots as it ever will, for those that a ring has it keeps."""
    for _ in loader:  # its slots are as large as they will be
        pass
    iterators = [iter(loader) for _ in range(_MOST_RUNS)]
    kept = [[next(each, None) for _ in range(_MOST_KEPT)] for each in iterators]
    del kept


def _leave(loader: lp.Loader, draw: random.Random, ways: Sequence[str]) -> None:
    """One pass, taken for some batches and left."""
    take = draw.choice((0, 1, 1, 2, 3, draw.randrange(_MOST_TAKEN)))
    how = draw.choice(ways)
    if how == "break":
        for number, _ in enumerate(loader):
            if number >= take:
                break
    elif how == "exception":
        try:
            for number, _ in enumerate(loader):
                if number >= take:
                    raise _ConsumerFailedError
        except _ConsumerFailedError:
            pass
    elif how == "two at once":
        one, other = iter(loader), iter(loader)
        for _ in range(take):
            next(one, None)
            next(other, None)
    elif how == "saved":
        batches = iter(loader)
        for _ in range(take):
            next(batches, None)
        loader.load_state_dict(batches.state_dict())
        next(iter(loader))
    else:
        batches = iter(loader)
        kept = [next(batches, None) for _ in range(min(take, _MOST_KEPT))]
        if how == "close":
            batches.close()
        elif how == "cycle":  # only a collection ends it
            kept.append(kept)
            kept.append(batches)
    if how == "cycle" or draw.random() < 0.2:  # left to itself Python may take a hundred passes to look
        gc.collect()


def _settled() -> Holdings:
    """What is held once nothing moves any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + _SETTLE_S
    latest = take_holdings()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = take_holdings()
        if (
            dataclasses.astuple(now)[:6] == dataclasses.astuple(latest)[:6]
        ):  # numbers, arena and files; memory never rests
            return now
        latest = now
    return latest


def _sum_over(tree: list[int], look: Callable[[int], int]) -> int:
    total = 0
    for pid in tree:
        try:
            total += look(pid)
        except (OSError, ProcessLookupError):
            continue
    return total


def _own_bytes(pid: int) -> int:
    """Its share of memory that no file is behind: `Pss_Anon`, in which the arena and libraries are not."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory")


def _threads(pid: int) -> int:
    return threading.active_count() if pid == os.getpid() else len(os.listdir(f"/proc/{pid}/task"))


def _files() -> dict[str, int]:
    """Bytes of each file that this process and those below it may have left."""
    found = {}
    for path in (*Path(tempfile.gettempdir()).rglob("*"), *_SHARED_MEMORY.glob("*loaderpool*")):
        with contextlib.suppress(FileNotFoundError):  # deleted in between
            found[str(path)] = path.stat().st_blocks * 512
    return found


def _arena_bytes() -> int:
    """Pages of all arenas of this process, each counted once."""
    found: dict[int, int] = {}
    for file in Path("/proc/self/fd").iterdir():
        try:
            if "loaderpool-arena" in os.readlink(file):
                status = file.stat()
                found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())
