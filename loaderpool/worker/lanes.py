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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.plan.base import shuffled, stream_key
from loaderpool.plan.generator_positions import first_position, item_name
from loaderpool.plan.order import Plan
from loaderpool.plan.permutation import Permutation
from loaderpool.sources.stream import WorkerInfo
from loaderpool.system import clock
from loaderpool.worker.global_rng import GlobalsWatch, SavedGlobals
from loaderpool.worker.jobs import Abandoned, Job
from loaderpool.worker.progress import Progress
from loaderpool.worker.reuse import comes_again, copy_of

if TYPE_CHECKING:
    from loaderpool.system.long_work import LongWork

# Items are asked for one by one where each takes at least so long, else in blocks: the look at "abandoned" then costs
# a share of a percent.
_SINGLE_ITEM_NS = 20_000
_BLOCK_ITEMS = 32

_Result = TypeVar("_Result")


class GeneratorError(RuntimeError):
    """What `make_generator` gave cannot be iterated, or not a second time."""


class GeneratorRaised(Exception):
    """Making the item of this position raised."""

    def __init__(self, position: int, error: Exception) -> None:
        super().__init__(position)
        self.position, self.error = position, error


class BuffersReused(Exception):
    """Items that were read together may be one buffer, filled again for each: read them again and copy each."""


class Watcher(Protocol):
    """Is told what a generator is at."""

    @property
    def times_items(self) -> bool:
        """Whether it must be told before each single item."""

    def begins(self, position: int, items: int) -> None:
        """Note that so many items are made from now on, of which the first has this position; 0: a generator is made.

        May raise, to end the work.
        """

    def ended(self) -> None:
        """Note that the generator has ended in place of making an item."""

    def pauses(self) -> None:
        """Note that no item is being made."""


