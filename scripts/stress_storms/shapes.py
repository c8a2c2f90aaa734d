"""The shapes of work that are stormed: each with its source, its function and the settings of its loader."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import loaderpool as lp

__all__ = ["SHAPES", "Faults", "Shape", "make"]

_SEQUENCE_BATCHES = 60


@dataclasses.dataclass(frozen=True)
class Faults:
    """Segmentation faults out of the function itself: of one item in so many, once in a round."""

    folder: str  # remembers which items have faulted
    trainer: int  # the pid in which nothing dies and nobody waits
    one_in: int  # 0: none

    def meet(self, item: int) -> None:
        """Die here, if this item is one that does and has not yet."""
        if self.one_in and not zlib.crc32(b"%d" % item) % self.one_in and os.getpid() != self.trainer:
            try:
                os.close(os.open(f"{self.folder}/{item}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            faulthandler._sigsegv()  # type: ignore[attr-defined]

    def wait(self, seconds: float) -> None:
        """Take this long in a worker; the twin need not wait."""
        if os.getpid() != self.trainer:
            time.sleep(seconds)


@dataclasses.dataclass(frozen=True)
class _Function:
    faults: Faults


class _Sample(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0005)
        return {"item": np.full((40, 40), item, np.float32), "noise": rng.random(5)}


class _IntoOut(_Function):
    def __call__(self, item: int, rng: np.random.Generator, out: Any) -> Any:
        noise = rng.random((16, 64))
        if out is None:
            return noise
        for row in range(16):  # half written is a state like any other
            out[row] = noise[row]
            self.faults.wait(0.00005)
            if row == 8:
                self.faults.meet(item)
        return None


class _Tiny(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        return item, rng.random()


class _OfGlobals(_Function):
    def __call__(self, item: int) -> Any:
        self.faults.meet(item)
        return np.array([item, random.random(), np.random.rand()])


class _Slow(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.wait(0.055)
        self.faults.meet(item)
        return {"item": np.full((30,), item, np.int64), "noise": rng.random()}


class _OfVariedLength(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0003)
        return np.full((1 + item % 9,), item, np.float32), rng.random()


class _WithText(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0003)
        return {"tokens": rng.integers(0, 99, 1 + item % 7), "name": "é" * (item % 5) + str(item)}


class _Outgrowing(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0005)
        # Each larger than any before it, so that batches outgrow their slots time and again.
        rows = 6 * (10 + item) if item % 23 == 11 else 1 + item % 4
        return np.full((rows, 8), rng.random(), np.float64)


class _Failing(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0003)
        if item % 11 == 3:
            raise ValueError(f"item {item} is broken")
        return np.full((20,), item, np.float32), rng.random()


class _FailingTogether(_Failing):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        if 40 <= item < 50:  # a whole batch, which is then left out
            raise ValueError(f"item {item} is broken")
        return super().__call__(item, rng)


class _Element(_Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.001)
        return rng.random((5 + item % 3, 4)), np.full((2,), item)


class _Vectorised(_Function):
    def __call__(self, items: list[int], rng: np.random.Generator) -> Any:
        self.faults.meet(items[0])
        self.faults.wait(0.002)
        return np.asarray(items, np.float64)[:, None] * rng.random((len(items), 6))


class _Sequence:
    """Whole batches, and hooks that change what comes next."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.epoch = 0
        self.order = np.arange(20_000)  # large enough to travel beside the pickle
        self.seen: list[int] = []

    def __len__(self) -> int:
        return _SEQUENCE_BATCHES

    def __getitem__(self, index: int) -> Any:
        self.faults.meet(index)
        self.faults.wait(0.002)
        at = self.order[index * 8 : (index + 1) * 8]
        return at[:, None] * np.ones(50), np.full((len(at),), self.epoch + len(self.seen))

    def on_epoch_end(self) -> None:
        self.epoch += 1
        self.seen.append(self.epoch)
        np.random.default_rng(self.epoch).shuffle(self.order)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kind of work, and how fast workers may be killed over it so that it goes on nevertheless."""

    name: str
    function: Callable[[Faults], Any]
    items: int
    settings: dict[str, Any]
    kill_every_s: float = 0.04  # on average
    faults_one_in: int = 97  # of the items, by a segmentation fault of their own
    is_sequence: bool = False
    spares_first: bool = False  # batch: the sample that gives the spec runs alone, and two kills would convict it


def _shape(name: str, function: Callable[[Faults], Any], items: int, **rest: Any) -> Shape:
    how = {
        key: rest.pop(key) for key in ("kill_every_s", "faults_one_in", "is_sequence", "spares_first") if key in rest
    }
    return Shape(name, function, items, rest, **how)


_SHAPES = (
    _shape("single batches", _Sample, 800, batch_size=8, shuffle=True),
    _shape("written into out", _IntoOut, 600, batch_size=6, shuffle=True),
    _shape("threads", _Sample, 800, batch_size=8, shuffle=True, threads_per_worker=4),
    _shape("threads, written into out", _IntoOut, 600, batch_size=6, shuffle=True, threads_per_worker=4),
    _shape("chunks of tiny batches", _Tiny, 20_000, batch_size=4, shuffle=True, faults_one_in=4001),
    # Few restarts per item, so that tickets are tried row by row in the storm, too, and acquitted.
    _shape(
        "chunks, rows tried alone",
        _Tiny,
        12_000,
        batch_size=16,
        max_restarts_per_item=2,
        faults_one_in=0,
        spares_first=True,
    ),
    _shape("global random streams", _OfGlobals, 1500, batch_size=4, faults_one_in=301),
    # A kill may cost a worker 100 ms of its time.
    _shape("row ranges of slow batches", _Slow, 30, batch_size=6, shuffle=True, kill_every_s=0.2, faults_one_in=17),
    _shape("packed, padded", _OfVariedLength, 1000, batch_size=8, shuffle=True, pad=True),
    _shape(
        "by length",
        _OfVariedLength,
        1000,
        bucket_by=tuple(1 + item % 9 for item in range(1000)),
        boundaries=(3, 6),
        batch_sizes=(12, 8, 5),
        shuffle=True,
        pad=True,
    ),
    _shape("ragged and text", _WithText, 1000, batch_size=8, ragged=True),
    _shape("oversize batches", _Outgrowing, 500, batch_size=4, pad=True),
    _shape("rows fail, skip", _FailingTogether, 900, batch_size=6, on_error="skip"),
    _shape("rows fail, replace", _Failing, 900, batch_size=6, on_error="replace", shuffle=True),
    _shape("whole elements", _Element, 250, batch_size=None, shuffle=True, faults_one_in=43),
    _shape("batch_fn", _Vectorised, 1500, batch_size=8, shuffle=True, drop_remainder=True),
    _shape("from_sequence, hooks", _Sequence, _SEQUENCE_BATCHES, is_sequence=True, faults_one_in=17),
)
SHAPES = {shape.name: shape for shape in _SHAPES}


def make(shape: Shape, faults: Faults, seed: int, **where: Any) -> lp.Loader:
    """A loader of this shape.

    Args:
        shape: what it makes.
        faults: of its function.
        seed: of its order and its random streams.
        **where: further arguments: workers, pool, deterministic.
    """
    # So that random kills convict nobody: over a slow ticket one after the other may come.
    settings = {"max_restarts_per_item": 1000, "seed": seed, **shape.settings, **where}
    if "pool" not in settings:
        settings["max_restarts"] = None
    if shape.is_sequence:
        return lp.Loader.from_sequence(shape.function(faults), **settings)
    by = "batch_fn" if shape.function is _Vectorised else "fn"
    return lp.Loader(range(shape.items), **{by: shape.function(faults)}, **settings)
