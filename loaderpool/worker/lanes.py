"""Lanes of generators: a lane's generators, and its items batch by batch.

A *lane* is the sequence of items that one copy of the generator yields in an epoch. With shards, it
is the items of every n-th shard, one shard after the other. Batch k of a loader with n lanes is
batch k // n of lane k modulo n. So the content of a batch depends only on its number.

Each lane is assigned to one worker. If the lane moves to another worker, or its worker dies, the
generator is created again and run up to the next batch. The items on the way are dropped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import SourceError, add_note, brief, counted
from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import CapturedGenerators, torch_generator
from loaderpool.plan.item_names import first_position
from loaderpool.plan.permutation import Permutation, shuffled, stream_key
from loaderpool.plan.stream_kinds import LANE
from loaderpool.sources.stream import WorkerInfo, by_next, skip
from loaderpool.system import clock
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.transport.messages import Ticket
from loaderpool.worker.own_process import GlobalsWatch, SavedGlobals, end_stray
from loaderpool.worker.rows import copy_of, share_memory
from loaderpool.worker.tickets import Abandoned, Opened, Progress

# Items are read one by one if each takes at least this long, otherwise in blocks. The check for
# "abandoned" then costs a fraction of a percent.
_SINGLE_ITEM_NS = 20_000
_BLOCK_ITEMS = 32
_SEED_BITS = (1 << 64) - 1
# Immutable types: their objects cannot change after they were yielded.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None)})

_Pairs = Iterator[tuple[int, object]]  # positions and items


class Generators(NamedTuple):
    """The user's generators of each lane.

    The epoch and the lane determine which generators they are, and their order.
    """

    make_generator: Callable[..., object]  # the user's function
    takes: frozenset[str]  # "rng" and "worker", if the function accepts them
    shards: list[object] | None  # arguments of the generators, one for each; None: there are none
    plan: Plan  # plan of the batches
    shuffle: bool  # True if each epoch has another order of shards
    window: int  # items that are shuffled among each other in each lane; 0: none
    lengths: tuple[int, ...] | None = None  # number of items of each shard; None: unknown

    def infos(self, epoch: int, lane: int) -> Iterator[WorkerInfo]:
        """Yield the `WorkerInfo` of each generator of a lane, in order."""
        plan, shards = self.plan, self.shards
        if shards is None:
            index, count = plan.shard_index * plan.lanes + lane, plan.num_shards * plan.lanes
            yield WorkerInfo(index, count, self._seed("copy", index, epoch), epoch)
            return
        places = shards_of(plan, lane, len(shards))
        if self.shuffle and self.lengths is None:
            places = Permutation(len(shards), stream_key("shards", plan.order.seed, epoch)).take(
                places
            )
        elif self.shuffle:
            # Shards of a lane stay together, so that each epoch has the same number of batches. The
            # order of lanes changes, and the order of shards within each lane.
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
        return stream_key(f"{kind}-{index}", self.plan.order.seed, epoch) & _SEED_BITS

    def make(self, info: WorkerInfo) -> object:
        """Call the user's function, and return its result, which should be an iterable."""
        arguments = () if self.shards is None else (info.shard,)
        keywords: dict[str, Any] = {"worker": info} if "worker" in self.takes else {}
        if "rng" in self.takes:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        return self.make_generator(*arguments, **keywords)

    def length(self, info: WorkerInfo) -> int | None:
        """Return the stated number of items of a shard, or None if unknown."""
        return None if self.lengths is None else self.lengths[info.index]

    def mixed(self, pairs: _Pairs, epoch: int, lane: int) -> _Pairs:
        """Return a lane's items in shuffled order; `pairs` itself if there is no window."""
        if not self.window:
            return pairs
        number = self.plan.shard_index * self.plan.lanes + lane
        return shuffled(
            pairs, self.window, stream_key(f"lane-{number}", self.plan.order.seed, 0), epoch
        )


