"""Kill trainings of each kind of order at random batches. Resume them with other workers and ranks."""

from __future__ import annotations

import collections
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import loaderpool as lp

ITEMS = 240
_WORKERS = (0, 1, 3)
_RANKS = (1, 2, 3)
_MOST_BATCHES = 6  # largest number of batches of a training before it is killed
Row: TypeAlias = "tuple[int, ...]"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of order.

    Each row of a batch has the item and a number from the sample's random stream. A packed row has
    these two for each of its items.
    """

    settings: Callable[[], dict[str, Any]]  # returns settings of `Loader`; called in each training
    left_out: range | None = None  # batches of epoch 0 to leave out, with one rank
    rows: Callable[[Any], list[Row]] = lambda batch: rows_of(batch)
    source: Callable[[Path], Any] = lambda folder: range(ITEMS)  # may write files there
    function: Callable[..., Any] = lambda item, rng: (item, rng.integers(1 << 60))

    def make(self, folder: Path, workers: int = 0, rank: int = 0, ranks: int = 1) -> lp.Loader:
        """Return a loader. Batches have four rows, unless the order determines them."""
        settings = self.settings()
        if not isinstance(settings.get("order"), (_Batches, list, lp.TokenBudget)):
            settings = {"batch_size": 4, **settings}
        shard = lp.Shard(ranks, rank)
        return lp.Loader(
            self.source(folder), self.function, workers=workers, shard=shard, seed=5, **settings
        )


class _Sampler:
    """Sampler that draws from the global generators, like samplers of PyTorch."""

    def __len__(self) -> int:
        return ITEMS // 2

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(ITEMS), ITEMS // 2))


class _Batches:
    """Batch sampler that draws from its own generator. Batches differ in size."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[list[int]]:
        left = self.generator.permutation(ITEMS).tolist()
        for number in range(60):
            rows = 1 + number % 6
            yield left[:rows]
            left = left[rows:] + left[:rows]


def _permuted(epoch: int) -> Any:
    return np.random.permutation(ITEMS)[: ITEMS - 7 * (epoch % 5)]


def _changing_weights(epoch: int) -> Any:
    return 1 + (np.arange(ITEMS) + epoch) % 9


def _budget() -> dict[str, Any]:
    return {"order": lp.TokenBudget(_changing_lengths, max_tokens=60, max_rows=9, window=100)}


def _packed() -> dict[str, Any]:
    return {"order": lp.Packed(_LENGTHS, _ROW_LENGTH, window=100)}


def _changing_lengths(epoch: int) -> Any:
    return np.roll(_LENGTHS, epoch)


def _tokens(item: int, rng: np.random.Generator) -> Any:
    size = _LENGTHS[item]
    return {"item": np.full(size, item), "number": np.full(size, rng.integers(1 << 60))}


def _patches(item: int, rng: np.random.Generator) -> Any:
    return [(item * _PATCHES + patch, rng.integers(1 << 60)) for patch in range(_PATCHES)]


def _chunked(folder: Path) -> Any:
    """Return the rows of an HDF5 file in compressed chunks. The first call writes it."""
    import h5py

    path = folder / "rows.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("rows", data=np.arange(ITEMS), chunks=(_CHUNK,), compression="gzip")
    return lp.HDF5(path, "rows")


