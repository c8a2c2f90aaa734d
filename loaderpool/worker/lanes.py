"""Generators that run in copies: which of them make up a lane, and their items batch by batch.

A *lane* is what one copy of the generator yields in an epoch, or one after the other the generators of every n-th
shard. Batch k of a loader with n lanes is the k // n-th batch of lane k modulo n, so what a batch holds depends on
nothing but its number. A lane is worked on by the worker that it is at home with. Where it moves to another one, or its
worker died, the generator is made again and run again up to the batch that is wanted; what it yields on the way is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.plan.generator_positions import item_name
from loaderpool.plan.keys import stream_key
from loaderpool.plan.order import Plan
from loaderpool.plan.permutation import Permutation
from loaderpool.plan.window import shuffled
from loaderpool.sources.worker_info import WorkerInfo
from loaderpool.system.long_work import LongWork
from loaderpool.worker.global_rng import GlobalsWatch
from loaderpool.worker.jobs import Job
from loaderpool.worker.lane import BuffersReused, Lane
from loaderpool.worker.progress import Progress

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
                may_jump=not (self._takes_rng or self._keeps_globals),
            )
        return found

    def _mix(self, epoch: int, lane: int) -> Callable[[Iterator[tuple[int, Any]]], Iterator[tuple[int, Any]]]:
        number = self._plan.shard_index * self._plan.lanes + lane
        key = stream_key(f"lane-{number}", self._plan.seed, 0)
        return lambda pairs: shuffled(pairs, self._window, key, epoch)

    def _make_one(self, info: WorkerInfo) -> Any:
        arguments = () if self._order.are_copies else (info.shard,)
        keywords = {}
        if self._takes_rng:
            keywords["rng"] = np.random.Generator(np.random.Philox(key=info.seed))
        return self._make(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        order = self._order
        return LaneItems, (
            self._make, self._takes_rng, order.shards, self._plan, order.shuffle, self._window, self._seed_globals,
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