class LaneItems:
    """Items of one ticket at a time, from the lanes that run in this process.

    It is pickled to the workers as the loader's source.

    Args:
        generators: the generators of each lane.
        seed_globals: True if each lane has its own state of `random`, `numpy.random` and torch,
            which takes about 0.2 ms per batch. "auto": only after a generator drew from them.
    """

    def __init__(self, generators: Generators, seed_globals: bool | Literal["auto"]) -> None:
        self.generators, self._seed_globals = generators, seed_globals
        self.keeps_globals = seed_globals is True  # each lane has its own state
        self._seeds_torch = False  # the states include that of torch
        self._watch = GlobalsWatch() if seed_globals == "auto" else None
        # Items are copied at once, because all may share one buffer. Items that wait in the window
        # outlive their batch, and sharing could only be detected within a batch.
        self.copies = generators.window > 0
        self._lanes: dict[tuple[int, int], Lane] = {}  # keyed by epoch and number
        self._latest: Lane  # lane of the latest batch, once `open` was called
        # items of the next ticket, by position, if another worker has read them
        self._given: dict[int, object] = {}
        self.progress: Progress
        self.captured: CapturedGenerators | None = None
        self._times_items = self.is_timed = False
        self._after_item: Callable[[], None] = end_stray
        self.run = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return LaneItems, (self.generators, self._seed_globals)

    @property
    def payload_parts(self) -> dict[str, Any]:
        """The user's objects in it, by the names of their arguments."""
        return {"make_generator": self.generators.make_generator, "shards": self.generators.shards}

    def attend(
        self, progress: Progress, times_items: bool, captured: CapturedGenerators | None = None
    ) -> None:
        """Set the `Progress` that records running generators, so that a hang or crash names its
        item.

        Called by `Work` before any ticket.

        Args:
            progress: the worker's notes on the board.
            times_items: True if each item is noted and timed by itself.
            captured: random generators that the user's generators hold. Each lane has its own
                states of them.
        """
        self.progress, self._times_items, self.captured = progress, times_items, captured
        progress.failures.shards = self.generators.shards

    # ---- tickets ----

    def __getitem__(self, position: int) -> object:
        return self._latest.give(position)

    def first_batches(self, plan: Plan) -> int:
        """Return the number of lanes, because each has one first batch."""
        return plan.lanes

    def put(self, positions: Sequence[int], items: Sequence[object]) -> None:
        """Store the items of the next ticket, which another worker has read."""
        self._given = dict(zip(positions, items, strict=True))

    def open(self, ticket: Ticket, plan: Plan) -> Opened:
        """Return the rows of a ticket; empty if the lane has ended."""
        if ticket.items:
            given, self._given = self._given, {}
            return Opened(ticket, np.array([*given], np.int64), [*given], given.__getitem__)
        round_number, number = divmod(ticket.batch, plan.lanes)
        rows = plan.most_rows
        self.run, self.is_timed = ticket.run, self._times_items or ticket.deaths > 0
        positions = self._take((ticket.epoch, number), round_number * rows, rows)
        if plan.drop_remainder and len(positions) < rows:
            positions = []
        return Opened(ticket, np.array(positions, np.int64), positions, self._latest.give)

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Close all generators. Use these random generators in those that start later."""
        self.close()
        self.captured = captured

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Use these random generators. The `setup` hook has just made some of them."""
        self.captured = captured

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Call `check` after each read from a generator."""
        self._after_item = check

    def after_item(self) -> None:
        """Run the check. Called by `Lane` after a generator has made one item or a block."""
        self._after_item()

    def forget(self, epoch: int) -> None:
        """Close the lanes of an abandoned epoch."""
        for key in [key for key in self._lanes if key[0] == epoch]:
            self._lanes.pop(key).close()

    def close(self) -> None:
        """Close all generators."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _take(self, key: tuple[int, int], start: int, count: int) -> list[int]:
        if self._has_new_torch:  # the read that has imported it failed
            self._restart()
        while True:
            if key not in self._lanes:
                self._lanes[key] = Lane(self, *key)
            lane = self._latest = self._lanes[key]
            if self.keeps_globals or self._watch is None:
                positions = lane.take(start, count)
                if not self._has_new_torch:
                    return positions
            else:
                positions, drew = self._watch.run(lane.take, start, count)
                if not drew:
                    return list(positions)
            self._restart()

    def _restart(self) -> None:
        """Restart all lanes. From now on each has its own state, as if this had been so before."""
        self.keeps_globals, self._seeds_torch = True, torch_generator() is not None
        self.close()

    @property
    def _has_new_torch(self) -> bool:
        """True if lanes have their own states, but not of torch, because it was not imported."""
        return self.keeps_globals and not self._seeds_torch and torch_generator() is not None

    def make(self, info: WorkerInfo) -> object:
        """Seed the generators, call the user's `make_generator`, and return its result."""
        if self.captured is not None:
            self.captured.begin(LANE, info.epoch, info.index)
        if self.keeps_globals:
            random.seed(info.seed)
            # With the same words, `random` and `numpy.random` would draw the same numbers.
            np.random.seed([info.seed & 0xFFFFFFFF, info.seed >> 32, 1])
            generator = torch_generator()
            if generator is not None:
                generator.manual_seed(info.seed)
        return self.generators.make(info)


