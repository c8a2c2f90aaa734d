"""One loader's batches made in the caller's process (`workers=0`): the very same code and bits, for a debugger."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from loaderpool.cache.setting import NO_COUNTS
from loaderpool.core.buffers import RUNNING_GENERATORS
from loaderpool.core.delivery import CheckedArguments, Delivery, aligned_empty
from loaderpool.core.engine_statistics import EngineStatistics
from loaderpool.core.failures import sample_error, source_error
from loaderpool.core.forms import SECOND, SecondLook, choose_form, stated_probe, with_batches
from loaderpool.element.spec import ElementSpec
from loaderpool.errors import SourceError
from loaderpool.memory.board import BOARD_BYTES
from loaderpool.memory.layout import BatchForm, is_empty
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.base import LanePlaces
from loaderpool.plan.order import Plan
from loaderpool.sources.stream import StreamSource, nothing_there, read_batches
from loaderpool.system.interrupts import InterruptsAllowed, is_of_a_handler
from loaderpool.system.long_work import LongWork
from loaderpool.transport.reports import OURS, describe_failure
from loaderpool.worker.global_rng import KeptGlobals, SavedGlobals
from loaderpool.worker.items import StreamedItems
from loaderpool.worker.jobs import Job, WorkFailed
from loaderpool.worker.lanes import LaneItems
from loaderpool.worker.work import Work

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.transport.payload.captured_state import CapturedState

_LOCK_TIMEOUT_S = 1.0
# Of a smaller batch TensorFlow makes a copy in less time than it takes to find memory that needs none.
_ALIGNED_FROM_BYTES = 4096
_MADE_HERE = int(DeliveryKind.MADE_HERE)
_RUN = 1  # any number whose mark on the stand-in board is not set
# Samples of all such loaders are made one at a time: they share the global generators, which are seeded and put back,
# and those of one loader its `rng` as well. Reentrant, for a function that reads another loader itself.
_alone = threading.RLock()


class LocalEngine:
    """Makes a loader's batches when they are asked for.

    Args:
        checked: what the loader was made with; the payload is used as it is, nothing is pickled.
        first_epoch: the epoch whose first sample is made to find the spec.
        cache: the loader's, closed with this; None: it has none.
    """

    def __init__(self, checked: CheckedArguments, first_epoch: int, cache: SharedCache | None = None) -> None:
        self.cache = cache
        self.captured: CapturedState | None = None  # it works with the objects themselves
        self._stream = checked.stream
        self._first_reading: StreamReading | None = None  # has the item for the probe, and waits for its pass
        self.config, self.plan = checked.config, checked.plan
        self.unit, self.given_spec = checked.unit, checked.given_spec
        self.takes_out: bool = checked.payload["takes_out"]
        self._first_epoch = first_epoch
        board = memoryview(bytearray(BOARD_BYTES)).cast("Q")  # a stand-in: no other process looks at it
        self.work = Work({**checked.payload, "cache": cache}, board, 0, None, catches=Exception)
        self._form: BatchForm | None = None
        self._globals: KeptGlobals  # made with the form
        self._second = SecondLook(self.given_spec, self.plan, self.unit)
        self._is_making = False
        self._way: LongWork | None = None  # told of until generators stand where a pass goes on
        self._forgotten: collections.deque[int] = collections.deque()  # epochs whose generators are to be ended

    def read_ahead(self, is_sure: bool) -> int:
        return 0

    def form(self) -> BatchForm:
        """The batches' form; makes the first sample."""
        with InterruptsAllowed(), _alone:
            if self._form is None:
                self._form = self._find_form()
            return self._form

    def _find_form(self) -> BatchForm:
        self._globals = KeptGlobals()
        with self._globals:
            try:
                self.work.ensure_setup()
                if self._stream is not None:
                    self._put_first(self._stream)
                probe = stated_probe(self.given_spec, self.config, self.plan, self.unit)
                if probe is None:
                    probe = self.work.probe(self._first_epoch)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
        form = with_batches(choose_form(probe, self.given_spec, self.config, self.plan, self.unit), 1)
        self.work.set_form(form, self.given_spec is not None)
        return form

    def spec(self) -> ElementSpec:
        form = self.form()
        with _alone, SavedGlobals():
            if not self._second.is_over:
                try:
                    self._second.end(self.work.probe(self._first_epoch, batch=SECOND))
                except WorkFailed:  # its turn will tell
                    self._second.end(None)
        return self._second.widen(form.spec)

    def begin(
        self, first_epoch: int, limit: int, plan: Plan, taken: Mapping[int, int], lanes: LanePlaces | None = None
    ) -> LocalSubscription:
        """Begin a run. The rest of generators begins where `lanes` says, that of others without `taken`."""
        self.form()
        if self._stream is not None:
            reading = self._reading_for(self._stream, first_epoch, plan)
            return StreamSubscription(self.make, self.forget, first_epoch, plan, taken, reading)
        if plan.lanes:
            if lanes is not None and any(lanes.taken):
                assert isinstance(self.work.items, LaneItems)
                self._way = LongWork(RUNNING_GENERATORS)
                self.work.items.tell_by(self._way)
            return GeneratorSubscription(self.make, self.forget, first_epoch, plan, lanes)
        return IndexedSubscription(self.make, self.forget, first_epoch, plan, limit, taken)

    def _open(self, stream: StreamSource, epoch: int, plan: Plan) -> StreamReading:
        batches = read_batches(stream, plan, window=self.config.shuffle_window, seed=self.config.seed, epoch=epoch)
        return StreamReading(batches, epoch, plan)

    def _reading_for(self, stream: StreamSource, epoch: int, plan: Plan) -> StreamReading:
        """The reading of a pass: the one that the probe began, if it is of this epoch."""
        first, self._first_reading = self._first_reading, None
        if first is not None and stream.serves(first.epoch, epoch, plan, self.config.shuffle_window):
            return first
        return self._open(stream, epoch, plan)

    def _put_first(self, stream: StreamSource) -> None:
        """Have the first items be the probe's; where there are none, the next pass looks again, if it can."""
        if self._first_reading is None:
            self._first_reading = self._open(stream, self._first_epoch, self.plan)
        try:
            self._put(self._first_reading.peek())
        except BaseException:
            if not stream.is_one_shot:
                self._first_reading = None
            raise

    def _put(self, batch: tuple[int, list[Any]] | None) -> None:
        """Have these items be the next job's."""
        if batch is None:
            raise SourceError(nothing_there(self.config.drop_remainder))
        assert isinstance(self.work.items, StreamedItems)
        self.work.items.put(*batch)

    def forget(self, epoch: int) -> None:
        """That epoch is not read any more: its generators are ended, here or by the thread that has the turn now.

        Never blocks; may run in a finalizer, on any thread, in the middle of a generator too.
        """
        if isinstance(self.work.items, LaneItems):
            self._forgotten.append(epoch)
            self._end_forgotten()

    def _end_forgotten(self) -> None:
        if _alone.acquire(blocking=False):
            try:
                if self._is_making:  # a finalizer on this very thread
                    return
                assert isinstance(self.work.items, LaneItems)
                while self._forgotten:
                    with SavedGlobals():
                        self.work.items.forget(self._forgotten.pop())
            finally:
                _alone.release()

    def update(self, changes: dict[str, Any]) -> None:
        """The function looks at the user's own object; only what was made of it before is out of date."""
        self.work.forget_probe()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()

    def cache_counts(self) -> Sequence[int]:
        return NO_COUNTS if self.cache is None else self.cache.counts()

    def _end_way(self) -> None:
        """The place from which a pass goes on is reached, or will not be."""
        way, self._way = self._way, None
        if way is not None:
            assert isinstance(self.work.items, LaneItems)
            self.work.items.tell_by(None)
            way.end()

    def close(self) -> None:
        """Let go of the cache; nothing else is to end."""
        # Another thread may be making a sample; a finalizer must not wait for that for ever.
        if self.cache is not None and _alone.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self.cache.close()
            finally:
                _alone.release()

    def make(
        self, epoch: int, batch: int, number: int, plan: Plan, items: tuple[int, list[Any]] | None = None
    ) -> Delivery:
        """One batch in memory of its own; of a stream from these items, the first of which has this position."""
        form = self._form
        assert form is not None, "a batch before `begin`"
        job = Job(_RUN, epoch, batch, 1, 0, None, 0, plan.start)
        size = form.slot_bytes
        anchor = aligned_empty(size) if size >= _ALIGNED_FROM_BYTES else np.empty(size, np.uint8)
        # In the middle of a batch the function itself has asked for one: what is kept is of the batch around it.
        with InterruptsAllowed(), _alone, SavedGlobals() if self._is_making else self._globals:
            if items is not None:
                self._put(items)
            self._is_making, was_making = True, self._is_making
            try:
                filled = self.work.fill(job, anchor, 0, size)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
            finally:
                self._is_making = was_making
                if self._way is not None:
                    self._end_way()
        if self._forgotten:
            self._end_forgotten()
        if plan.lanes and filled.oversize is None and is_empty(anchor):
            raise LaneEnded
        if filled.oversize is not None:
            anchor = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(anchor, 0)
        delivery = Delivery(form, anchor, number, 1, filled.rows, filled.row_failures)
        delivery.origin = (0, epoch, batch, 1, 0, 0, 0, 0, _MADE_HERE)
        return delivery


