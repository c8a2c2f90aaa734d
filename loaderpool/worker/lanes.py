"""Generators that run in copies: which of them make up a lane, and their items batch by batch.

A *lane* is what one copy of the generator yields in an epoch, or one after the other the generators of every n-th
shard. Batch k of a loader with n lanes is the k // n-th batch of lane k modulo n, so what a batch holds depends on
nothing but its number. A lane is worked on by the worker that it is at home with. Where it moves to another one, or its
worker died, the generator is made again and run again up to the batch that is wanted; what it yields on the way is
dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.plan.order import Plan, Ticket, first_position
from loaderpool.plan.permutation import Permutation, shuffled, stream_key
from loaderpool.sources.stream import WorkerInfo
from loaderpool.system import clock
from loaderpool.worker.own_process import GlobalsWatch, SavedGlobals
from loaderpool.worker.rows import copy_of, share_memory
from loaderpool.worker.tickets import Abandoned, Progress

# Items are asked for one by one where each takes at least so long, else in blocks: the look at "abandoned" then costs
# a share of a percent.
_SINGLE_ITEM_NS = 20_000
_BLOCK_ITEMS = 32
_SEED_BITS = (1 << 64) - 1
# Of these no item can be changed under us.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})

_Pairs = Iterator[tuple[int, Any]]  # positions and items


class LaneItems:
    """The items of one ticket at a time, out of the lanes that this process runs. It travels as the loader's source.

    Args:
        make_generator: the user's function.
        takes: which of "rng" and "worker" it is given.
        shards: what the generators are given, or None.
        plan: of the batches.
        shuffle: whether shards come in another order each epoch.
        window: items that are shuffled among each other in each lane; 0: none.
        seed_globals: whether each lane has a state of its own of `random` and `numpy.random`, at some 0.2 ms a batch;
            "auto": once one is seen to draw from them.
    """

    def __init__(
        self,
        make_generator: Callable[..., Any],
        takes: frozenset[str],
        shards: list[Any] | None,
        plan: Plan,
        shuffle: bool,
        window: int,
        seed_globals: bool | Literal["auto"],
    ) -> None:
        self._arguments = make_generator, takes, shards, plan, shuffle, window, seed_globals
        self._make, self._takes, self._shards, self._plan = make_generator, takes, shards, plan
        self._shuffle, self._window = shuffle, window
        self._watch = GlobalsWatch()
        self.keeps_globals = seed_globals is True  # each lane has a state of its own
        self._is_watched = seed_globals == "auto"
        # Items are copied at once, for they may be one buffer. What waits to be mixed lives longer than its batch, in
        # which alone it could be seen that it comes again.
        self.copies = window > 0
        self._lanes: dict[tuple[int, int], Lane] = {}  # by epoch and number
        self._latest: Lane | None = None  # whose batch is the ticket's
        self.progress: Progress
        self._times_items = self.is_timed = False
        self.run = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LaneItems, self._arguments

    @property
    def payload_parts(self) -> dict[str, Any]:
        """What of it is the user's, by the names of the arguments."""
        return {"make_generator": self._make, "shards": self._shards}

    def attend(self, progress: Progress, times_items: bool) -> None:
        """Have generators be seen at work: where they hang, and which of their items it is that ends the process."""
        self.progress, self._times_items = progress, times_items

    # ---- tickets ----

    def __getitem__(self, position: int) -> Any:
        assert self._latest is not None
        return self._latest.give(position)

    def positions(self, ticket: Ticket) -> npt.NDArray[np.int64]:
        """Return the positions of a ticket's rows; none where the lane has ended."""
        round_number, number = divmod(ticket.batch, self._plan.lanes)
        rows = self._plan.most_rows
        self.run, self.is_timed = ticket.run, self._times_items or ticket.deaths > 0
        positions = self._take((ticket.epoch, number), round_number * rows, rows)
        if self._plan.drop_remainder and len(positions) < rows:
            positions = []
        return np.array(positions, np.int64)

    def forget(self, epoch: int) -> None:
        """Forget an epoch that was abandoned."""
        for key in [key for key in self._lanes if key[0] == epoch]:
            self._lanes.pop(key).close()

    def close(self) -> None:
        """End all generators."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _take(self, key: tuple[int, int], start: int, count: int) -> list[int]:
        while True:
            if key not in self._lanes:
                self._lanes[key] = Lane(self, *key)
            lane = self._latest = self._lanes[key]
            if self.keeps_globals or not self._is_watched:
                return lane.take(start, count)
            positions, drew = self._watch.run(lane.take, start, count)
            if not drew:
                return list(positions)
            # From here on each lane has a state of its own: they begin again, as if it had been so from the start.
            self.keeps_globals = True
            self.close()

    # ---- what a lane is made of ----

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

    def make(self, info: WorkerInfo) -> Any:
        """Make one of the generators: what is iterated."""
        if self.keeps_globals:
            random.seed(info.seed)
            np.random.seed([info.seed & 0xFFFFFFFF, info.seed >> 32])
        arguments = () if self._shards is None else (info.shard,)
        keywords: dict[str, Any] = {"worker": info} if "worker" in self._takes else {}
        if "rng" in self._takes:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        return self._make(*arguments, **keywords)

    def mixed(self, pairs: _Pairs, epoch: int, lane: int) -> _Pairs | None:
        """Return a lane's items in the order in which they come; None: as they are made."""
        if not self._window:
            return None
        number = self._plan.shard_index * self._plan.lanes + lane
        return shuffled(pairs, self._window, stream_key(f"lane-{number}", self._plan.seed, 0), epoch)