class Lane:
    """A lane's items from the place on where it stands.

    Args:
        infos: gives its generators in their order, from the first one on.
        make: makes one of them: what is iterated.
        watcher: is told of each block of items.
        mixed: puts pairs of position and item into another order; None: they come as they are.
        keeps_globals: it has a state of its own of `random` and `numpy.random`.
        copies: arrays are copied as soon as they are yielded; else `BuffersReused` is raised where they should be. What
            is `mixed` is copied in any case.
        may_jump: items of sequences that are not wanted need not be read.
    """

    def __init__(
        self,
        infos: Callable[[], Iterator[WorkerInfo]],
        make: Callable[[WorkerInfo], Any],
        watcher: Watcher,
        *,
        mixed: Callable[[Iterator[tuple[int, Any]]], Iterator[tuple[int, Any]]] | None = None,
        keeps_globals: bool = False,
        copies: bool = False,
        may_jump: bool = False,
    ) -> None:
        self._infos, self._make, self._watcher, self._mixed = infos, make, watcher, mixed
        self._keeps_globals, self._may_jump = keeps_globals, may_jump
        # What waits to be mixed lives longer than its batch, in which alone it could be seen that it comes again.
        self._copies = copies or mixed is not None
        self._globals: SavedGlobals | None = None  # as its generators left them
        self._reset()

    def _reset(self) -> None:
        self._left: Iterator[WorkerInfo] | None = None  # generators that have not begun; None: it stands at the start
        self._info: WorkerInfo | None = None  # of the one that runs
        self._made: Any = None
        self._items: Iterator[Any] | None = None
        self._position = 0  # of its next item
        self._failing = 0  # of the item that is named where it raises
        self._pairs: Iterator[tuple[int, Any]] | None = None  # where they come in another order
        self._at = 0  # items read so far
        self._block = 1
        self._start, self._wanted = 0, -1  # the latest batch
        self._positions: list[int] = []
        self._batch: dict[int, Any] = {}  # its items by position, but for those that were given out

    def take(self, start: int, count: int) -> list[int]:
        """Stand at the batch of `count` items from number `start` on; fewer where the lane ends.

        Raises:
            BuffersReused: see `copies`.
            GeneratorRaised: a generator raised, or what makes it; the lane then stands at its start.
            Abandoned: the watcher says so.
        """
        if (start, count) == (self._start, self._wanted):
            return self._positions
        if start < self._at:
            self.close()
        self._batch = {}
        positions, items = self._run(lambda: self._read_from(start, count))
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
                raise GeneratorError("a generator that was run again yielded fewer items than before")
        return self._batch.pop(position)

    def close(self) -> None:
        """End the generator; the lane stands at its start."""
        with contextlib.suppress(Exception):  # of a `finally` of the user's, for which no consumer asked
            if self._left is not None:
                self._run(self._close_items)
        self._globals = None
        self._reset()

    # ---- the user's code runs ----

    def _run(self, work: Callable[[], _Result]) -> _Result:
        outside = SavedGlobals() if self._keeps_globals else None
        if self._globals is not None:
            self._globals.restore()
        try:
            return work()
        except BaseException as error:
            # A generator that has raised has ended: the next caller begins it again.
            position = self._failing
            with contextlib.suppress(Exception):
                self._close_items()
            self._reset()
            if isinstance(error, (Abandoned, BuffersReused)) or not isinstance(error, Exception):
                raise
            raise GeneratorRaised(position, error) from None
        finally:
            self._watcher.pauses()
            if outside is not None:
                self._globals = None if self._left is None else self._saved()
                outside.restore()

    def _saved(self) -> SavedGlobals:
        if self._globals is None:
            return SavedGlobals()
        self._globals.save()
        return self._globals

    def _read_from(self, start: int, count: int) -> tuple[list[int], list[Any]]:
        if self._left is None:
            self._left = self._infos()
        if self._mixed is None:
            self._skip(start - self._at)
            positions, items = self._read(count)
        else:
            if self._pairs is None:
                self._pairs = self._mixed(self._all_pairs())
            for _ in itertools.islice(self._pairs, start - self._at):
                pass
            pairs = list(itertools.islice(self._pairs, count))
            positions, items = [position for position, _ in pairs], [item for _, item in pairs]
        self._at = start + len(items)
        if not self._copies and len(items) > 1 and comes_again(items):
            raise BuffersReused
        return positions, items

    def _all_pairs(self) -> Iterator[tuple[int, Any]]:
        while True:
            positions, items = self._read(1)
            if not items:
                return
            yield positions[0], items[0]

    def _read(self, count: int) -> tuple[list[int], list[Any]]:
        positions: list[int] = []
        items: list[Any] = []
        while len(items) < count and (self._items is not None or self._begin_next()):
            before, wanted = len(items), self._next_block(count - len(items))
            started = clock.monotonic_ns()
            got = itertools.islice(self._items, wanted)  # type: ignore[arg-type]  # it is not None here
            try:
                items.extend(map(copy_of, got) if self._copies else got)
            finally:
                read = len(items) - before  # also where it raises
                self._failing = self._position + read
            positions.extend(range(self._position, self._position + read))
            self._passed(read, wanted, started)
        return positions, items

    def _skip(self, count: int) -> None:
        while count > 0 and (self._items is not None or self._begin_next()):
            if self._may_jump and _is_sequence(self._made):
                number = self._position - first_position(self._info.index)  # type: ignore[union-attr]
                jump = max(0, min(count, len(self._made) - number))
                self._items = _items_of(self._made, number + jump)
                self._position += jump
                count -= jump
                if count:
                    self._close_items()
                continue
            wanted = self._next_block(count)
            started, read = clock.monotonic_ns(), 0
            self._failing = self._position
            for _ in itertools.islice(self._items, wanted):  # type: ignore[arg-type]
                read += 1
                self._failing += 1
            self._passed(read, wanted, started)
            count -= read

    def _next_block(self, count: int) -> int:
        items = 1 if self._watcher.times_items else min(count, self._block)
        self._watcher.begins(self._position, items)
        return items

    def _passed(self, read: int, wanted: int, started: int) -> None:
        self._position += read
        if read < wanted:
            self._watcher.ended()
            self._close_items()
            return
        is_quick = clock.monotonic_ns() - started < _SINGLE_ITEM_NS * read
        self._block = _BLOCK_ITEMS if is_quick else 1

    def _begin_next(self) -> bool:
        """Have the next generator begin; False: there is none."""
        assert self._left is not None
        info = next(self._left, None)
        if info is None:
            return False
        self._info = info
        self._position = self._failing = first_position(info.index)
        if self._keeps_globals:
            random.seed(info.seed)
            np.random.seed([info.seed & 0xFFFFFFFF, info.seed >> 32])
        self._watcher.begins(self._position, 0)
        self._made = self._make(info)
        self._items = _items_of(self._made, 0)
        return True

    def _close_items(self) -> None:
        items, self._items, self._made = self._items, None, None
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _is_sequence(made: Any) -> bool:
    """Whether its items can be had by number, and are the same as when it is iterated."""
    if isinstance(made, (Sequence, np.ndarray)):
        return True
    kind = type(made)
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not hasattr(kind, "__iter__")