_PATCHES = 5  # samples of an item
_CHUNK = 16  # rows of a chunk
_ROW_LENGTH = 40
_LENGTHS = [1 + item * item % 17 for item in range(ITEMS)]
# To add a kind of order, add a line.
KINDS = {
    "uniform shuffle": Kind(lambda: {"shuffle": True}),
    "buckets": Kind(lambda: {"shuffle": True, "buckets": lp.Buckets(_LENGTHS, [6, 12], [6, 4, 3])}),
    "weights": Kind(lambda: {"order": lp.Weighted(_changing_weights)}),
    "weights, once": Kind(lambda: {"order": lp.Weighted(_changing_weights, 150, False)}),
    "function": Kind(lambda: {"order": _permuted}),
    "sampler": Kind(lambda: {"order": _Sampler()}),
    "batch sampler": Kind(lambda: {"order": _Batches()}),
    "blocks": Kind(lambda: {"order": lp.Blocks(rows=9, window=3)}),
    "blocks of a chunked file": Kind(lambda: {"order": lp.Blocks(window=3)}, source=_chunked),
    "token budget": Kind(_budget),
    "packed": Kind(_packed, rows=lambda batch: segments_of(batch), function=_tokens),
    "several samples of an item": Kind(
        lambda: {"shuffle": True, "samples_per_item": _PATCHES}, function=_patches
    ),
    "left-out batches": Kind(lambda: {"shuffle": True}, range(7, 31)),
    "left-out batches, buckets": Kind(
        lambda: {"shuffle": True, "buckets": lp.Buckets(_LENGTHS, [6, 12], [6, 4, 3])}, range(5, 20)
    ),
    "left-out batches, batch sampler": Kind(lambda: {"order": _Batches()}, range(3, 40)),
    "left-out batches, token budget": Kind(_budget, range(4, 25)),
    "left-out batches, packed": Kind(
        _packed, range(3, 11), rows=lambda batch: segments_of(batch), function=_tokens
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of killing and resuming one kind of training."""

    kind: str
    stops: int
    epochs: int
    rows: int
    seconds: float
    mismatches: list[str]


def rows_of(batch: Any) -> list[Row]:
    """Return the rows of a batch that is a tuple of arrays."""
    return [*zip(*(part.tolist() for part in batch), strict=True)]


def segments_of(batch: Any) -> list[Row]:
    """Return the rows of a batch of `Packed`: item and random number of each segment, in order.

    Raises:
        AssertionError: Part of an item is missing, or a row has anything else.
    """
    found = []
    for places, items, numbers, segments in zip(
        batch["positions"], batch["item"], batch["number"], batch["segment_ids"], strict=True
    ):
        firsts = np.flatnonzero((places == 0) & (segments > 0))
        sizes = [_LENGTHS[item] for item in items[firsts]]
        rest = len(items) - sum(sizes)
        parts = [*range(len(sizes))]
        assert segments.tolist() == [*np.repeat(parts, sizes) + 1, *[0] * rest], segments
        assert places.tolist() == [*np.concatenate([*map(np.arange, sizes)]), *[0] * rest], places
        for values in (items, numbers):
            assert values.tolist() == [*np.repeat(values[firsts], sizes), *[0] * rest], values
        found.append(tuple(np.stack([items[firsts], numbers[firsts]], axis=1).ravel().tolist()))
    return found


def run_orders(
    stops: int, seed: int, names: Sequence[str], say: Callable[[str], None]
) -> list[Outcome]:
    """Kill and resume a training of each kind `stops` times."""
    found = []
    for name in names:
        found.append(run_kind(name, stops, random.Random(f"{seed}/orders/{name}")))
        say(f"{name}: {found[-1].stops} kills, {len(found[-1].mismatches)} mismatches")
    return found


def run_kind(name: str, stops: int, draw: random.Random) -> Outcome:
    """Kill and resume a training of one kind `stops` times, then finish its epoch."""
    kind, began = KINDS[name], time.monotonic()
    mismatches: list[str] = []
    state: dict[str, Any] | None = None
    got: collections.defaultdict[int, list[Row]] = collections.defaultdict(list)
    killed = 0
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        kind.source(Path(folder))  # writes its files before several processes read them
        for stop in range(stops + 1):
            if mismatches:
                break
            ranks = draw.choice(_RANKS if state is not None or kind.left_out is None else (1,))
            is_last = stop == stops
            kill_after = None if is_last else draw.randrange(1, _MOST_BATCHES + 1)
            task = {
                "state": state,
                "ranks": ranks,
                "kill_after": kill_after,
                "every": draw.randrange(1, 3),
            }
            where = f"stop {stop}, {ranks} ranks, killed after {kill_after} batches"
            parts = _train(name, task, [draw.choice(_WORKERS) for _ in range(ranks)], folder)
            if any(part is None for part in parts):
                mismatches.append(f"{where}: a training failed")
                break
            states = [part["state"] for part in parts]
            if any(each != states[0] for each in states):
                mismatches.append(f"{where}: states differ: {states}")
            mismatches += [
                f"{where}: {text}" for text in _join(got, [part["rows"] for part in parts])
            ]
            state = states[0]
            killed += not is_last
        epochs = max(got, default=-1) + 1
        mismatches += _compare(kind, Path(folder), got, epochs)
    count = sum(map(len, got.values()))
    return Outcome(name, killed, epochs, count, time.monotonic() - began, mismatches)


def _join(got: dict[int, list[Row]], parts: list[list[Any]]) -> Iterator[str]:
    """Add the rows of all ranks to `got`. Yield a text for each row that came twice.

    Only the last batch of an epoch may repeat rows, so that each rank has a row.
    """
    if len({len(part) for part in parts}) > 1:
        yield "ranks have different numbers of batches"
    for step in zip(*parts, strict=False):
        epoch, is_last = step[0][0], step[0][2]
        rows = [tuple(row) for part in step for row in part[1]]
        if is_last and len(parts) > len(set(rows)):
            rows = [*set(rows)]
        for row in rows:
            if row in got[epoch]:
                yield f"epoch {epoch}: {row} came twice"
            got[epoch].append(row)


def _compare(kind: Kind, folder: Path, got: dict[int, list[Row]], epochs: int) -> Iterator[str]:
    with kind.make(folder) as loader:
        for epoch in range(epochs):
            batches = [kind.rows(batch) for batch in loader]
            if epoch == 0 and kind.left_out is not None:
                batches = batches[: kind.left_out.start] + batches[kind.left_out.stop :]
            expected = {row for batch in batches for row in batch}
            lost, more = expected - {*got[epoch]}, {*got[epoch]} - expected
            if lost or more:
                yield f"epoch {epoch}: lost {sorted(lost)[:5]}, not of it {sorted(more)[:5]}"


def _train(name: str, task: dict[str, Any], workers: list[int], folder: str) -> list[Any]:
    """Run a training until it is killed.

    Return the last saved state of each rank, and the rows before it.
    """
    context = multiprocessing.get_context("fork")
    files = [Path(folder) / f"rank-{rank}.json" for rank in range(len(workers))]
    for file in files:
        file.write_text(json.dumps({"state": task["state"], "rows": []}))
    processes = [
        context.Process(target=_be_rank, args=(name, task, rank, count, str(files[rank])))
        for rank, count in enumerate(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    expected = 0 if task["kill_after"] is None else -signal.SIGKILL
    found = []
    for process, file in zip(processes, files, strict=True):
        if process.exitcode is None:
            process.kill()
        is_right = process.exitcode == expected
        found.append(json.loads(file.read_text()) if is_right else None)
    return found


# ---- in the processes of a training ----


def _be_rank(name: str, task: dict[str, Any], rank: int, workers: int, file: str) -> None:
    kind, taken, rows = KINDS[name], 0, list[Any]()
    with kind.make(Path(file).parent, workers, rank, task["ranks"]) as loader:
        if task["state"] is not None:
            loader.load_state_dict(task["state"])
        elif kind.left_out is not None:
            loader.skip_batches(kind.left_out)
        while True:
            iterator = iter(loader)
            for batch in iterator:
                if taken == task["kill_after"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                taken += 1
                state = iterator.state_dict()
                is_last = state["epoch"] > iterator.epoch
                rows.append((iterator.epoch, kind.rows(batch), is_last))
                if taken % task["every"] == 0 or (is_last and task["kill_after"] is None):
                    _save(file, {"state": state, "rows": rows})
            if task["kill_after"] is None:
                return


def _save(file: str, content: object) -> None:
    with open(f"{file}.new", "w") as new:
        json.dump(content, new)
    os.replace(f"{file}.new", file)