class LaneEnded(Exception):
    """The generator whose turn it was has no more."""


class MakeBatch(Protocol):
    """Makes one batch, as `LocalEngine.make` does.

    Raises:
        LaneEnded: the generator whose turn it was has no more.
    """

    def __call__(
        self, epoch: int, batch: int, number: int, plan: Plan, items: tuple[int, list[Any]] | None = None
    ) -> Delivery: ...


@dataclasses.dataclass(eq=False)
class LocalSubscription(ABC):
    """Batches of consecutive epochs, or of one that tells its end itself; `delivery.Subscription` has the contract."""

    make: MakeBatch
    forget: Callable[[int], None]  # called with the first epoch when the consumer has abandoned the rest
    first_epoch: int
    plan: Plan
    # Batches before this one are wanted; of one that tells its end itself it says nothing.
    limit: int = dataclasses.field(init=False, default_factory=int)
    ended_lanes: dict[int, int] = dataclasses.field(init=False, default_factory=dict)
    is_over: bool = dataclasses.field(init=False, default=False)
    _next: int = dataclasses.field(init=False, default=0)

    outlives_interrupts = False  # they come in the user's code, in a generator's, say

    @abstractmethod
    def take(self) -> Delivery:
        """The next batch."""

    @property
    def is_ready(self) -> bool:
        return False

    @property
    def is_at_end(self) -> bool:
        return False

    def extend(self, limit: int) -> None:
        """More batches are wanted."""
        self.limit = limit

    def end(self) -> None:
        """The consumer abandoned the rest."""
        self.is_over = True
        self.forget(self.first_epoch)


