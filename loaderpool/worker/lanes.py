"""Generators that run in copies: where each stands in this process, and how it is brought to where it must be.

A *lane* is what one copy of the generator yields in an epoch, or one after the other the generators of every n-th
shard. Batch k of a loader with n lanes is the k // n-th batch of lane k modulo n, so what a batch holds depends on
nothing but its number. A lane is worked on by the worker that it is at home with. Where it moves to another one, or its
worker died, the generator is made anew and run again up to the batch that is wanted; what it yields on the way is
dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.plan.keys import stream_key
from loaderpool.plan.order import Plan
from loaderpool.plan.permutation import Permutation
from loaderpool.plan.randomness import GlobalsWatch, SavedGlobals
from loaderpool.plan.window import shuffled
from loaderpool.worker.jobs import Job
from loaderpool.worker_info import WorkerInfo, set_worker_info

__all__ = ["GeneratorError", "LaneItems", "LaneOrder"]

# Positions of a lane's items begin at a multiple of this: more than any generator yields, in few enough bits.
_LANE_POSITIONS = 1 << 40
_SEED_BITS = (1 << 64) - 1


class GeneratorError(RuntimeError):
    """What `make_generator` gave cannot be iterated."""


class LaneOrder:
    """Which generators make up each lane of an epoch, each with what tells it from the others.

    Args:
        shards: what each generator is given; None: they are copies.
        plan: how many lanes there are; and the shares of a data-parallel training.
        shuffle: whether the shards come in another order each epoch.
    """

    def __init__(self, shards: list[Any] | None, plan: Plan, shuffle: bool) -> None:
        self._shards, self._plan, self._shuffle = shards, plan, shuffle

    def infos(self, epoch: int, lane: int) -> Iterator[WorkerInfo]:
        """The generators of a lane, one after the other."""
        plan, shards = self._plan, self._shards
        if shards is None:
            index, count = plan.shard_index * plan.lanes + lane, plan.num_shards * plan.lanes
            yield WorkerInfo(index, count, self._seed("copy", index, epoch), epoch)
            return
        places = np.arange(plan.shard_index + lane * plan.num_shards, len(shards), plan.lanes * plan.num_shards)
        if self._shuffle:
            places = Permutation(len(shards), stream_key("shards", plan.seed, epoch)).take(places)
        for index in places.tolist():
            yield WorkerInfo(index, len(shards), self._seed("shard", index, epoch), epoch, shards[index])

    def _seed(self, kind: str, index: int, epoch: int) -> int:
        return stream_key(f"{kind}-{index}", self._plan.seed, epoch) & _SEED_BITS


class LaneItems:
    """The items of one job at a time, out of the lanes that this process runs. It travels as the loader's source.

    Args:
        make_generator: the user's function.
        takes_rng: whether it names `rng`.
        shards: what the generators are given, or None.
        plan: of the batches.
        shuffle: whether shards come in another order each epoch.
        window: items that are shuffled among each other in each lane; 0: none.
        seed_globals: whether each lane has a state of its own of `random` and `numpy.random`; "auto": once one is seen
            to draw from them. Keeping them apart costs some 0.2 ms a batch.
    """

    def __init__(
        self,
        make_generator: Callable[..., Any],
        takes_rng: bool,
        shards: list[Any] | None,
        plan: Plan,
        shuffle: bool,
        window: int,
        seed_globals: bool | Literal["auto"],
    ) -> None:
        self._make, self._takes_rng, self._plan, self._window = make_generator, takes_rng, plan, window
        self._seed_globals = seed_globals
        self._keeps_globals = seed_globals is True
        self._watch = GlobalsWatch() if seed_globals == "auto" else None
        self._order = LaneOrder(shards, plan, shuffle)
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._items: dict[int, Any] = {}

    def __getitem__(self, position: int) -> Any:
        return self._items[position]

    def positions(self, job: Job) -> npt.NDArray[np.int64]:
        """See `WorkItems`; none where the lane has ended."""
        round_number, lane = divmod(job.batch, self._plan.lanes)
        rows = self._plan.most_rows
        items = self._take(job.epoch, lane, round_number * rows, rows)
        if self._plan.drop_remainder and len(items) < rows:
            items = []
        first = lane * _LANE_POSITIONS + round_number * rows
        self._items = dict(enumerate(items, first))
        return np.arange(first, first + len(items), dtype=np.int64)

    def first(self, epoch: int, most: int, feed: int) -> Iterator[npt.NDArray[np.int64]]:
        """See `WorkItems`."""
        for batch in range(self._plan.lanes):
            positions = self.positions(Job(0, epoch, batch, 1, 0, 0))
            if len(positions):
                yield positions

    def ends_batch(self, job: Job) -> bool:
        """See `WorkItems`."""
        return bool(self._items)

    def forget(self, epoch: int) -> None:
        """Nobody wants anything of that epoch any more."""
        for key in [key for key in self._lanes if key[0] == epoch]:
            self._lanes.pop(key).close()

    def _take(self, epoch: int, lane: int, start: int, count: int) -> list[Any]:
        watch = self._watch
        if watch is None or self._keeps_globals:
            return self._lane(epoch, lane).take(start, count)
        watch.arm()
        try:
            items = self._lane(epoch, lane).take(start, count)
        except Exception:
            if not watch.drew():
                raise
        else:
            if not watch.drew():
                return items
        # From here on each lane has a state of its own: they begin anew, as if it had been so from the start.
        self._keeps_globals = True
        for open_lane in self._lanes.values():
            open_lane.close()
        self._lanes.clear()
        return self._lane(epoch, lane).take(start, count)

    def _lane(self, epoch: int, lane: int) -> _Lane:
        found = self._lanes.get((epoch, lane))
        if found is None:
            found = self._lanes[epoch, lane] = _Lane(lambda info: self._open(epoch, lane, info), self._keeps_globals)
        return found

    def _open(self, epoch: int, lane: int, enter: Callable[[WorkerInfo], None]) -> Iterator[Any]:
        items = itertools.chain.from_iterable(self._generator(info, enter) for info in self._order.infos(epoch, lane))
        if not self._window:
            return items
        return shuffled(items, self._window, stream_key(f"lane-{lane}", self._plan.seed, 0), epoch)

    def _generator(self, info: WorkerInfo, enter: Callable[[WorkerInfo], None]) -> Iterator[Any]:
        enter(info)
        arguments = () if info.shard is None else (info.shard,)
        keywords = {}
        if self._takes_rng:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        made = self._make(*arguments, **keywords)
        if not hasattr(type(made), "__iter__"):
            raise GeneratorError(
                f"make_generator must return what can be iterated, such as a generator; it returned a "
                f"{type(made).__name__}"
            )
        return iter(made)

    def __reduce__(self) -> tuple[Any, ...]:
        order = self._order
        return LaneItems, (
            self._make, self._takes_rng, order._shards, self._plan, order._shuffle, self._window, self._seed_globals,
        )  # fmt: skip


class _Lane:
    """One lane in this process: its generators' items from the place on where it stands."""

    def __init__(
        self, open_items: Callable[[Callable[[WorkerInfo], None]], Iterator[Any]], keeps_globals: bool
    ) -> None:
        self._open, self._keeps_globals = open_items, keeps_globals
        self._items: Iterator[Any] | None = None
        self._info: WorkerInfo | None = None
        self._globals: SavedGlobals | None = None  # as its generator left them
        self._start = 0  # of the kept items
        self._kept: list[Any] = []  # the latest that were taken: a probe's, or of work that must be done again

    def take(self, start: int, count: int) -> list[Any]:
        """The items from `start` on; fewer than `count` where the lane ends."""
        if self._items is None or start < self._start:
            self.close()
        end = self._start + len(self._kept)
        if start > self._start:
            self._kept = self._kept[start - self._start :]
        missing = start + count - end
        if missing > 0:
            self._kept += self._read(max(0, start - end), min(missing, count))
        self._start = start
        return self._kept[:count]

    def _read(self, skipped: int, count: int) -> list[Any]:
        outside = SavedGlobals() if self._keeps_globals else None
        if self._globals is not None:
            self._globals.restore()
        set_worker_info(self._info)
        try:
            if self._items is None:
                self._items = iter(self._open(self._enter))
            for _ in itertools.islice(self._items, skipped):
                pass
            return list(itertools.islice(self._items, count))
        except BaseException:
            self._items = None  # it has ended by that: whoever comes again begins anew
            raise
        finally:
            set_worker_info(None)
            if outside is not None:
                if self._globals is None:
                    self._globals = SavedGlobals()
                else:
                    self._globals.save()
                outside.restore()

    def _enter(self, info: WorkerInfo) -> None:
        """The next generator begins."""
        self._info = info
        set_worker_info(info)
        if self._keeps_globals:
            random.seed(info.seed)
            np.random.seed([info.seed & 0xFFFFFFFF, info.seed >> 32])

    def close(self) -> None:
        """End the generator; the lane stands at its beginning."""
        items, self._items = self._items, None
        self._globals, self._info = None, None
        self._start, self._kept = 0, []
        close = getattr(items, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                close()