def _items_of(made: Any, start: int) -> Iterator[Any]:
    if _is_sequence(made):
        return map(made.__getitem__, range(start, len(made)))
    if not isinstance(made, Iterable):
        raise GeneratorError(
            f"make_generator must return an iterable, such as a generator, got a {type(made).__name__}"
        )
    return iter(made)


_SEED_BITS = (1 << 64) - 1


class LaneOrder:
    """Which generators make up each lane of an epoch, each with what tells it from the others.

    Args:
        shards: what each generator is given; None: they are copies.
        plan: how many lanes there are; and the shares of a data-parallel training.
        shuffle: whether the shards come in another order each epoch.
    """

    def __init__(self, shards: list[Any] | None, plan: Plan, shuffle: bool) -> None:
        self.shards, self._plan, self.shuffle = shards, plan, shuffle

    @property
    def are_copies(self) -> bool:
        """Whether generators are given no shard."""
        return self.shards is None

    def infos(self, epoch: int, lane: int) -> Iterator[WorkerInfo]:
        """The generators of a lane, one after the other."""
        plan, shards = self._plan, self.shards
        if shards is None:
            index, count = plan.shard_index * plan.lanes + lane, plan.num_shards * plan.lanes
            yield WorkerInfo(index, count, self._seed("copy", index, epoch), epoch)
            return
        places = np.arange(plan.shard_index + lane * plan.num_shards, len(shards), plan.lanes * plan.num_shards)
        if self.shuffle:
            places = Permutation(len(shards), stream_key("shards", plan.seed, epoch)).take(places)
        for index in places.tolist():
            yield WorkerInfo(index, len(shards), self._seed("shard", index, epoch), epoch, shards[index])

    def _seed(self, kind: str, index: int, epoch: int) -> int:
        return stream_key(f"{kind}-{index}", self._plan.seed, epoch) & _SEED_BITS


