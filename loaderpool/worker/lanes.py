"""Generators that run in copies: which of them make up a lane, and their items batch by batch.

A *lane* is what one copy of the generator yields in an epoch, or one after the other the generators of every n-th
shard. Batch k of a loader with n lanes is the k // n-th batch of lane k modulo n, so what a batch holds depends on
nothing but its number. A lane is worked on by the worker that it is at home with. Where it moves to another one, or its
worker died, the generator is made again and run again up to the batch that is wanted; what it yields on the way is
dropped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.errors import SourceError, add_note, brief
from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import LANE, CapturedGenerators
from loaderpool.plan.item_names import first_position
from loaderpool.plan.permutation import Permutation, shuffled, stream_key
from loaderpool.sources.stream import WorkerInfo, by_next, skip
from loaderpool.system import clock
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.worker.own_process import GlobalsWatch, SavedGlobals, end_stray
from loaderpool.worker.rows import copy_of, share_memory
from loaderpool.worker.tickets import Abandoned, Opened, Progress, Ticket

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
        lengths: number of items of each shard; None: unknown.
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
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        self._arguments = (
            make_generator,
            takes,
            shards,
            plan,
            shuffle,
            window,
            seed_globals,
            lengths,
        )
        self._lengths = lengths
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
        self.captured: CapturedGenerators | None = None
        self._times_items = self.is_timed = False
        self._after_item: Callable[[], None] = end_stray
        self.run = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LaneItems, self._arguments

    @property
    def payload_parts(self) -> dict[str, Any]:
        """What of it is the user's, by the names of the arguments."""
        return {"make_generator": self._make, "shards": self._shards}

    def attend(
        self, progress: Progress, times_items: bool, captured: CapturedGenerators | None = None
    ) -> None:
        """Have generators be seen at work: where they hang, and which of their items it is that ends the process.

        `captured`: the random generators that they hold, of which each lane has states of its own.
        """
        self.progress, self._times_items, self.captured = progress, times_items, captured

    # ---- tickets ----

    def __getitem__(self, position: int) -> Any:
        assert self._latest is not None
        return self._latest.give(position)

    @property
    def first_batches(self) -> int:
        """The first one of each lane."""
        return self._plan.lanes

    def open(self, ticket: Ticket) -> Opened:
        """Return the rows of a ticket; none if the lane has ended."""
        round_number, number = divmod(ticket.batch, self._plan.lanes)
        rows = self._plan.most_rows
        self.run, self.is_timed = ticket.run, self._times_items or ticket.deaths > 0
        positions = self._take((ticket.epoch, number), round_number * rows, rows)
        if self._plan.drop_remainder and len(positions) < rows:
            positions = []
        return Opened(ticket, np.array(positions, np.int64), positions)

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators from now on, in generator functions that start again."""
        self.close()
        self.captured = captured

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators, some of which the hook `setup` has made just now."""
        self.captured = captured

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Call `check` after each item that a generator has made."""
        self._after_item = check

    def after_item(self) -> None:
        """Note that a generator has made one item, or a few."""
        self._after_item()

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
        places = shards_of(plan, lane, len(shards))
        if self._shuffle and self._lengths is None:
            places = Permutation(len(shards), stream_key("shards", plan.order.seed, epoch)).take(
                places
            )
        elif self._shuffle:
            # Shards stay with those that they share a lane with, so that each epoch has as many batches. Which lane
            # comes first changes, and so does the order within each.
            (lane,) = (
                Permutation(plan.lanes, stream_key("lanes", plan.order.seed, epoch))
                .take(np.array([lane]))
                .tolist()
            )
            places = shards_of(plan, lane, len(shards))
            order = Permutation(len(places), stream_key(f"shards-{lane}", plan.order.seed, epoch))
            places = places[order.take(np.arange(len(places)))]
        for index in places.tolist():
            yield WorkerInfo(
                index, len(shards), self._seed("shard", index, epoch), epoch, shards[index]
            )

    def _seed(self, kind: str, index: int, epoch: int) -> int:
        return stream_key(f"{kind}-{index}", self._plan.order.seed, epoch) & _SEED_BITS

    def make(self, info: WorkerInfo) -> Any:
        """Make one of the generators: what is iterated."""
        if self.captured is not None:
            self.captured.begin(LANE, info.epoch, info.index)
        if self.keeps_globals:
            random.seed(info.seed)
            np.random.seed([info.seed & 0xFFFFFFFF, info.seed >> 32])
        arguments = () if self._shards is None else (info.shard,)
        keywords: dict[str, Any] = {"worker": info} if "worker" in self._takes else {}
        if "rng" in self._takes:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        return self._make(*arguments, **keywords)

    def length(self, info: WorkerInfo) -> int | None:
        """Return the stated number of items of a shard; None: unknown."""
        return None if self._lengths is None else self._lengths[info.index]

    def mixed(self, pairs: _Pairs, epoch: int, lane: int) -> _Pairs:
        """Return a lane's items in the order in which they come, of these as they are made."""
        if not self._window:
            return pairs
        number = self._plan.shard_index * self._plan.lanes + lane
        return shuffled(
            pairs, self._window, stream_key(f"lane-{number}", self._plan.order.seed, 0), epoch
        )


