"""Shapes of work over what has no index: streams, read by a process or on a thread of the trainer, and generators."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp

from .shape import Faults, Function, shape_of

__all__ = ["STREAM_SHAPES"]

_LARGE_EVERY = 61  # items, one goes to the workers through shared memory, not through the reader's socket
_FILES = 7
_OF_GENERATOR = 100_000  # its items have faults of their own, apart from those of `fn`
_SHARDS = 14


class _Items:
    """Begins anew each time."""

    def __init__(self, faults: Faults, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            size = 150_000 if number % _LARGE_EVERY == 40 else 20 + number % 57
            yield {"number": number, "numbers": np.arange(number, number + size)}


class _TinyItems:
    """The same, of numbers, and it cannot travel."""

    def __init__(self, faults: Faults, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        with self.lock:
            rest = iter(range(self.count))
        yield from rest


def _once(faults: Faults, count: int) -> Iterator[Any]:
    return iter(_Items(faults, count))


def _of_files(faults: Faults, count: int) -> lp.sources.interleave.Interleave:
    """Files of unequal length, made on the spot, and read side by side on threads of their own."""
    paths = [f"{faults.folder}/lines-{number}.jsonl" for number in range(_FILES)]
    per_weight = count // (_FILES * (_FILES + 1) // 2)
    for number, path in enumerate(paths):
        if not os.path.exists(path):
            lines = (json.dumps({"file": number, "line": line}) for line in range(per_weight * (number + 1)))
            Path(path).write_text("\n".join(lines))
    return lp.interleave(paths, _read_lines, cycle_length=3, block_length=2, prefetch=3)


def _read_lines(path: str) -> Iterator[Any]:
    with open(path) as file:
        for line in file:
            yield json.loads(line)


class _OfItem(Function):
    def __call__(self, item: dict[str, Any], rng: np.random.Generator) -> Any:
        self.faults.meet(item["number"])
        self.faults.wait(0.0005)
        return item["number"], item["numbers"].sum(), rng.random(3)


class _OfFailingItem(Function):
    def __call__(self, item: dict[str, Any], rng: np.random.Generator) -> Any:
        number = item["number"]
        self.faults.meet(number)
        self.faults.wait(0.0005)
        if number % 11 == 3 or 40 <= number < 45:  # the latter a whole batch, which is then left out
            raise ValueError(f"item {number} is broken")
        return item["numbers"][: 1 + number % 7], rng.random(3)


class _OfTinyItem(Function):
    def __call__(self, item: int, rng: np.random.Generator) -> Any:
        self.faults.meet(item)
        return item, rng.random()


class _OfLine(Function):
    def __call__(self, item: dict[str, int], rng: np.random.Generator) -> Any:
        self.faults.meet(1000 * item["file"] + item["line"])
        self.faults.wait(0.0005)
        return {"of": np.array([item["file"], item["line"]]), "noise": rng.random((4, 4))}


def _unequal(items: int) -> list[range]:
    """Shards of very unequal size, an empty one among them."""
    weights = [number * (1 + number % 3) for number in range(_SHARDS)]
    edges = [items * sum(weights[:number]) // sum(weights) for number in range(_SHARDS + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


class _Generator(Function):
    """Random numbers of its own, of a parameter."""

    def __init__(self, faults: Faults, items: int) -> None:
        super().__init__(faults)

    def __call__(self, shard: range, rng: np.random.Generator) -> Iterator[Any]:
        for number in shard:
            self.faults.meet(_OF_GENERATOR + number)
            yield number, rng.random()


class _GeneratorOfGlobals(_Generator):
    """Random numbers of the global generators; every third shard is a list, whose items are fetched by number."""

    def __call__(self, shard: range) -> Any:  # type: ignore[override]
        return list(zip(shard, shard, strict=True)) if len(shard) % 3 == 0 else self._draw(shard)

    def _draw(self, shard: range) -> Iterator[Any]:
        for number in shard:
            self.faults.meet(_OF_GENERATOR + number)
            yield number, random.random() + np.random.rand()


class _OfGenerated(Function):
    def __call__(self, item: tuple[int, float], rng: np.random.Generator) -> Any:
        self.faults.meet(item[0])
        self.faults.wait(0.0005)
        return {"number": item[0], "drawn": item[1], "noise": rng.random((5, 5))}


class _Whole(Function):
    def __call__(self, item: tuple[int, float], rng: np.random.Generator) -> Any:
        self.faults.meet(item[0])
        self.faults.wait(0.001)
        return rng.random((4 + item[0] % 3, 6)), np.array([item[1]])


class _OfGeneratedGlobals(Function):
    def __call__(self, item: tuple[int, float]) -> Any:
        self.faults.meet(item[0])
        self.faults.wait(0.0005)
        return np.array([*item, random.random(), np.random.rand()])


STREAM_SHAPES = (
    shape_of("stream, read by a process", _OfItem, 1200, source=_Items, has_reader=True, batch_size=6),
    shape_of(
        "stream, rows fail, skip",
        _OfFailingItem,
        900,
        source=_Items,
        has_reader=True,
        batch_size=5,
        on_error="skip",
        pad=True,
    ),
    shape_of(
        "iterator, read once, in a window", _OfItem, 800, source=_once, is_one_shot=True, batch_size=6, shuffle=40
    ),
    shape_of("tiny items, read on a thread", _OfTinyItem, 9000, source=_TinyItems, batch_size=4, faults_one_in=997),
    shape_of("files interleaved", _OfLine, 1200, source=_of_files, has_reader=True, batch_size=6, shuffle=30),
    shape_of(
        "generators of shards",
        _OfGenerated,
        1000,
        source=_Generator,
        shards=_unequal,
        cycle_length=5,
        batch_size=6,
        shuffle=True,
    ),
    shape_of(
        "generators of whole elements",
        _Whole,
        300,
        source=_Generator,
        shards=_unequal,
        cycle_length=4,
        batch_size=None,
        faults_one_in=43,
    ),
    shape_of(
        "generators, global random streams",
        _OfGeneratedGlobals,
        1000,
        source=_GeneratorOfGlobals,
        shards=_unequal,
        cycle_length=3,
        batch_size=5,
        shuffle=9,
        faults_one_in=197,
    ),
)
