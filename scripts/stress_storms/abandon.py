"""Passes that are left early, hundreds of them, and what they leave behind: it must be nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import random
import threading
import time
from collections.abc import Callable
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
_FRESH_EVERY = 20  # passes, one is over a loader of its own, which is dropped with it
_SETTLE_S = 5.0
# A ring has as many slots as its most runs at once have needed: two iterators, the next epoch's run that stands ready,
# and one that was left and is not answered yet.
_MOST_RUNS = 4
_MOST_KEPT = 12  # batches, of an iterator
_MOST_TAKEN = 60
# What one leaked object a pass would exceed; smaller, and the allocator's own moods show.
_SLACK_BYTES = 12 << 20
_ARENA_SLACK_BYTES = 1 << 20


class _ConsumerFailedError(Exception):
    """Of the loop's body."""


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What this process and those below it hold."""

    processes: int
    threads: int  # of all of them
    descriptors: int  # of all of them
    arena_bytes: int  # pages of shared memory that are taken
    pss_bytes: int  # memory of all of them, shared pages counted once


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


def take_holdings() -> Holdings:
    """What is held now. A process that ends meanwhile is not counted."""
    tree = [os.getpid(), *descendants(os.getpid())]
    sums = [_sum_over(tree, look) for look in (_threads, count_fds, read_pss)]
    return Holdings(len(tree), sums[0], sums[1], _arena_bytes(), sums[2])


def growth(before: Holdings, after: Holdings) -> list[Growth]:
    """Each holding, and whether it grew: numbers not at all, memory by no more than its slack."""
    slack = {"arena_bytes": _ARENA_SLACK_BYTES, "pss_bytes": _SLACK_BYTES}
    found = []
    for field in dataclasses.fields(Holdings):
        was, is_now = getattr(before, field.name), getattr(after, field.name)
        found.append(Growth(field.name, was, is_now, was + slack.get(field.name, 0)))
    return found


def run_abandoned(passes: int, seed: int, deadline_s: float, say: Callable[[str], None]) -> list[Growth]:
    """Leave so many passes early, in every way there is.

    Args:
        passes: how many, after as many again as it takes to know each loader.
        seed: of what is drawn.
        deadline_s: for each, and for the loaders' start.
        say: is told how far it is.
    """
    draw = random.Random(f"{seed}/abandon")
    faults = Faults("", os.getpid(), 0)
    names = [name for name in SHAPES if name not in _LEFT_OUT]
    with lp.Pool(_WORKERS) as pool:
        loaders = {name: make(SHAPES[name], faults, seed, pool=pool) for name in names}

        def leave_one(number: int) -> None:
            name = draw.choice(names)
            is_fresh = number % _FRESH_EVERY == 0
            where: dict[str, Any] = {"pool": pool} if number % (2 * _FRESH_EVERY) else {"workers": 1}
            loader = make(SHAPES[name], faults, seed, **where) if is_fresh else loaders[name]
            with watched(deadline_s, f"abandoned pass {number} ({name})"):
                _leave(loader, draw)

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


def _grow_ring(loader: lp.Loader) -> None:
    """Have as many slots as it ever will, for those that a ring has it keeps."""
    for _ in loader:  # its slots are as large as they will be
        pass
    iterators = [iter(loader) for _ in range(_MOST_RUNS)]
    kept = [[next(each, None) for _ in range(_MOST_KEPT)] for each in iterators]
    del kept


def _leave(loader: lp.Loader, draw: random.Random) -> None:
    """One pass, taken for some batches and left."""
    take = draw.choice((0, 1, 1, 2, 3, draw.randrange(_MOST_TAKEN)))
    how = draw.choice(("break", "exception", "drop", "close", "cycle", "two at once"))
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
        if dataclasses.replace(now, pss_bytes=0) == dataclasses.replace(latest, pss_bytes=0):
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


def _threads(pid: int) -> int:
    return threading.active_count() if pid == os.getpid() else len(os.listdir(f"/proc/{pid}/task"))


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
