"""Passes that are left early, hundreds of them, and what this process and those below it hold afterwards: no more.

glibc is told to have one heap (`M_ARENA_MAX`), or each thread that has read a stream would keep a heap of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import re
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

import loaderpool as lp
from loaderpool.engine.version import Version

from .killer import watched
from .shapes import SHAPES, Faults, make

# Row ranges take seconds a pass; the others are here.
_LEFT_OUT = ("row ranges of slow batches",)
_WORKERS = 2
_WAYS = ("break", "exception", "drop", "close", "cycle")
_UNLOAD_S = 5.0
_FRESH_EVERY = 20  # passes, one is over a loader of its own, which is dropped with it
# A ring has as many slots as its most runs at once have needed: two iterators, the next epoch's run that stands ready,
# and one that was left and is not answered yet.
_MOST_RUNS = 4
_MOST_KEPT = 12  # batches, of an iterator
_MOST_TAKEN = 60
_SETTLE_S = 5.0
_NEVER_RESTS = ("trainer_bytes", "own_bytes")
_SHARED_MEMORY = Path("/dev/shm")
# What 500 passes were seen to add: 1.4 MiB of the arena, where the rings of the recorders fill (they end at 1.8 MiB a
# worker), and 2.3 MiB of the trainer; 1,500 passes add 1.9 and 3 MiB. The whole tree's memory goes up and down by
# 4 MiB, because a worker that was forked a moment ago has few pages of its own. Smaller slacks cry wolf, larger ones
# miss small leaks.
_SLACKS = {"arena_bytes": 2 << 20, "trainer_bytes": 3 << 20, "own_bytes": 8 << 20}


class _ConsumerFailedError(Exception):
    """Of the loop's body."""


def run_abandoned(
    passes: int, shapes: Iterable[str], seed: int, deadline_s: float, say: Callable[[str], None]
) -> list[Growth]:
    """Leave so many passes early, in every way there is, after as many again as it takes to know each loader."""
    draw = random.Random(f"{seed}/abandon")
    names = [name for name in shapes if name not in _LEFT_OUT]
    # Temporary files of this process and those that it starts come there, too, so that they can be counted.
    with (
        tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder,
        unittest.mock.patch.dict(os.environ, TMPDIR=folder),
        unittest.mock.patch.object(tempfile, "tempdir", folder),
        lp.Pool(_WORKERS) as pool,
    ):
        faults = Faults(folder, os.getpid(), 0)
        loaders = {
            name: make(SHAPES[name], faults, seed, workers=pool)
            for name in names
            if not SHAPES[name].is_one_shot
        }

        def leave_one(number: int) -> None:
            name = draw.choice(names)
            shape = SHAPES[name]
            is_fresh = number % _FRESH_EVERY == 0 or shape.is_one_shot
            where = pool if number % (2 * _FRESH_EVERY) else 1
            loader = make(shape, faults, seed, workers=where) if is_fresh else loaders[name]
            ways = [*_WAYS, *(() if shape.is_one_shot else ("two at once",))]
            with watched(deadline_s, f"abandoned pass {number} ({name})"):
                _leave(
                    loader,
                    draw,
                    ways if shape.is_one_shot or shape.is_sequence else [*ways, "saved"],
                )

        def settle() -> dict[str, int]:
            # Every loader in the same state: a worker is as large as what it did last.
            for name, loader in loaders.items():
                with watched(deadline_s, f"a whole pass of {name}"):
                    for _ in range(2):
                        for _batch in loader:
                            pass
                        del _batch
            _wait_unloaded(pool)
            found = _settled()
            return {
                **found,
                "arena_bytes": found["arena_bytes"] - sum(map(_ahead_bytes, loaders.values())),
            }

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
        return [
            Growth(what, was, after[what], was + _SLACKS.get(what, 0))
            for what, was in before.items()
        ]