@dataclasses.dataclass(eq=False)
class IndexedSubscription(LocalSubscription):
    """Of items that are had by index."""

    limit: int
    taken: Mapping[int, int]  # ranges of numbers that are left out: the first of each, and how many

    def take(self) -> Delivery:
        """The next batch."""
        number = self._next + self.taken.get(self._next, 0)  # ranges never touch each other
        if self.is_over or number >= self.limit:
            raise StopIteration
        self._next = number + 1
        epoch, batch = divmod(number, self.plan.batches_per_epoch)
        return self.make(self.first_epoch + epoch, batch, number, self.plan)


class StreamReading:
    """One pass over a stream, batch by batch.

    Args:
        batches: positions of first items, and the items.
        epoch: the pass.
        plan: of its batches.
    """

    def __init__(self, batches: Iterator[tuple[int, list[Any]]], epoch: int, plan: Plan) -> None:
        self._batches, self.epoch, self._plan = batches, epoch, plan
        self._seen: list[tuple[int, list[Any]]] = []  # at most one: read, and not taken
        self._taken = 0
        self.is_over = False
        self._make_error: Callable[[], Exception] | None = None  # what it ended with, for who asks again

    def peek(self) -> tuple[int, list[Any]] | None:
        """What `take` will give."""
        if self._make_error is not None:
            raise self._make_error()
        if not self._seen and not self.is_over:
            try:
                self._seen = list(itertools.islice(self._batches, 1))
            except Exception as error:
                if type(error) in OURS or is_of_a_handler(error):
                    raise
                failure = describe_failure(error, epoch=self.epoch, worker=None)
                position = self._plan.start_after(self.epoch, self._taken)
                self._make_error = functools.partial(source_error, failure, position)
                raise source_error(failure, position, error) from error
        self.is_over = not self._seen
        return self._seen[0] if self._seen else None

    def take(self) -> tuple[int, list[Any]] | None:
        """The next batch; None: the stream is at its end.

        Raises:
            SourceError: reading the stream raised.
        """
        batch = self.peek()
        self._seen = []
        self._taken += 1
        return batch


@dataclasses.dataclass(eq=False)
class StreamSubscription(LocalSubscription):
    """Of a stream: its items are read here, batch by batch."""

    taken: Mapping[int, int]  # as of `IndexedSubscription`
    reading: StreamReading

    def take(self) -> Delivery:
        """The next batch."""
        while not self.is_over:
            items = self.reading.take()
            if items is None:
                break
            number, self._next = self._next, self._next + 1
            if not any(first <= number < first + count for first, count in self.taken.items()):
                return self.make(self.first_epoch, number, number, self.plan, items)
        raise StopIteration

    @property
    def is_at_end(self) -> bool:
        return self.reading.is_over


@dataclasses.dataclass(eq=False)
class GeneratorSubscription(LocalSubscription):
    """Of generators that take turns."""

    places: LanePlaces | None  # where the generators go on; None: they begin

    def __post_init__(self) -> None:
        self._places = self.places or LanePlaces((0,) * self.plan.lanes)
        self._next = self._places.begin_at
        self.ended_lanes = {lane: self._places.taken[lane] for lane in self._places.over}

    def take(self) -> Delivery:
        """The next batch, of the generator whose turn it is."""
        while not self.is_over and not self.is_at_end:
            number, self._next = self._next, self._next + 1
            batch, lane = divmod(number, self.plan.lanes)
            if lane in self.ended_lanes or batch < self._places.taken[lane]:
                continue
            try:
                return self.make(self.first_epoch, number, number, self.plan)
            except LaneEnded:
                self.ended_lanes[lane] = batch
        raise StopIteration

    @property
    def is_at_end(self) -> bool:
        return len(self.ended_lanes) == self.plan.lanes