class _LaneBatch(NamedTuple):
    """The latest batch of a lane. Its positions may be fewer than `wanted`, at the lane's end."""

    start: int  # first item
    wanted: int  # size of the batch
    positions: list[int]


class Lane:
    """Items of a lane, read forward from its current position.

    Args:
        owner: creates the generators and records their progress.
        epoch: the epoch.
        number: number of the lane.
    """

    def __init__(self, owner: LaneItems, epoch: int, number: int) -> None:
        self._owner, self._epoch, self._number = owner, epoch, number
        self._reset()

    def _reset(self) -> None:
        # iterator over positions and items; None: the lane is at its start
        self._made: Generator[tuple[int, object], None, None] | None = None
        self._mixed: _Pairs = iter(())  # items of `_made` in their final order
        self._globals: SavedGlobals | None = None  # state that the lane's generators left
        # function that restores the captured generators to the lane's latest states
        self._restore_captured: Callable[[], None] | None = None
        self._position = 0  # position of the next item, for errors
        self._at = 0  # items read so far
        # items still needed for the batch, the limit of a block; others are read one by one
        self._needed = 0
        self._latest = _LaneBatch(0, -1, [])
        # items of the latest batch by position, except those returned by `give`
        self._batch: dict[int, object] = {}

    def take(self, start: int, count: int) -> list[int]:
        """Read the batch of `count` items from item `start` on, and return their positions.

        The batch is shorter if the lane ends. The generators run with the lane's own state of the
        global generators, if lanes have one.

        Raises:
            WorkFailed: a generator or `make_generator` raised. The lane is then back at its start.
        """
        if (start, count) == self._latest[:2]:
            return self._latest.positions
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
            self.close()  # a generator that raised has ended; the next call restarts it
            if isinstance(error, Abandoned) or not isinstance(error, Exception):
                raise
            raise owner.progress.failures.of(error, self._epoch, [position], position) from None
        finally:
            owner.progress.end_generator()
            if owner.captured is not None and self._made is not None:
                self._restore_captured = owner.captured.save()
            if outside is not None:
                self._globals = None if self._made is None else SavedGlobals()
                outside.restore()
        items = [item for _, item in pairs]
        if not owner.copies and not _IMMUTABLE.issuperset(map(type, items)) and share_memory(items):
            # Items may share one buffer that is filled again for each: read them again, and copy
            # each.
            owner.copies = True
            self.close()
            return self.take(start, count)
        self._latest = _LaneBatch(start, count, [position for position, _ in pairs])
        self._batch = dict(pairs)
        return self._latest.positions

    def give(self, position: int) -> object:
        """Return an item of the latest batch. The caller may change it, so a second call makes the
        item again.
        """
        if position not in self._batch:
            start, wanted, _ = self._latest
            self.close()
            self.take(start, wanted)
            if position not in self._batch:
                raise RuntimeError("a generator that was run again yielded fewer items than before")
        return self._batch.pop(position)

    def close(self) -> None:
        """Close the generator. The lane is back at its start."""
        try:
            # the user's `finally` blocks may fail, and no consumer waits for them
            with FailuresIgnored():
                if self._made is not None:
                    self._made.close()
        finally:
            self._reset()

    def _read(self, start: int, count: int) -> list[tuple[int, object]]:
        if self._made is None:
            self._made = self._make()
            self._mixed = self._owner.generators.mixed(self._made, self._epoch, self._number)
        self._needed = start + count - self._at
        # All lanes skip about as many items, so only lane 0 reports it.
        skip(
            self._mixed, start - self._at, f"generator {self._number}" if self._number == 0 else ""
        )
        pairs = list(itertools.islice(self._mixed, count))
        self._at = start + len(pairs)
        return pairs

    def _make(self) -> Generator[tuple[int, object], None, None]:
        """Yield each item with its position, generator after generator. User code runs here."""
        owner, progress, at_once = self._owner, self._owner.progress, 1
        for info in owner.generators.infos(self._epoch, self._number):
            self._position = begin = first_position(info.index)
            length = owner.generators.length(info)
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
                    position, block = self._position, list[object]()
                    wanted = 1 if owner.is_timed else max(1, min(at_once, self._needed))
                    progress.note_generator(owner.run, position)
                    started = clock.monotonic_ns()
                    got = itertools.islice(unread, wanted)
                    try:
                        block.extend(map(copy_of, got) if owner.copies else got)
                    finally:
                        self._position += len(block)  # also if the generator raises
                    owner.after_item()
                    ended = clock.monotonic_ns()
                    self._needed -= len(block)
                    is_over = len(block) < wanted
                    if length is not None and (is_over or self._position - begin >= length):
                        _check_length(info, length, self._position - begin, unread)
                        is_over = True
                    if not is_over:
                        at_once = _BLOCK_ITEMS if ended - started < _SINGLE_ITEM_NS * wanted else 1
                        # the items of a block have no durations of their own
                        if wanted == 1 and progress.counts_generated:
                            progress.note_call(started, ended, position)
                    yield from enumerate(block, position)
            except Exception as error:
                if info.shard is not None:
                    add_note(error, f"while shard {brief(info.shard)} was read")
                raise
            finally:
                if (close := getattr(items, "close", None)) is not None:
                    close()