def _wait_unloaded(pool: lp.Pool) -> None:
    """Those that were dropped have given their memory back: the pool's trainer does so when it next looks."""
    gc.collect()
    workers = pool._worker_pool
    deadline = time.monotonic() + _UNLOAD_S
    while workers is not None and time.monotonic() < deadline:
        if not any(isinstance(each, Version) for each in list(workers.session.listeners.values())):
            return
        workers.catch_up()
        time.sleep(0.01)


def _ahead_bytes(loader: lp.Loader) -> int:
    """Where a stream's items lie that are read ahead: further, the larger the largest chunk was that there ever was."""
    engine: Any = loader._core.engine
    feeds = engine.feeds.present
    if feeds is None:
        return 0
    held = [extent for feed in feeds._feeds for extent in feed.held.items._by_batch.values()]
    spare = [extent for _, extent in feeds.rooms._spare]
    return sum(extent.nbytes for extent in held + spare)


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
        state = batches.state_dict()
        del batches  # or a ring would have to serve one run more than elsewhere
        loader.load_state_dict(state)
        next(iter(loader))
    else:
        batches = iter(loader)
        kept = [next(batches, None) for _ in range(min(take, _MOST_KEPT))]
        if how == "close":
            batches.close()
        elif how == "cycle":  # only a collection ends it
            kept.append(kept)
            kept.append(batches)
    if (
        how == "cycle" or draw.random() < 0.2
    ):  # left to itself Python may take a hundred passes to look
        gc.collect()


# ---- what is held


@dataclasses.dataclass(frozen=True)
class Growth:
    """One kind of holding before and after, and what it may be after."""

    what: str
    before: int
    after: int
    at_most: int

    @property
    def is_leak(self) -> bool:
        """Whether it has grown."""
        return self.after > self.at_most


def _settled() -> dict[str, int]:
    """What is held once nothing moves any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + _SETTLE_S
    latest: dict[str, int] = {}
    while True:
        now = _held()
        rests = {what: number for what, number in now.items() if what not in _NEVER_RESTS}
        if rests.items() <= latest.items() or time.monotonic() >= deadline:
            return now
        latest = now
        time.sleep(0.2)


def _held() -> dict[str, int]:
    """What this process and those below it hold; one that ends meanwhile is not counted."""
    me = psutil.Process()
    threads, descriptors, own = threading.active_count(), me.num_fds(), _own_bytes(me.pid)
    trainer_bytes, children = own, me.children(recursive=True)
    for process in children:
        with contextlib.suppress(OSError, psutil.Error):
            seen = process.num_threads(), process.num_fds(), _own_bytes(process.pid)
            threads, descriptors, own = threads + seen[0], descriptors + seen[1], own + seen[2]
    # In the folder for temporary files, where caches on disk are, too, and ours in /dev/shm.
    files = _sizes([*Path(tempfile.gettempdir()).rglob("*"), *_SHARED_MEMORY.glob("*loaderpool*")])
    return {
        "processes": 1 + len(children),
        "threads": threads,
        "descriptors": descriptors,
        "files": len(files),
        "file_bytes": sum(files.values()),
        "arena_bytes": sum(
            _sizes(file for file in Path("/proc/self/fd").iterdir() if _is_arena(file)).values()
        ),
        "trainer_bytes": trainer_bytes,  # this process's heap and anonymous memory
        "own_bytes": own,  # the same of all of them, shared pages counted once
    }


def _sizes(paths: Iterable[Path]) -> dict[tuple[int, int], int]:
    """Bytes of pages or blocks of each file, by its inode, so that it is counted once."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):  # deleted or closed in between
            status = path.stat()
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _is_arena(descriptor: Path) -> bool:
    try:
        return "loaderpool-arena" in os.readlink(descriptor)
    except OSError:
        return False


def _own_bytes(pid: int) -> int:
    """Its share of memory that no file is behind: `Pss_Anon`, in which the arena and libraries are not."""
    (line,) = re.findall(
        r"^Pss_Anon: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    ) or ["0"]
    return int(line) * 1024