class LaneItems:
    """The items of one job at a time, out of the lanes that this process runs. It travels as the loader's source.

    Args:
        make_generator: the user's function.
        takes: which of "rng" and "worker" it is given.
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
        takes: frozenset[str],
        shards: list[Any] | None,
        plan: Plan,
        shuffle: bool,
        window: int,
        seed_globals: bool | Literal["auto"],
    ) -> None:
        self._make, self._takes, self._plan, self._window = make_generator, takes, plan, window
        self._seed_globals = seed_globals
        self._keeps_globals = seed_globals is True
        self._copies = False
        self._watch = GlobalsWatch() if seed_globals == "auto" else None
        self._order = LaneOrder(shards, plan, shuffle)
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._watcher = _Watcher()
        self._times_items = False
        self._latest: Lane | None = None  # whose batch is the job's
        self._is_over = False  # it has none

    @property
    def payload_parts(self) -> dict[str, Any]:
        """What of it is the user's, by the names of the arguments."""
        return {"make_generator": self._make, "shards": self._order.shards}

    def attend(self, progress: Progress, times_items: bool) -> None:
        """Have generators be seen at work: where they hang, and which of their items it is that ends the process."""
        self._watcher.progress, self._times_items = progress, times_items

    def tell_by(self, work: LongWork | None) -> None:
        """Have it told how far generators are. Runs in: the caller's process."""
        self._watcher.work = work

    def __getitem__(self, position: int) -> Any:
        assert self._latest is not None
        return self._latest.give(position)

    def positions(self, job: Job) -> npt.NDArray[np.int64]:
        """Return the positions of a job's rows; none where the lane has ended."""
        round_number, lane = divmod(job.batch, self._plan.lanes)
        rows = self._plan.most_rows
        self._watcher.run, self._watcher.times_items = job.run, self._times_items or job.attempt > 0
        positions = self._take(job.epoch, lane, round_number * rows, rows)
        if self._plan.drop_remainder and len(positions) < rows:
            positions = []
        self._is_over = not positions
        return np.array(positions, np.int64)

    def first(self, epoch: int, most: int, feed: int) -> Iterator[npt.NDArray[np.int64]]:
        for batch in range(self._plan.lanes):
            positions = self.positions(Job(0, epoch, batch, 1, 0, 0))
            if len(positions):
                yield positions

    def ends_batch(self, job: Job) -> bool:
        return not self._is_over

    @property
    def reader(self) -> Callable[[int], Any] | None:
        return None

    def forget(self, epoch: int) -> None:
        """Forget an epoch that was abandoned."""
        for key in [key for key in self._lanes if key[0] == epoch]:
            self._lanes.pop(key).close()

    def _take(self, epoch: int, lane: int, start: int, count: int) -> list[int]:
        while True:
            self._latest = self._lane(epoch, lane)
            try:
                if self._watch is None or self._keeps_globals:
                    return self._latest.take(start, count)
                positions = self._take_watched(self._watch, self._latest, start, count)
            except BuffersReused:
                self._copies = True
                self._lanes.pop((epoch, lane)).close()
                continue
            if positions is not None:
                return positions
            # From here on each lane has a state of its own: they begin again, as if it had been so from the start.
            self._keeps_globals = True
            for open_lane in self._lanes.values():
                open_lane.close()
            self._lanes.clear()

    @staticmethod
    def _take_watched(watch: GlobalsWatch, lane: Lane, start: int, count: int) -> list[int] | None:
        """Return what was taken; None: a generator was seen to draw from global generators and must be run again."""
        watch.arm()
        try:
            positions = lane.take(start, count)
        except Exception:
            if not watch.drew():
                raise
            return None
        return None if watch.drew() else positions

    def _lane(self, epoch: int, lane: int) -> Lane:
        found = self._lanes.get((epoch, lane))
        if found is None:
            found = self._lanes[epoch, lane] = Lane(
                lambda: self._order.infos(epoch, lane),
                self._make_one,
                self._watcher,
                mixed=self._mix(epoch, lane) if self._window else None,
                keeps_globals=self._keeps_globals,
                copies=self._copies,
                may_jump=not ("rng" in self._takes or self._keeps_globals),
            )
        return found

    def _mix(self, epoch: int, lane: int) -> Callable[[Iterator[tuple[int, Any]]], Iterator[tuple[int, Any]]]:
        number = self._plan.shard_index * self._plan.lanes + lane
        key = stream_key(f"lane-{number}", self._plan.seed, 0)
        return lambda pairs: shuffled(pairs, self._window, key, epoch)

    def _make_one(self, info: WorkerInfo) -> Any:
        arguments = () if self._order.are_copies else (info.shard,)
        keywords: dict[str, Any] = {"worker": info} if "worker" in self._takes else {}
        if "rng" in self._takes:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        return self._make(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        order = self._order
        return LaneItems, (
            self._make, self._takes, order.shards, self._plan, order.shuffle, self._window, self._seed_globals,
        )  # fmt: skip


class _Watcher:
    """Notes on the board what a generator is at; nothing before there is one."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.times_items = False
        self.run = 0
        self.work: LongWork | None = None  # in the caller's process, which is told of it

    def begins(self, position: int, items: int) -> None:
        if self.work is not None and self.work.is_due:
            self.work.reach(item_name(position))
        if self.progress is not None:
            self.progress.note_generator(self.run, position, items)

    def ended(self) -> None:
        if self.progress is not None:
            self.progress.drop_generated()

    def pauses(self) -> None:
        if self.progress is not None:
            self.progress.end_generator()
