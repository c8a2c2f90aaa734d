"""Shapes of work for the storm: a function, its source and settings, and the function's faults.

First shapes with items by index, then streams, read by a process or by a thread of the trainer, and
generators.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import json
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp

_SEQUENCE_BATCHES = 60
_LARGE_EVERY = (
    61  # one in this number of items is sent in shared memory, not by the reader's socket
)
_FILES = 7
# added to items of a generator, whose faults are counted apart from those of `fn`
_OF_GENERATOR = 100_000
_SHARDS = 14
_FAULT = "fault-"


@dataclasses.dataclass(frozen=True)
class Faults:
    """Segmentation faults in the user's code: of one in `one_in` items, once in a round."""

    folder: str  # folder for a mark of each item that has faulted, and for other files of the shape
    trainer: int  # pid of the process in which no item faults or waits
    one_in: int  # 0: no item faults

    def meet(self, item: int, seconds: float = 0.0) -> None:
        """Die if this item faults and has not done so yet. Otherwise wait, as `wait` does."""
        if os.getpid() == self.trainer:
            return
        if self.one_in and not zlib.crc32(b"%d" % item) % self.one_in:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.folder}/{_FAULT}{item}", os.O_CREAT | os.O_EXCL))
                faulthandler._sigsegv()  # type: ignore[attr-defined]
        if seconds:
            time.sleep(seconds)

    def wait(self, seconds: float) -> None:
        """Wait in a worker. The twin need not wait."""
        if os.getpid() != self.trainer:
            time.sleep(seconds)

    @property
    def met(self) -> int:
        """Return the number of items that have faulted."""
        return sum(1 for _ in Path(self.folder).glob(f"{_FAULT}*"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kind of work, and a rate of kills at which it still makes progress."""

    name: str
    function: Callable[
        ..., Any
    ]  # the function, called with the faults first; for a sequence, it makes the sequence of them
    items: int
    settings: dict[str, Any]
    by: str = "fn"  # argument for the function; "sequence": it is a sequence with hooks
    # makes a source of this number of items; None: a range
    source: Callable[[Faults, int], Any] | None = None
    generator: Callable[..., Any] | None = (
        None  # makes a generator; called as the function, and with a shard
    )
    augment: Callable[..., Any] | None = None  # called as the function
    cache: str = ""  # "memory" or "disk"; empty: no cache
    kill_every_s: float = 0.04  # mean time between kills
    faults_one_in: int = 97  # one in this number of items ends its worker by a segmentation fault
    is_one_shot: bool = (
        False  # True if a source is read once: each pass has its own loader, and is not saved
    )
    has_reader: bool = False

    @property
    def is_sequence(self) -> bool:
        """True if hooks change each epoch, so that each pass must be whole, and is not saved."""
        return self.by == "sequence"


_FIELDS = frozenset(field.name for field in dataclasses.fields(Shape))


def shape_of(name: str, function: Callable[[Faults], Any], items: int, **rest: Any) -> Shape:
    """Return a shape. Names in `rest` that are not its fields are arguments of its loaders."""
    how = {key: rest.pop(key) for key in _FIELDS & rest.keys()}
    return Shape(name, function, items, rest, **how)


def make(
    shape: Shape, faults: Faults, seed: int, memory: str | None = None, **where: Any
) -> lp.Loader:
    """Return a loader of this shape. With `workers=0` it has no cache, which must not change a
    batch.
    """
    # random kills must not exclude an item
    limits = lp.Limits(memory=memory, restarts_per_item=1000)
    if not isinstance(where.get("workers"), lp.Pool):
        limits = dataclasses.replace(limits, restarts=None)
    settings = {"seed": seed, "limits": limits, **shape.settings, **where}
    if shape.is_sequence:
        return lp.Loader.from_sequence(shape.function(faults), **settings)
    settings[shape.by] = functools.partial(shape.function, faults)
    if shape.augment is not None:
        settings["augment"] = functools.partial(shape.augment, faults)
    if shape.cache and settings.get("workers") != 0:
        settings["cache"] = "memory" if shape.cache == "memory" else f"{faults.folder}/cache"
    source = range(shape.items) if shape.source is None else shape.source(faults, shape.items)
    if shape.generator is not None:
        generate = functools.partial(shape.generator, faults)
        return lp.Loader.from_generator(generate, shards=_unequal(shape.items), **settings)
    return lp.Loader(source, **settings)


def _sample(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item, 0.0005)
    return {"item": np.full((40, 40), item, np.float32), "noise": rng.random(5)}


async def _awaiting(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    noise = rng.random(5)
    await asyncio.sleep(0.001 * (item % 4))
    faults.meet(item, 0.0001)
    await asyncio.sleep(0.001)
    return {"item": np.full((40, 40), item, np.float32), "noise": noise, "more": rng.random(5)}


def _into_out(faults: Faults, item: int, rng: np.random.Generator, out: Any) -> Any:
    noise = rng.random((16, 64))
    if out is None:
        return noise
    for row in range(16):  # a kill can come between two rows
        out[row] = noise[row]
        faults.wait(0.00005)
        if row == 8:
            faults.meet(item)
    return None


def _tiny(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item)
    return item, rng.random()


def _of_globals(faults: Faults, item: int) -> Any:
    faults.meet(item)
    return np.array([item, random.random(), np.random.rand()])


class _Captured:
    """A function with random generators of its own, like objects of augmentation libraries."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.legacy = np.random.RandomState(7)
        self.others = {"python": random.Random(7)}

    def draw(self) -> float:
        return float(self.rng.random() + self.legacy.rand() + self.others["python"].random())

    def __call__(self, faults: Faults, item: int) -> Any:
        faults.meet(item)
        return np.array([item, self.draw(), self.draw()])


class _CapturedByGenerator(_Captured):
    """Makes generators of shards. They draw from captured random generators."""

    def __call__(self, faults: Faults, shard: range) -> Iterator[Any]:
        for number in shard:
            faults.meet(_OF_GENERATOR + number)
            yield number, self.draw()


def _slow(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.wait(0.055)
    faults.meet(item)
    return {"item": np.full((30,), item, np.int64), "noise": rng.random()}


def _length(item: int) -> int:
    return 1 + item % 9


def _of_varied_length(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item, 0.0003)
    return np.full((_length(item),), item, np.float32), rng.random()


def _with_text(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item, 0.0003)
    return {"tokens": rng.integers(0, 99, 1 + item % 7), "name": "é" * (item % 5) + str(item)}


def _outgrowing(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item, 0.0005)
    # Each item is larger than all before it, so that batches outgrow their slots repeatedly.
    rows = 6 * (10 + item) if item % 23 == 11 else 1 + item % 4
    return np.full((rows, 8), rng.random(), np.float64)


def _failing(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    if 40 <= item < 50:  # a whole batch fails, and is left out
        raise ValueError(f"item {item} is broken")
    faults.meet(item, 0.0003)
    if item % 11 == 3:
        raise ValueError(f"item {item} is broken")
    return np.full((20,), item, np.float32), rng.random()


def _element(faults: Faults, item: int, rng: np.random.Generator) -> Any:
    faults.meet(item, 0.001)
    return rng.random((5 + item % 3, 4)), np.full((2,), item)


def _vectorised(faults: Faults, items: list[int], rng: np.random.Generator) -> Any:
    faults.meet(items[0], 0.002)
    return np.asarray(items, np.float64)[:, None] * rng.random((len(items), 6))


def _decoded(faults: Faults, item: int) -> Any:
    """Return a cached result: of varied size, and not random."""
    faults.meet(item, 0.001)
    return np.arange(20 + item % 50, dtype=np.float32)[:, None] * np.full((1, 16), item, np.float32)


def _cropped(faults: Faults, sample: Any, rng: np.random.Generator) -> Any:
    """Change a cached result in place, differently in each epoch."""
    at = int(rng.integers(len(sample) - 16))
    faults.meet(10_000 + int(sample[-1, 0]))
    sample *= rng.random(dtype=np.float32)
    return sample[at : at + 16]


class _Sequence:
    """A sequence of whole batches, with hooks that change the next epoch."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.epoch = 0
        self.order = np.arange(20_000)  # large enough to be stored beside the pickle
        self.seen: list[int] = []

    def __len__(self) -> int:
        return _SEQUENCE_BATCHES

    def __getitem__(self, index: int) -> Any:
        self.faults.meet(index, 0.002)
        at = self.order[index * 8 : (index + 1) * 8]
        return at[:, None] * np.ones(50), np.full((len(at),), self.epoch + len(self.seen))

    def on_epoch_end(self) -> None:
        self.epoch += 1
        self.seen.append(self.epoch)
        np.random.default_rng(self.epoch).shuffle(self.order)


# ---- streams and generators


class _Items:
    """A stream that can be iterated again."""

    def __init__(self, faults: Faults, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            size = 150_000 if number % _LARGE_EVERY == 40 else 20 + number % 57
            yield {"number": number, "numbers": np.arange(number, number + size)}


class _TinyItems:
    """The same with numbers. It cannot be pickled."""

    def __init__(self, faults: Faults, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        with self.lock:
            rest = iter(range(self.count))
        yield from rest


def _of_files(faults: Faults, count: int) -> Iterable[Any]:
    """Return a source that reads new files of different length in turn."""
    paths = [f"{faults.folder}/lines-{number}.jsonl" for number in range(_FILES)]
    per_weight = count // (_FILES * (_FILES + 1) // 2)
    for number, path in enumerate(paths):
        if not os.path.exists(path):
            lines = (
                json.dumps({"file": number, "line": line})
                for line in range(per_weight * (number + 1))
            )
            Path(path).write_text("\n".join(lines))
    return lp.interleave(paths, _read_lines, cycle_length=3, block_length=2)


def _read_lines(path: str) -> Iterator[Any]:
    with open(path) as file:
        for line in file:
            yield json.loads(line)


def _of_item(faults: Faults, item: dict[str, Any], rng: np.random.Generator) -> Any:
    faults.meet(item["number"], 0.0005)
    return item["number"], item["numbers"].sum(), rng.random(3)


def _of_line(faults: Faults, item: dict[str, int], rng: np.random.Generator) -> Any:
    faults.meet(1000 * item["file"] + item["line"], 0.0005)
    return {"of": np.array([item["file"], item["line"]]), "noise": rng.random((4, 4))}


def _unequal(items: int) -> list[range]:
    """Yield the items of a shard. Shards have very different sizes, and one is empty."""
    weights = [number * (1 + number % 3) for number in range(_SHARDS)]
    edges = [items * sum(weights[:number]) // sum(weights) for number in range(_SHARDS + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def _generator(faults: Faults, shard: range, rng: np.random.Generator) -> Iterator[Any]:
    """Yield random numbers of the parameter `rng`."""
    for number in shard:
        faults.meet(_OF_GENERATOR + number)
        yield number, rng.random()


def _generator_of_globals(faults: Faults, shard: range) -> Any:
    """Yield random numbers of the global generators. Every third shard is a list, which is read by
    index.
    """

    def draw() -> Iterator[Any]:
        for number in shard:
            faults.meet(_OF_GENERATOR + number)
            yield number, random.random() + np.random.rand()

    return list(zip(shard, shard, strict=True)) if len(shard) % 3 == 0 else draw()


def _of_generated(faults: Faults, item: tuple[int, float], rng: np.random.Generator) -> Any:
    faults.meet(item[0], 0.0005)
    return {"number": item[0], "drawn": item[1], "noise": rng.random((5, 5))}


def _of_generated_globals(faults: Faults, item: tuple[int, float]) -> Any:
    faults.meet(item[0], 0.0005)
    return np.array([*item, random.random(), np.random.rand()])


_BY_LENGTH = lp.Buckets([_length(item) for item in range(1000)], (3, 6), (12, 8, 5))
_SHAPES = (
    shape_of("single batches", _sample, 800, batch_size=8, shuffle=True),
    shape_of("written into out", _into_out, 600, batch_size=6, shuffle=True),
    shape_of("threads", _sample, 800, batch_size=8, shuffle=True, threads=4),
    shape_of("coroutines", _awaiting, 800, batch_size=8, shuffle=True, threads=50),
    shape_of("chunks of tiny batches", _tiny, 20_000, batch_size=4, shuffle=True, faults_one_in=4001),
    shape_of("global random streams", _of_globals, 1500, batch_size=4, faults_one_in=301),
    shape_of("captured random streams", _Captured(), 1500, batch_size=4, shuffle=True, faults_one_in=301),
    # A kill may take 100 ms of a worker's time.
    shape_of("row ranges of slow batches", _slow, 30, batch_size=6, shuffle=True, kill_every_s=0.2, faults_one_in=17),
    shape_of("varying, padded", _of_varied_length, 1000, batch_size=8, shuffle=True, pad=True),
    shape_of("by length, padded", _of_varied_length, 1000, buckets=_BY_LENGTH, shuffle=True, pad=True),
    shape_of("ragged and text", _with_text, 1000, batch_size=8, ragged=True),
    shape_of("oversize batches", _outgrowing, 500, batch_size=4, pad=True),
    shape_of("rows fail, skip", _failing, 900, batch_size=6, on_error="skip"),
    shape_of("whole elements", _element, 250, batch_size=None, shuffle=True, faults_one_in=43),
    shape_of("batch_fn", _vectorised, 1500, by="batch_fn", batch_size=8, shuffle=True, drop_remainder=True),
    shape_of("from_sequence, hooks", _Sequence, _SEQUENCE_BATCHES, by="sequence", faults_one_in=17),
    shape_of("cached in memory", _decoded, 800, augment=_cropped, cache="memory", batch_size=8, shuffle=True),
    shape_of("cached on disk", _decoded, 800, augment=_cropped, cache="disk", batch_size=8, shuffle=True),
    shape_of("stream, read by a process", _of_item, 1200, source=_Items, has_reader=True, batch_size=6),
    shape_of(
        "iterator, read once, in a window", _of_item, 800, source=lambda *how: iter(_Items(*how)), is_one_shot=True,
        batch_size=6, shuffle=40,
    ),
    shape_of("tiny items, read on a thread", _tiny, 9000, source=_TinyItems, batch_size=4, faults_one_in=997),
    shape_of("files interleaved", _of_line, 1200, source=_of_files, has_reader=True, batch_size=6, shuffle=30),
    shape_of(
        "generators of shards", _of_generated, 1000, generator=_generator, cycle_length=5, batch_size=6, shuffle=True
    ),
    shape_of(
        "generators, global random streams", _of_generated_globals, 1000, generator=_generator_of_globals,
        cycle_length=3, batch_size=5, shuffle=9, faults_one_in=197,
    ),
    shape_of(
        "generators, captured random streams", _of_generated, 1000, generator=_CapturedByGenerator(),
        cycle_length=4, batch_size=6, shuffle=12, faults_one_in=197,
    ),
)  # fmt: skip
SHAPES = {shape.name: shape for shape in _SHAPES}