class Lane:
    """A lane's items from the place on where it stands; `owner` makes its generators and is told what they are at."""

    def __init__(self, owner: LaneItems, epoch: int, number: int) -> None:
        self._owner, self._epoch, self._number = owner, epoch, number
        self._reset()

    def _reset(self) -> None:
        self._left: Iterator[WorkerInfo] | None = None  # generators that have not begun; None: it stands at the start
        self._items: Iterator[Any] | None = None
        self._globals: SavedGlobals | None = None  # as its generators left them
        self._position = 0  # of its next item, which is named where it raises
        self._pairs: _Pairs | None = None  # where they come in another order
        self._at = 0  # items read so far
        self._block = 1
        self._start, self._wanted = 0, -1  # the latest batch
        self._positions: list[int] = []
        self._batch: dict[int, Any] = {}  # its items by position, but for those that were given out

    def take(self, start: int, count: int) -> list[int]:
        """Stand at the batch of `count` items from number `start` on; fewer where the lane ends.

        The generators run with this lane's own state of the global generators, if lanes have one.

        Raises:
            WorkFailed: a generator raised, or what makes it; the lane then stands at its start.
        """
        if (start, count) == (self._start, self._wanted):
            return self._positions
        owner = self._owner
        if start < self._at:
            self.close()
        self._batch = {}
        outside = SavedGlobals() if owner.keeps_globals else None
        if self._globals is not None:
            self._globals.restore()
        try:
            positions, items = self._read_from(start, count)
        except BaseException as error:
            position = self._position
            self.close()  # what has raised has ended: the next caller begins it again
            if isinstance(error, Abandoned) or not isinstance(error, Exception):
                raise
            raise owner.progress.failed(error, self._epoch, [position], position) from None
        finally:
            owner.progress.end_generator()
            if outside is not None:
                self._globals = None if self._left is None else SavedGlobals()
                outside.restore()
        if not owner.copies and not _IMMUTABLE.issuperset(map(type, items)) and share_memory(items):
            owner.copies = True  # they may be one buffer, filled again for each: read again, and copy each
            self.close()
            return self.take(start, count)
        self._start, self._wanted = start, count
        self._positions, self._batch = positions, dict(zip(positions, items, strict=True))
        return positions

    def give(self, position: int) -> Any:
        """Return an item of the latest batch. It is the caller's, who may change it: a second time it is made again."""
        if position not in self._batch:
            start, wanted = self._start, self._wanted
            self.close()
            self.take(start, wanted)
            if position not in self._batch:
                raise RuntimeError("a generator that was run again yielded fewer items than before")
        return self._batch.pop(position)

    def close(self) -> None:
        """End the generator; the lane stands at its start."""
        try:
            with contextlib.suppress(Exception):  # of a `finally` of the user's, for which no consumer asked
                self._close_items()
        finally:
            self._reset()

    # ---- the user's code runs ----

    def _read_from(self, start: int, count: int) -> tuple[list[int], list[Any]]:
        if self._left is None:
            self._left = self._owner.infos(self._epoch, self._number)
            self._pairs = self._owner.mixed(self._all_pairs(), self._epoch, self._number)
        if self._pairs is not None:
            for _ in itertools.islice(self._pairs, start - self._at):
                pass
            pairs = list(itertools.islice(self._pairs, count))
            positions, items = [position for position, _ in pairs], [item for _, item in pairs]
        else:
            skipped = start - self._at
            while skipped > 0 and (self._items is not None or self._begin_next()):
                skipped -= self._read_block(skipped, [])
            positions, items = self._read(count)
        self._at = start + len(items)
        return positions, items

    def _all_pairs(self) -> _Pairs:
        while True:
            positions, items = self._read(1)
            if not items:
                return
            yield positions[0], items[0]

    def _read(self, count: int) -> tuple[list[int], list[Any]]:
        positions: list[int] = []
        items: list[Any] = []
        while len(items) < count and (self._items is not None or self._begin_next()):
            read = self._read_block(count - len(items), items)
            positions.extend(range(self._position - read, self._position))
        return positions, items

    def _read_block(self, most: int, items: list[Any]) -> int:
        """Append some of the running generator's items, at most so many; return how many."""
        assert self._items is not None
        before, position, progress = len(items), self._position, self._owner.progress
        wanted = 1 if self._owner.is_timed else min(most, self._block)
        progress.note_generator(self._owner.run, position)
        started = clock.monotonic_ns()
        got = itertools.islice(self._items, wanted)
        try:
            items.extend(map(copy_of, got) if self._owner.copies else got)
        finally:
            read = len(items) - before  # also where it raises
            self._position += read
        ended = clock.monotonic_ns()
        if read < wanted:
            self._close_items()
        else:
            self._block = _BLOCK_ITEMS if ended - started < _SINGLE_ITEM_NS * read else 1
            if wanted == 1 and progress.counts_generated:  # of a block none is known by itself
                progress.note_call(started, ended, position)
        return read

    def _begin_next(self) -> bool:
        """Have the next generator begin; False: there is none."""
        assert self._left is not None
        info = next(self._left, None)
        if info is None:
            return False
        self._position = first_position(info.index)
        self._owner.progress.note_generator(self._owner.run, self._position)
        made = self._owner.make(info)
        if not isinstance(made, Iterable):
            raise TypeError(f"make_generator must return an iterable, such as a generator, got {type(made).__name__}")
        self._items = iter(made)
        return True

    def _close_items(self) -> None:
        items, self._items = self._items, None
        close = getattr(items, "close", None)
        if close is not None:
            close()
