"""Hundreds of abandoned passes. Afterwards, this process and its descendants must not hold more
than before.

glibc uses a single heap (`M_ARENA_MAX`). Otherwise each thread that has read a stream would keep a
heap of its own.
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

# Row ranges take seconds for each pass. All other shapes are included.
_LEFT_OUT = ("row ranges of slow batches",)
_WORKERS = 2
_WAYS = ("break", "exception", "drop", "close", "cycle")
_UNLOAD_S = 5.0
_FRESH_EVERY = 20  # one in this number of passes has a loader of its own, which is dropped with it
# A ring has as many slots as its concurrent runs have needed: two iterators, the parked run of the
# next epoch, and an abandoned run whose end is not yet confirmed.
_MOST_RUNS = 4
_MOST_KEPT = 12  # batches of one iterator
_MOST_TAKEN = 60
_SETTLE_S = 5.0
_NEVER_RESTS = ("trainer_bytes", "own_bytes")
_SHARED_MEMORY = Path("/dev/shm")
# 500 passes were observed to add 1.4 MiB to the arena, where the recorders' rings fill up (at most
# 1.8 MiB for each worker), and 2.3 MiB to the trainer. 1,500 passes add 1.9 and 3 MiB. The memory
# of all processes varies by 4 MiB, because a worker that was just forked has few pages of its own.
# Smaller: false alarms. Larger: small leaks are missed.
_SLACKS = {"arena_bytes": 2 << 20, "trainer_bytes": 3 << 20, "own_bytes": 8 << 20}


class _ConsumerFailedError(Exception):
    """Raised by the body of the loop."""


def run_abandoned(
    passes: int, shapes: Iterable[str], seed: int, deadline_s: float, say: Callable[[str], None]
) -> list[Growth]:
    """Abandon this number of passes, in every possible way. Before that, abandon enough passes to
    fill all caches.
    """
    draw = random.Random(f"{seed}/abandon")
    names = [name for name in shapes if name not in _LEFT_OUT]
    # Temporary files of this process and its children are created there, so that they can be
    # counted.
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
            # Bring every loader into the same state, because a worker's size depends on its last
            # work.
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
    """Wait until dropped loaders have released their memory. The main process releases it at its
    next call.
    """
    gc.collect()
    workers = pool._worker_pool
    deadline = time.monotonic() + _UNLOAD_S
    while workers is not None and time.monotonic() < deadline:
        if not any(isinstance(each, Version) for each in list(workers.session.listeners.values())):
            return
        workers.catch_up()
        time.sleep(0.01)


def _ahead_bytes(loader: lp.Loader) -> int:
    """Return the size of the extents for a stream's read-ahead items. It grows with the largest
    chunk so far.
    """
    engine: Any = loader._core.engine
    feeds = engine.feeds.present
    if feeds is None:
        return 0
    held = [extent for feed in feeds._feeds for extent in feed.held.items._by_batch.values()]
    spare = [extent for _, extent in feeds.rooms._spare]
    return sum(extent.nbytes for extent in held + spare)


def _grow_ring(loader: lp.Loader) -> None:
    """Make the ring as large as it will ever be, because a ring keeps its slots."""
    for _ in loader:  # the slots get their final size
        pass
    iterators = [iter(loader) for _ in range(_MOST_RUNS)]
    kept = [[next(each, None) for _ in range(_MOST_KEPT)] for each in iterators]
    del kept


def _leave(loader: lp.Loader, draw: random.Random, ways: Sequence[str]) -> None:
    """Take some batches of a pass, and abandon it."""
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
        del batches  # otherwise the ring would need slots for another run
        loader.load_state_dict(state)
        next(iter(loader))
    else:
        batches = iter(loader)
        kept = [next(batches, None) for _ in range(min(take, _MOST_KEPT))]
        if how == "close":
            batches.close()
        elif how == "cycle":  # only garbage collection ends this pass
            kept.append(kept)
            kept.append(batches)
    if (
        how == "cycle" or draw.random() < 0.2
    ):  # Python alone may collect only after a hundred passes
        gc.collect()


# ---- held resources


@dataclasses.dataclass(frozen=True)
class Growth:
    """One kind of held resource: its amount before and after, and the allowed amount after."""

    what: str
    before: int
    after: int
    at_most: int

    @property
    def is_leak(self) -> bool:
        """True if the amount has grown too much."""
        return self.after > self.at_most


def _settled() -> dict[str, int]:
    """Return the held resources when they do not change any more."""
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
    """Return the resources that this process and its descendants hold. A process that ends
    meanwhile is not counted.
    """
    me = psutil.Process()
    threads, descriptors, own = threading.active_count(), me.num_fds(), _own_bytes(me.pid)
    trainer_bytes, children = own, me.children(recursive=True)
    for process in children:
        with contextlib.suppress(OSError, psutil.Error):
            seen = process.num_threads(), process.num_fds(), _own_bytes(process.pid)
            threads, descriptors, own = threads + seen[0], descriptors + seen[1], own + seen[2]
    # Files in the folder for temporary files, which also has caches on disk, and our files in
    # /dev/shm.
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
        "trainer_bytes": trainer_bytes,  # heap and anonymous memory of this process
        "own_bytes": own,  # the same for all processes, with shared pages counted once
    }


def _sizes(paths: Iterable[Path]) -> dict[tuple[int, int], int]:
    """Return the bytes of pages or blocks of each file, by inode, so that each file counts once."""
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):  # deleted or closed meanwhile
            status = path.stat()
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found


def _is_arena(descriptor: Path) -> bool:
    try:
        return "loaderpool-arena" in os.readlink(descriptor)
    except OSError:
        return False


def _own_bytes(pid: int) -> int:
    """Return a process's share of memory without a file: `Pss_Anon`, which excludes the arena and
    libraries.
    """
    (line,) = re.findall(
        r"^Pss_Anon: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE
    ) or ["0"]
    return int(line) * 1024