def _check_length(info: WorkerInfo, stated: int, count: int, unread: Iterator[object]) -> None:
    """Raise `SourceError` if a shard's number of items differs from `stated`; `count` items were
    read.
    """
    if count == stated and next(unread, unread) is not unread:
        count += 1
    if count != stated:
        found = f"more than {stated} items" if count > stated else f"only {counted(count, 'item')}"
        raise SourceError(
            f"shard {info.index} ({brief(info.shard)}) has {found}, but shard_lengths states "
            f"{stated}. Correct shard_lengths, or remove it"
        )


def shards_of(plan: Plan, lane: int, count: int) -> npt.NDArray[np.int64]:
    """Return the indices of a lane's shards, of `count` in all, in unshuffled order."""
    return np.arange(plan.shard_index + lane * plan.num_shards, count, plan.lanes * plan.num_shards)


def stated_batches(plan: Plan, lengths: tuple[int, ...]) -> int:
    """Return the number of batches in an epoch of this process, for shards of these lengths.

    It is the same in each epoch.
    """
    rows, sizes = plan.most_rows, np.array(lengths, np.int64)
    items = [int(sizes[shards_of(plan, lane, len(lengths))].sum()) for lane in range(plan.lanes)]
    return sum(each // rows if plan.drop_remainder else -(-each // rows) for each in items)
