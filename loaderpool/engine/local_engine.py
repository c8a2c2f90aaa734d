"""`LocalEngine`: makes one loader's batches in the main process (`workers=0`).

It makes the same batches as workers do, with the same code, so that a debugger can be used.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.engine.delivery import FIRST_EPOCH, CheckedArguments, Delivery, with_classes
from loaderpool.engine.engine_statistics import EngineStatistics
from loaderpool.engine.failures import sample_error, source_error
from loaderpool.errors import SourceError, closed_error
from loaderpool.memory.board import BOARD_BYTES
from loaderpool.memory.layout import BatchForm, aligned_empty, is_empty
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.plan.batches import Plan
from loaderpool.plan.places import LanePlaces, Position, first_number
from loaderpool.sources.recognise import check_length, length_of
from loaderpool.sources.stream import StreamSource, nothing_there, read_batches
from loaderpool.supervisor.forms import choose_form, with_batches
from loaderpool.system.interrupts import FailuresIgnored, InterruptsAllowed, is_of_a_handler
from loaderpool.transport.messages import Ticket
from loaderpool.transport.payload.generators import MOST_ENTERED_HERE, Registry
from loaderpool.transport.reports import OURS, describe_failure
from loaderpool.worker.own_process import KeptGlobals, SavedGlobals
from loaderpool.worker.probe import probe
from loaderpool.worker.tickets import Progress, WorkFailed
from loaderpool.worker.work import Work

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachedOf
    from loaderpool.cache.store import SharedCache
    from loaderpool.config import LoaderConfig
    from loaderpool.plan.generators import CapturedGenerators
    from loaderpool.transport.payload.glance import Glance

_LOCK_TIMEOUT_S = 1.0  # maximum wait of `close`, because a finalizer must not wait forever
# TensorFlow copies a smaller batch faster than an aligned buffer for it is allocated.
_ALIGNED_FROM_BYTES = 4096
_MADE_HERE = int(DeliveryKind.MADE_HERE)
_RUN = 1  # run number of all tickets here; the stand-in board has no mark for it
# Lock for making samples, one at a time over all loaders. Their samples share the global random
# generators, which are seeded and restored. Samples of one loader also share `rng`. Reentrant,
# because a function may read another loader.
_alone = threading.RLock()


class FirstSample:
    """The first sample: the form of the batches, and the objects that it was made of.

    Attributes:
        form: Form of the batches; None: the sample was not made yet.
    """

    def __init__(self) -> None:
        self.form: BatchForm | None = None
        # the objects, if the sample was made before a pass started
        self._glance: Glance | None = None
        self._begins = False  # a pass is starting, and has the present objects

    def note(self, form: BatchForm, checked: CheckedArguments) -> None:
        """Note that the sample was made now, of the loader's present objects."""
        self.form = form
        if not self._begins:
            # Imported here, because the form is seldom requested before a pass.
            from loaderpool.transport.payload.glance import Glance

            self._glance = Glance(checked.payload.roots(checked.stream), frozenset())

    def start_pass(self) -> Glance | None:
        """Note that a pass is starting. `end_start` pairs with this call.

        Returns:
            The objects that the sample was made of; None: they are the present ones, or an earlier
            pass has compared them.
        """
        glance, self._glance, self._begins = self._glance, None, True
        return glance

    def end_start(self) -> None:
        """Note that the pass has started."""
        self._begins = False