class Lane:
    """A lane's items from the place on where it stands; `owner` makes its generators and is told what they are at."""

    def __init__(self, owner: LaneItems, epoch: int, number: int) -> None:
        self._owner, self._epoch, self._number = owner, epoch, number
        self._reset()

    def _reset(self) -> None:
        self._made: Generator[tuple[int, Any], None, None] | None = (
            None  # None: it stands at the start
        )
        self._mixed: _Pairs = iter(())  # the same in the order in which they come
        self._globals: SavedGlobals | None = None  # as its generators left them
        self._restore_captured: Callable[[], None] | None = (
            None  # to the states in which they were left
        )
        self._position = 0  # of its next item, which is named where it raises
        self._at = 0  # items read so far
        self._needed = 0  # of those that are made next: more may be asked for one by one
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
        if self._restore_captured is not None:
            self._restore_captured()
        try:
            pairs = self._read(start, count)
        except BaseException as error:
            position = self._position
            self.close()  # what has raised has ended: the next caller begins it again
            if isinstance(error, Abandoned) or not isinstance(error, Exception):
                raise
            raise owner.progress.failed(error, self._epoch, [position], position) from None
        finally:
            owner.progress.end_generator()
            if owner.captured is not None and self._made is not None:
                self._restore_captured = owner.captured.save()
            if outside is not None:
                self._globals = None if self._made is None else SavedGlobals()
                outside.restore()
        items = [item for _, item in pairs]
        if not owner.copies and not _IMMUTABLE.issuperset(map(type, items)) and share_memory(items):
            owner.copies = (
                True  # they may be one buffer, filled again for each: read again, and copy each
            )
            self.close()
            return self.take(start, count)
        self._start, self._wanted = start, count
        self._positions, self._batch = [position for position, _ in pairs], dict(pairs)
        return self._positions

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
            with FailuresIgnored():  # of a `finally` of the user's, for which no consumer asked
                if self._made is not None:
                    self._made.close()
        finally:
            self._reset()

    def _read(self, start: int, count: int) -> list[tuple[int, Any]]:
        if self._made is None:
            self._made = self._make()
            self._mixed = self._owner.mixed(self._made, self._epoch, self._number)
        self._needed = start + count - self._at
        # All lanes do about the same, so one reports it.
        skip(
            self._mixed, start - self._at, f"generator {self._number}" if self._number == 0 else ""
        )
        pairs = list(itertools.islice(self._mixed, count))
        self._at = start + len(pairs)
        return pairs

    def _make(self) -> Generator[tuple[int, Any], None, None]:
        """Yield each item with its position, generator after generator: here the user's code runs."""
        owner, progress, at_once = self._owner, self._owner.progress, 1
        for info in owner.infos(self._epoch, self._number):
            self._position = begin = first_position(info.index)
            length = owner.length(info)
            progress.note_generator(owner.run, self._position)
            made = owner.make(info)
            if not isinstance(made, Iterable):
                kind = type(made).__name__
                raise TypeError(
                    f"make_generator must return an iterable, such as a generator, got {kind}"
                )
            items = iter(made)
            unread, is_over = by_next(items), False
            try:
                while not is_over:
                    position, block = self._position, list[Any]()
                    wanted = 1 if owner.is_timed else max(1, min(at_once, self._needed))
                    progress.note_generator(owner.run, position)
                    started = clock.monotonic_ns()
                    got = itertools.islice(unread, wanted)
                    try:
                        block.extend(map(copy_of, got) if owner.copies else got)
                    finally:
                        self._position += len(block)  # also where it raises
                    owner.after_item()
                    ended = clock.monotonic_ns()
                    self._needed -= len(block)
                    is_over = len(block) < wanted
                    if length is not None and (is_over or self._position - begin >= length):
                        _check_length(info, length, self._position - begin, unread)
                        is_over = True
                    if not is_over:
                        at_once = _BLOCK_ITEMS if ended - started < _SINGLE_ITEM_NS * wanted else 1
                        if (
                            wanted == 1 and progress.counts_generated
                        ):  # of a block none is known by itself
                            progress.note_call(started, ended, position)
                    yield from enumerate(block, position)
            except Exception as error:
                if info.shard is not None:
                    add_note(error, f"while shard {brief(info.shard)} was read")
                raise
            finally:
                if (close := getattr(items, "close", None)) is not None:
                    close()


def _check_length(info: WorkerInfo, stated: int, count: int, unread: Iterator[Any]) -> None:
    """Raise if a shard has another number of items than was stated; `count` of them were read."""
    if count == stated and next(unread, unread) is not unread:
        count += 1
    if count != stated:
        found = f"more than {stated}" if count > stated else f"only {count}"
        raise SourceError(
            f"shard {info.index} ({brief(info.shard)}) has {found} items, but shard_lengths states {stated}. Correct "
            "shard_lengths, or remove it"
        )


def shards_of(plan: Plan, lane: int, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the shards of a lane, of `count` in all, in the order without a shuffle."""
    return np.arange(plan.shard_index + lane * plan.num_shards, count, plan.lanes * plan.num_shards)


def stated_batches(plan: Plan, lengths: tuple[int, ...]) -> int:
    """Return the batches of an epoch of this process, of shards of these lengths. It is the same in each epoch."""
    rows, sizes = plan.most_rows, np.array(lengths, np.int64)
    items = [int(sizes[shards_of(plan, lane, len(lengths))].sum()) for lane in range(plan.lanes)]
    return sum(each // rows if plan.drop_remainder else -(-each // rows) for each in items)
