"""The shapes of work that are stormed, those over items by index first: each with its function and its settings."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np

import loaderpool as lp

from .shape import Faults, Function, Shape, make, shape_of
from .stream_shapes import STREAM_SHAPES

__all__ = ["ON_HOSTS", "SHAPES", "Faults", "Shape", "make"]

_SEQUENCE_BATCHES = 60


class _Sample(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0005)
        return {"item": np.full((40, 40), item, np.float32), "noise": rng.random(5)}


class _IntoOut(Function):
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


class _Tiny(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        return item, rng.random()


class _OfGlobals(Function):
    def __call__(self, item: int) -> Any:
        self.faults.meet(item)
        return np.array([item, random.random(), np.random.rand()])


class _Slow(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.wait(0.055)
        self.faults.meet(item)
        return {"item": np.full((30,), item, np.int64), "noise": rng.random()}


def _length(item: int) -> int:
    return 1 + item % 9


class _OfVariedLength(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0003)
        return np.full((_length(item),), item, np.float32), rng.random()


class _WithText(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0003)
        return {"tokens": rng.integers(0, 99, 1 + item % 7), "name": "é" * (item % 5) + str(item)}


class _Outgrowing(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.0005)
        # Each larger than any before it, so that batches outgrow their slots time and again.
        rows = 6 * (10 + item) if item % 23 == 11 else 1 + item % 4
        return np.full((rows, 8), rng.random(), np.float64)


class _Failing(Function):
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


class _Element(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.001)
        return rng.random((5 + item % 3, 4)), np.full((2,), item)


class _Vectorised(Function):
    def __call__(self, items: list[int], rng: np.random.Generator) -> Any:
        self.faults.meet(items[0])
        self.faults.wait(0.002)
        return np.asarray(items, np.float64)[:, None] * rng.random((len(items), 6))


class _Decoded(Function):
    """What a cache keeps: nothing random, of varied size."""

    def __call__(self, item: int) -> Any:
        self.faults.meet(item)
        self.faults.wait(0.001)
        return np.arange(20 + item % 50, dtype=np.float32)[:, None] * np.full((1, 16), item, np.float32)


class _Cropped(Function):
    """What is done anew in each epoch with what is kept, in place."""

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        at = int(rng.integers(len(sample) - 16))
        self.faults.meet(10_000 + int(sample[-1, 0]))
        sample *= rng.random(dtype=np.float32)
        return sample[at : at + 16]


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


_BY_LENGTH = lp.Buckets(_length, (3, 6), (12, 8, 5))
_BY_GIVEN_LENGTH = dataclasses.replace(_BY_LENGTH, by=tuple(map(_length, range(1000))))
_THREADS = lp.WorkerOptions(threads=4)
_SHAPES = (
    shape_of("single batches", _Sample, 800, batch_size=8, shuffle=True),
    shape_of("written into out", _IntoOut, 600, batch_size=6, shuffle=True),
    shape_of("threads", _Sample, 800, batch_size=8, shuffle=True, worker_options=_THREADS),
    shape_of("threads, written into out", _IntoOut, 600, batch_size=6, shuffle=True, worker_options=_THREADS),
    shape_of("chunks of tiny batches", _Tiny, 20_000, batch_size=4, shuffle=True, faults_one_in=4001),
    # Few restarts per item, so that tickets are tried row by row in the storm, too, and acquitted.
    shape_of(
        "chunks, rows tried alone",
        _Tiny,
        12_000,
        batch_size=16,
        restarts_per_item=2,
        faults_one_in=0,
        spares_first=True,
    ),
    shape_of("global random streams", _OfGlobals, 1500, batch_size=4, faults_one_in=301),
    # A kill may cost a worker 100 ms of its time.
    shape_of("row ranges of slow batches", _Slow, 30, batch_size=6, shuffle=True, kill_every_s=0.2, faults_one_in=17),
    shape_of("varying, padded", _OfVariedLength, 1000, batch_size=8, shuffle=True, pad=True),
    shape_of("by length, padded", _OfVariedLength, 1000, buckets=_BY_LENGTH, shuffle=True, pad=True),
    shape_of(
        "by given length, ragged",
        _OfVariedLength,
        1000,
        buckets=_BY_GIVEN_LENGTH,
        shuffle=True,
        ragged=True,
    ),
    shape_of("ragged and text", _WithText, 1000, batch_size=8, ragged=True),
    shape_of("oversize batches", _Outgrowing, 500, batch_size=4, pad=True),
    shape_of("rows fail, skip", _FailingTogether, 900, batch_size=6, on_error="skip"),
    shape_of("rows fail, replace", _Failing, 900, batch_size=6, on_error="replace", shuffle=True),
    shape_of("whole elements", _Element, 250, batch_size=None, shuffle=True, faults_one_in=43),
    shape_of("batch_fn", _Vectorised, 1500, by="batch_fn", batch_size=8, shuffle=True, drop_remainder=True),
    shape_of("from_sequence, hooks", _Sequence, _SEQUENCE_BATCHES, by="sequence", faults_one_in=17),
    shape_of("cached in memory", _Decoded, 800, augment=_Cropped, cache="memory", batch_size=8, shuffle=True),
    shape_of("cached on disk", _Decoded, 800, augment=_Cropped, cache="disk", batch_size=8, shuffle=True),
)
SHAPES = {shape.name: shape for shape in (*_SHAPES, *STREAM_SHAPES)}
# What a RayPool runs. Where a batch is given up after few deaths, random kills of hosts convict innocent ones.
ON_HOSTS = tuple(shape.name for shape in _SHAPES if not shape.cache and shape.restarts_per_item > 2)
