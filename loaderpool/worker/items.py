"""Which positions a job has, and where their items come from: a source read by index, or bundles of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.memory.feed_table import Bundle, FeedTable
from loaderpool.plan.order import Plan
from loaderpool.worker.jobs import Abandoned, Job


class PlannedItems:
    """Positions by the plan; the source has the items."""

    reader = None

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def positions(self, job: Job) -> npt.NDArray[np.int64]:
        """Return the positions of all rows of a job, batch after batch."""
        plan = self._plan.after(job.after)
        if job.count == 1 and not plan.rows_vary:
            return plan.positions(job.epoch, job.batch)[job.row_start : job.row_stop]
        return plan.positions(job.epoch, job.batch, job.count)

    def first(self, epoch: int, most: int, feed: int) -> Iterator[npt.NDArray[np.int64]]:
        """The positions of an epoch's first batches, at most so many of them, for the probe."""
        for batch in range(min(most, self._plan.batches_per_epoch)):
            yield self._plan.positions(epoch, batch)

    def ends_batch(self, job: Job) -> bool:
        """Whether the last row of a job is the last one of its batch."""
        plan = self._plan.after(job.after)
        return plan.rows_vary or job.row_stop == plan.rows(job.epoch, job.batch)


class StreamedItems:
    """The items of the batches of one job at a time, by position. It travels to the workers as the loader's source.

    Attributes:
        shared: the arena's mapping; None in the caller's process, where items are `put` here.
    """

    def __init__(self) -> None:
        self.shared: Any = None
        self._items: dict[int, Any] = {}
        self._rows = 0  # of the latest batch
        self._tables: dict[int, FeedTable] = {}

    def __getitem__(self, position: int) -> Any:
        return self._items[position]

    @property
    def reader(self) -> Callable[[int], Any]:
        """Gives the items of the job whose positions were asked for last, for good."""
        return self._items.__getitem__

    def put(self, first: int, items: list[Any]) -> None:
        """Have these be the items of the next job, for `workers=0`."""
        self._items = dict(enumerate(items, first))

    def positions(self, job: Job) -> npt.NDArray[np.int64]:
        """Return the positions of a job's rows, as the bundle has them.

        Raises:
            Abandoned: a bundle is gone, so its batch is not wanted any more.
        """
        if self.shared is None:
            return self._positions()
        self._items = {}
        for batch in range(job.batch, job.batch + job.count):
            self._load(job.feed, batch)
        return self._positions() if job.count > 1 else self._positions()[job.row_start : job.row_stop]

    def first(self, epoch: int, most: int, feed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Positions of the first batch, which is there; no other may be."""
        if self.shared is not None:
            self._items = {}
            self._load(feed, 0)
        yield self._positions()

    def ends_batch(self, job: Job) -> bool:
        """Whether the last row of a job is the last one of its batch."""
        return job.row_stop == self._rows

    def _positions(self) -> npt.NDArray[np.int64]:
        return np.array(list(self._items), np.int64)

    def _load(self, feed: int, batch: int) -> None:
        table = self._tables.get(feed)
        if table is None:
            table = self._tables[feed] = FeedTable(self.shared, feed)
        bundle = table.read(batch)
        if bundle is None:
            raise Abandoned
        pickled, buffers = _parts(self.shared, bundle)
        if table.read(batch) != bundle:  # FEED-1
            raise Abandoned
        from loaderpool.transport.pickling import receive  # with cloudpickle, which `workers=0` does without

        self._rows = bundle.rows
        self._items.update(enumerate(receive(pickled, buffers), bundle.first))

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamedItems, ()


def _parts(shared: Any, bundle: Bundle) -> tuple[bytes, list[memoryview]]:
    """Copies of a bundle's pickle and of its arrays, these in memory that is the function's to write to and to keep."""
    at, end = bundle.offset, bundle.offset + bundle.nbytes
    if not bundle.buffers:
        return shared[at:end], []
    sizes = np.frombuffer(shared[at : at + 8 * (1 + bundle.buffers)], np.uint64).tolist()
    if at + 8 * len(sizes) + sum(sizes) > end:  # what lies here is another bundle's by now
        raise Abandoned
    at += 8 * len(sizes)
    copies: list[Any] = []
    with memoryview(shared) as view:
        for size in sizes:
            copies.append(bytearray(view[at : at + size]) if copies else shared[at : at + size])
            at += size
    return copies[0], [memoryview(copy) for copy in copies[1:]]