class LocalEngine:
    """Makes a loader's batches when they are taken. Has the methods of `contracts.Engine`.

    Attributes:
        checked: Arguments of the loader.

    Args:
        checked: Arguments of the loader. The payload is used directly, without pickling.
        cache: Cache of the loader, which `close` closes; None: it has none.
        generators: Random generators of the user's objects; None: they are searched.
    """

    def __init__(
        self,
        checked: CheckedArguments,
        cache: SharedCache | None = None,
        generators: Registry | None = None,
    ) -> None:
        self.checked, self.plan, self.cache = checked, checked.plan, cache
        self._readings: StreamReadings | None = None
        # a stand-in for the shared board, which no other process reads
        board = memoryview(bytearray(BOARD_BYTES)).cast("Q")
        self._globals = KeptGlobals()
        self.generators = generators or Registry(
            checked.payload.roots(checked.stream), MOST_ENTERED_HERE
        )
        payload = dataclasses.replace(
            checked.payload, cache=cache, generators=self.generators.pairs
        )
        self.work = Work(payload, Progress(board, 0, None, Exception), watch=self._globals)
        if checked.stream is not None:
            self._readings = StreamReadings(checked.stream, checked.config, checked.plan)
            checked.stream.captured = self.work.calls.seeding.captured
        self._first = FirstSample()
        # Objects that determine cached results. A call may change its own objects, so this is
        # renewed after each batch.
        self._cached_of: Glance | None = None
        if cache is not None:
            # Imported here, because few loaders have a cache.
            from loaderpool.transport.payload.glance import Glance

            with InterruptsAllowed():
                cache.identify(checked.payload.cached_of)
            parts = checked.payload.roots(checked.stream)
            self._cached_of = Glance(
                {name: parts[name] for name in parts if name != "augment"}, frozenset()
            )
        self._length = self._length_seen = checked.length  # the source may change later
        self._is_making = False
        # epochs whose generators are closed before the next batch is made
        self._forgotten: collections.deque[int] = collections.deque()
        self.is_closed = False

    def read_ahead(self) -> int:
        return 0

    def form(self, plan: Plan | None = None) -> BatchForm:
        """Return the form of the batches. The first call makes the first sample."""
        with InterruptsAllowed(), _alone:
            if self._first.form is None:
                if self.is_closed:
                    raise closed_error()
                first = self.checked.plan_of_first(plan)
                self._first.note(self._find_form(first), self.checked)
            assert self._first.form is not None
            return self._first.form

    def _find_form(self, plan: Plan) -> BatchForm:
        with SavedGlobals(), self.captured_kept(), self._cache_watched():
            try:
                self.work.ensure_setup()
                if self._readings is not None:
                    self._readings.put_first(self._put)
                found = probe(self.work, FIRST_EPOCH, plan)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
        given_spec, config, unit = self.checked.given_spec, self.checked.config, self.checked.unit
        form = choose_form(found, given_spec, config, self.plan, unit)
        form = with_classes(with_batches(form, 1))
        self.work.set_form(form, given_spec is not None)
        return form

    def begin(self, place: Position, limit: int, plan: Plan) -> LocalRun:
        """Start a run. Its `end` pairs with this call."""
        self.form(plan)
        if self.is_closed:
            raise closed_error()
        self._first.end_start()
        reading = None
        if self._readings is not None:
            reading = self._readings.for_pass(place.epoch, plan.after(place.start))
        return LocalRun(self, place, limit, plan, reading)

    def _put(self, batch: tuple[int, list[Any]] | None) -> None:
        """Pass these items to the next ticket."""
        if batch is None:
            raise SourceError(nothing_there(self.plan))
        first, items = batch
        self.work.items.put(range(first, first + len(items)), items)

    def reseed(self) -> None:
        """Seed the random generators by their present keys."""
        self.work.seed_captured(self.generators.pairs)
        if self._readings is not None:
            self._readings.stream.captured = self.work.calls.seeding.captured
            self._readings.forget_first()

    def captured_kept(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that restores the generators of the user's objects on exit."""
        captured = self.work.calls.seeding.captured
        return _NOTHING if captured is None else _restored(captured)

    def forget(self, epoch: int) -> None:
        """Request that the generators of an epoch be closed, because it is not read any more.

        They are closed before the next batch is made, or with the loader. Called by any thread, and
        by finalizers, also while a generator runs.
        """
        if self.plan.lanes:
            self._forgotten.append(epoch)

    def refresh(self, is_whole: bool = False) -> None:
        """Drop the results of the first sample if objects have changed since. A pass is starting.

        All other batches use the user's present objects anyway.

        Args:
            is_whole: Drop these results without a comparison.
        """
        self.work.calls.reader.look_up()
        source, promised = self.checked.payload.source, self._length
        # Lost items are an error at each pass. Additional ones are a warning, once.
        if promised is not None and (
            (length := length_of(source)) != self._length_seen or length < promised
        ):
            self._length_seen = length
            check_length(source, promised)
        if self.generators.look_again(self.work.calls.seeding.made):
            self.reseed()
        glance = self._first.start_pass()
        if is_whole or (glance is not None and glance.changes()):
            self.work.calls.kept.clear()
            self.work.items.close()
            if self._readings is not None:
                self._readings.forget_first()

    def _cache_watched(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager for calls whose results are cached.

        A call may change its own objects.

        Raises:
            CacheError: On entry, if functions or source have changed since the last such call.
        """
        if self.cache is None or self._cached_of is None:
            return _NOTHING
        return _watched(self.cache, self._cached_of, self.checked.payload.cached_of)

    def warn_of_replay(self) -> None:
        """Do nothing, because the objects are the same."""

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(notes=self.generators.notes())

    def end_passes(self) -> None:
        """Close the readings of all passes. They deliver no more batches. Runs the user's code.

        Called by `LoaderCore.close`.
        """
        self.is_closed = True
        # Another thread may be making a sample, so the wait has a limit.
        if not _alone.acquire(timeout=_LOCK_TIMEOUT_S):
            return
        try:
            # On this thread, because the lock is reentrant: the user's function closes its loader.
            if self._is_making:
                return
            with InterruptsAllowed(), SavedGlobals(), self.captured_kept():
                self.work.items.close()
                self.work.calls.event_loop.close()
                if self._readings is not None:
                    self._readings.close()
        finally:
            _alone.release()

    def close(self) -> None:
        """Make no more batches, and close the cache. Called by any thread, and by finalizers."""
        self.is_closed = True
        # Another thread may be making a sample, and a finalizer must not wait for that forever.
        if self.cache is not None and _alone.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self.cache.close()
            finally:
                _alone.release()

    def make(
        self,
        epoch: int,
        batch: int,
        number: int,
        plan: Plan,
        items: tuple[int, list[Any]] | None = None,
    ) -> Delivery | None:
        """Make one batch, in its own memory.

        Args:
            epoch: Epoch of the batch.
            batch: Index in the epoch, or in its remainder.
            number: Number of the batch, counted through all epochs.
            plan: Plan of the epoch, or of its remainder.
            items: Position of the first item and the items, if the source is a stream.

        Returns:
            The batch, or None if its generator has ended.
        """
        form = self._first.form
        assert form is not None, "a batch before `begin`"
        ticket = Ticket(0, 0, _RUN, epoch, batch, plan.start)
        if self._forgotten and not self._is_making:
            with InterruptsAllowed(), _alone, SavedGlobals(), self.captured_kept():
                while self._forgotten:
                    self.work.items.forget(self._forgotten.pop())
        size = form.slot_bytes
        if form.fixed is not None and not form.has_equal_batches:
            size = form.fixed.bytes_of(plan.rows(epoch, batch))
        anchor = aligned_empty(size) if size >= _ALIGNED_FROM_BYTES else np.empty(size, np.uint8)
        # While a batch is made, the function may request another one. `_globals` has saved the
        # state before the outer batch, and must not be entered again.
        globals_kept = SavedGlobals() if self._is_making else self._globals
        with InterruptsAllowed(), _alone, globals_kept, self.captured_kept():
            if items is not None:
                self._put(items)
            if plan.lanes:  # generators draw outside the watched call, so the snapshot is outdated
                self._globals.seen = None
            self._is_making, was_making = True, self._is_making
            try:
                with self._cache_watched():
                    filled = self.work.fill(ticket, anchor, 0, size, plan)
            except WorkFailed as error:
                raise sample_error(error.failure, error.error) from error.error
            finally:
                self._is_making = was_making
        if plan.lanes and filled.oversize is None and is_empty(anchor):
            return None
        rows = filled.rows if form.item_spec is None else plan.row_plan.rows(epoch, batch)
        delivery = Delivery(number, 1, rows, row_failures=filled.row_failures)
        if filled.oversize is None:
            delivery.arrays = filled.arrays
        else:
            anchor = aligned_empty(filled.oversize.nbytes)
            filled.oversize.write(anchor, 0)
        delivery.form, delivery.anchor = form, anchor
        delivery.origin = (0, epoch, batch, 1, _MADE_HERE)
        return delivery


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def _watched(cache: SharedCache, glance: Glance, made_of: CachedOf) -> Iterator[None]:
    if glance.changes():
        cache.check(made_of)
    try:
        yield
    finally:
        glance.renew()


@contextlib.contextmanager
def _restored(captured: CapturedGenerators) -> Iterator[None]:
    restore = captured.save()
    try:
        yield
    finally:
        restore()


class StreamReading:
    """Pass over a stream, batch by batch.

    Each batch is a pair: the position of its first item, and its items.

    Args:
        batches: The batches, as `read_batches` yields them.
        epoch: Epoch of the pass.
        plan: Plan of the pass.
    """

    def __init__(
        self, batches: Generator[tuple[int, list[Any]], None, None], epoch: int, plan: Plan
    ) -> None:
        self._batches, self.epoch, self._plan = batches, epoch, plan
        # the batch that `peek` has read, and that was not taken
        self._next: tuple[int, list[Any]] | None = None
        self._taken = 0
        self.is_over = False

    def peek(self) -> tuple[int, list[Any]] | None:
        """Return the batch that `take` will return.

        Raises:
            SourceError: Reading the stream raised.
        """
        if self._next is None and not self.is_over:
            try:
                self._next = next(self._batches, None)
            except Exception as error:
                if type(error) in OURS or is_of_a_handler(error):
                    raise
                failure = describe_failure(error, epoch=self.epoch, worker=None)
                position = self._plan.start_after(self.epoch, self._taken)
                assert isinstance(position, int)
                raise source_error(failure, position, error) from error
        self.is_over = self._next is None
        return self._next

    def close(self) -> None:
        """Stop reading. If a thread is reading, its batch is dropped, and the stream stays open."""
        self.is_over = True
        # The user's `finally` may fail. `close` also fails while another thread is reading.
        with FailuresIgnored():
            self._batches.close()

    def take(self) -> tuple[int, list[Any]] | None:
        """Return the next batch, or None if the stream has ended. Raises as `peek`."""
        batch, self._next = self.peek(), None
        self._taken += 1
        return batch


class StreamReadings:
    """Readings of a loader's stream. The probe's is the first; it is kept until a pass takes it.

    Args:
        stream: The source.
        config: Settings of the loader.
        plan: Plan of the loader.
    """

    def __init__(self, stream: StreamSource, config: LoaderConfig, plan: Plan) -> None:
        self.stream, self._config, self._plan = stream, config, plan
        self._first: StreamReading | None = None
        self._open: weakref.WeakSet[StreamReading] = weakref.WeakSet()

    def _read(self, epoch: int, plan: Plan) -> StreamReading:
        window, seed = self._config.shuffle_window, self._config.seed
        batches = read_batches(self.stream, plan, window=window, seed=seed, epoch=epoch)
        reading = StreamReading(batches, epoch, plan)
        self._open.add(reading)
        return reading

    def for_pass(self, epoch: int, plan: Plan) -> StreamReading:
        """Return the reading for a pass: the probe's, if it can serve the pass, or a new one."""
        first, self._first = self._first, None
        window = self._config.shuffle_window
        if first is not None and self.stream.serves(first.epoch, epoch, plan, window):
            return first
        return self._read(epoch, plan)

    def put_first(self, put: Callable[[tuple[int, list[Any]] | None], None]) -> None:
        """Pass the stream's first items to the probe.

        If there are none, the next pass reads the stream again, if that is possible.
        """
        if self._first is None:
            self._first = self._read(FIRST_EPOCH, self._plan)
        try:
            put(self._first.peek())
        except BaseException:
            self.forget_first()
            raise

    def forget_first(self) -> None:
        """Read the stream again for the next pass, if that is possible."""
        if not self.stream.is_one_shot:
            self._first = None

    def close(self) -> None:
        """Close all readings. Runs the user's code."""
        for reading in list(self._open):
            reading.close()


class LocalRun:
    """Batches from one position on. Has the methods of `contracts.Run`."""

    outlives_interrupts = False  # an interrupt may stop the user's code, such as a generator
    is_ready = False  # `take` makes the batch
    is_current = True

    def __init__(
        self,
        engine: LocalEngine,
        place: Position,
        limit: int,
        whole: Plan,
        reading: StreamReading | None,
    ) -> None:
        self._plan = plan = whole.after(place.start)
        self._engine, self._epoch, self.limit = engine, place.epoch, limit
        # Number of the first batch. `_taken`, `_places` and `_next` count from this number, or for
        # generators from the epoch's start.
        self._first = first_number(whole, place)
        self._taken, self._reading = place.taken, reading
        self._places = place.lanes or LanePlaces((0,) * plan.lanes)
        self.ended_lanes = {lane: self._places.taken[lane] for lane in self._places.over}
        self._next = self._places.begin_at if plan.lanes else 0
        # The end is known only when it is reached, and `limit` has no effect.
        self._tells_end = reading is not None or plan.lanes > 0
        self.is_over = False

    def take(self) -> Delivery:
        """Make the next batch and return it."""
        plan, items = self._plan, None
        if self._engine.is_closed:
            raise closed_error()
        while not self.is_over and not self.is_at_end:
            number = self._next
            if self._reading is not None:
                items = self._reading.take()
                if items is None:
                    break
            elif self._first + number >= self.limit and not self._tells_end:
                break
            self._next = number + 1
            if number in self._taken or (plan.lanes and self._is_left_out(number)):
                continue
            epoch, batch = divmod(number, plan.batches_per_epoch)
            delivery = self._engine.make(
                self._epoch + epoch, batch, self._first + number, plan, items
            )
            if delivery is not None:
                return delivery
            self.ended_lanes[number % plan.lanes] = number // plan.lanes
        raise StopIteration

    def _is_left_out(self, number: int) -> bool:
        batch, lane = divmod(number, self._plan.lanes)
        return lane in self.ended_lanes or batch < self._places.taken[lane]

    @property
    def is_at_end(self) -> bool:
        if self._reading is not None:
            return self._reading.is_over
        return self._plan.lanes > 0 and len(self.ended_lanes) == self._plan.lanes

    def extend(self, limit: int) -> None:
        """Allow batches before the number `limit` to be made."""
        self.limit = limit

    def end(self) -> None:
        """Abandon the remaining batches."""
        self.is_over = True
        self._engine.forget(self._epoch)
