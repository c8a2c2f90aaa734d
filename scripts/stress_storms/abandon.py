"""Passes that are left early, hundreds of them, and what they leave behind: it must be nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import loaderpool as lp

from .holdings import Growth, Holdings, growth, settled_holdings
from .shapes import SHAPES, Faults, make
from .watchdog import watched

__all__ = ["run_abandoned"]

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


class _ConsumerFailedError(Exception):
    """Of the loop's body."""


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
        loaders = {
            name: make(SHAPES[name], faults, seed, workers=pool) for name in names if not SHAPES[name].is_one_shot
        }

        def leave_one(number: int) -> None:
            name = draw.choice(names)
            shape = SHAPES[name]
            is_fresh = number % _FRESH_EVERY == 0 or shape.is_one_shot
            where = pool if number % (2 * _FRESH_EVERY) else 1
            loader = make(shape, faults, seed, workers=where) if is_fresh else loaders[name]
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
            _wait_unloaded(pool, len(loaders))
            found = settled_holdings()
            return dataclasses.replace(found, arena_bytes=found.arena_bytes - sum(map(_ahead_bytes, loaders.values())))

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


def _wait_unloaded(pool: lp.Pool, loaders: int) -> None:
    """Those that were dropped have given their memory back: the pool's trainer does so when it next looks."""
    gc.collect()
    session = pool._session
    deadline = time.monotonic() + _UNLOAD_S
    while session is not None and len(session.routing.by_loader) > loaders and time.monotonic() < deadline:
        session.catch_up()
        time.sleep(0.01)


def _ahead_bytes(loader: lp.Loader) -> int:
    """Where a stream's items lie that are read ahead: further, the larger the largest chunk was that there ever was."""
    engine: Any = loader._core.engine
    if engine.feeds is None:
        return 0
    held = [extent for feed in engine.feeds._feeds for extent in feed._held.values()]
    spare = [extent for _, extent in engine.feeds._rooms._spare]
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
    if how == "cycle" or draw.random() < 0.2:  # left to itself Python may take a hundred passes to look
        gc.collect()
