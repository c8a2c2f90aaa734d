"""One loader's batches out of a pool: its function and source as they are sent, its form, its runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loaderpool.core.delivery import CheckedArguments, DeliveryCounts
from loaderpool.core.messages import End, Ended, Found, Load, Loaded, LoaderFailed, Look
from loaderpool.core.pool import WorkerPool
from loaderpool.core.run import PoolRun, made_of
from loaderpool.core.session import Session
from loaderpool.errors import LoaderpoolError, PoolBrokenError, SourceError, closed_error, warn
from loaderpool.memory.arena import Extent
from loaderpool.memory.layout import BatchForm
from loaderpool.plan.order import Position
from loaderpool.sources.stream import nothing_there
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.transport.payload.captured_state import CapturedState
from loaderpool.transport.payload.module_versions import note_modules, version_warnings
from loaderpool.transport.payload.ship import Shipment, named_parts, place, put_shipment, ship
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.core.channel import Received
    from loaderpool.core.engine_statistics import EngineStatistics
    from loaderpool.core.stream.feed import Feed, StreamFeeds

_LOCK_TIMEOUT_S = 1.0


class PoolEngine:
    """Makes a loader's batches in a pool's workers.

    Attributes:
        captured: what was pickled, to be compared; None: nothing was.
        cache: the loader's; None: it has none.

    Args:
        pool: whose workers make them.
        checked: what the loader was made with; the payload is pickled here, once.
        cache: the loader's, closed with this; None: it has none.

    Raises:
        UnpicklableError: function or source cannot travel.
        MemoryLimitError: no shared memory for what they hold.
    """

    def __init__(self, pool: WorkerPool, checked: CheckedArguments, cache: SharedCache | None = None) -> None:
        self.pool = pool
        self.config, self.plan = checked.config, checked.plan
        # What a supervisor needs to know that does not load the payload.
        self.settings = {name: checked.payload[name] for name in ("config", "plan", "given_spec")}
        self.settings["batch_fn"] = None if checked.payload["batch_fn"] is None else True
        self.cache = cache
        self.runs: dict[int, PoolRun] = {}
        self.counts = DeliveryCounts()
        self.lent: list[dict[int, None]] = []  # of each run: slots that have views
        self.is_closed = self._has_ended_supervisor = False
        self.known_form: BatchForm | None = None
        self._found: Found | None = None  # that had it
        self.was_loaded = False
        self.failure: Callable[[], LoaderpoolError] | None = None  # makes the error that no batch can be made
        self._may_pass = self._was_told = False  # it may go well another time; a consumer was told of it
        self._is_after_hook = checked.has_epoch_begin  # the first sample is made after it
        self._loads = 0  # Loaded and failed ones that are still to come
        self._sent: list[tuple[list[Extent], int, int]] = []  # updates, the latest of which counts
        if cache is not None:
            cache.count_in(pool.arena, pool.lock)
        self.feeds: StreamFeeds | None = None
        stream = checked.stream
        with InterruptsAllowed():  # pickling runs code of the user's, and may take long
            for_workers = {**checked.payload, "cache": None}  # a process that reads it makes its own
            if stream is None:
                shipment = ship(for_workers)
            else:
                from loaderpool.core.stream.feed import StreamFeeds  # which few loaders need
                from loaderpool.core.stream.reader import ship_beside

                shipment, for_reader = ship_beside(for_workers, stream, self.config, self.plan, pool.hands_over_files)
        modules = shipment.modules
        if stream is not None and isinstance(for_reader, Shipment):
            modules |= for_reader.modules
        if not pool.hands_over_files:
            note_modules(modules, pool.modules)
        for warning in shipment.warnings:
            warn(warning)
        for text in version_warnings(modules, pool.modules):
            warn(text)
        self._without, self._packed_items = shipment.without, shipment.packed_items
        with pool.lock:
            self.number = pool.take_number()
            self._placement = place(shipment, pool.hands_over_files)
            cache_plan = None if cache is None else cache.plan
            self._extents, *self._place = put_shipment(pool.arena, shipment, self._placement, cache_plan)
        try:
            if stream is not None:
                with pool.lock:
                    self.feeds = StreamFeeds(self, stream, for_reader)
            with pool.lock:
                pool.loaders[self.number] = pool.session.listeners[self.number] = self
                pool.session.catch_up()  # what was said of other loaders: the channel shall never be full of it
                self.load(pool.session)
            if self.feeds is not None:
                self.feeds.begin()
        except BaseException:
            self.close()
            raise
        compared = dict(named_parts(checked.payload))
        if self.feeds is not None and not self.feeds.why_on_thread:
            assert stream is not None
            compared["source"] = stream.items
        self.captured: CapturedState | None = CapturedState(compared, shipment.without)

    def form(self) -> BatchForm:
        """The batches' form. Blocks until the first sample has been made."""
        self.pool.check_owner()  # first: in a fork a thread that is not there may hold the lock
        if self.known_form is None:
            with InterruptsHeld():
                with self.pool.lock:
                    if self._was_told and self.feeds is not None and self._why_no_item() is not None:
                        self.feeds.begin_again()
                    if self._was_told and self._may_pass:  # a first sample that failed is tried again in the next pass
                        self.failure, self._may_pass = None, False
                        self._look()
                    elif self._is_after_hook:
                        self._is_after_hook = False
                        self._look()
                while not self._is_decided():
                    self.pool.session.wait(self._is_decided)
                with self.pool.lock:
                    if self.known_form is None:
                        self._was_told = True
                        self.check()
        self.pool.say_warnings()
        assert self.known_form is not None
        return self.known_form

    def _is_decided(self) -> bool:
        """Whether the form is known, or no batch can be made."""
        is_over = self.is_closed or self.pool.is_closed or self.failure is not None
        return is_over or self.known_form is not None or self._why_no_item() is not None

    def _why_no_item(self) -> Callable[[], LoaderpoolError] | None:
        """What makes the error that the first pass over a stream had no item; None: it had, or may yet have."""
        first = None if self.feeds is None else self.feeds.first
        if first is None or first.end is None or first.made:
            return None
        return first.make_error or functools.partial(SourceError, nothing_there(self.plan))

    def read_ahead(self) -> int:
        """How many batches of an epoch that may never be asked for it may well make: enough to keep workers busy."""
        return self.pool.workers_wanted + 1

    def begin(self, place: Position, limit: int) -> PoolRun:
        """Begin a run there.

        Args:
            place: where its first batch is; the rest of an epoch is a run of its own.
            limit: batches before this one are wanted, or may be made ahead; of a stream as many as are read.
        """
        self.form()
        with self.pool.lock:
            self.pool.check_usable()
            self.check()
            feed = None if self.feeds is None else self.feeds.of_pass(place.epoch, self.plan.after(place.start))
            run = PoolRun(self, place, limit, feed)
            try:
                run.begin()
                if feed is not None and not feed.is_started:
                    feed.start()
            except BaseException:
                run.end()
                raise
            return run

    def update(self, changes: dict[str, Any]) -> None:
        """Batches of runs begun from now on see these attributes of the source's object changed."""
        with self.pool.lock:
            pool = self.pool
            extents, offset, nbytes = put_shipment(pool.arena, ship(changes, without=self._without))
            self._sent.append((extents, offset, nbytes))
            self._loads += 1
            pool.session.send(Load(self.number, offset, nbytes, is_change=True))

    def statistics(self) -> EngineStatistics:
        """What it knows for `Loader.statistics()`, but for its cache."""
        from loaderpool.core.engine_statistics import pool_statistics  # few loaders are asked for them

        return pool_statistics(self.pool, self.counts, self.slots_lent, self._notes())

    @property
    def slots_lent(self) -> int:
        """How many slots have views, of all runs."""
        self.lent = [each for each in self.lent if each]
        return sum(map(len, self.lent))

    def _notes(self) -> tuple[str, ...]:
        """What is to be said of how function and source have travelled."""
        feeds = self.feeds
        placements = [self._placement] if feeds is None else [self._placement, feeds.placement]
        shared, packed = sum(each.shared_bytes for each in placements), self._packed_items
        notes = [f"{shared:,} bytes of arrays are shared with the workers and not copied"] if shared else []
        notes += [f"copied into shared memory: {reason}" for each in placements for reason in each.copied_because]
        if packed:
            notes.append(f"{packed:,} items of the source were packed into bytes that the workers share")
        if feeds is not None:
            why = feeds.why_on_thread
            where = f"on a thread of the main process: {why}" if why else "in a separate process"
            notes.append(f"the stream is read {where}")
        return tuple(notes)

    def close(self) -> None:
        """Unload the loader from its pool. Runs in: any thread, also in a finalizer."""
        pool = self.pool
        if self.is_closed or pool.is_foreign:
            return
        self.is_closed = True
        self.on_close()
        if pool.lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                for run in [*self.runs.values()]:
                    run.end()
                pool.loaders.pop(self.number, None)
                if pool.is_closed:
                    self._forget()
                else:  # it listens until no process looks at it any more
                    pool.session.send(End(self.number))
            finally:
                pool.lock.release()

    # ---- what a supervisor is told

    def load(self, session: Session) -> None:
        """Tell this supervisor of the loader, unless its import ends supervisors. The pool's lock is held."""
        if self._has_ended_supervisor or self.is_closed:
            return
        files = list(self._placement.descriptors)  # in the order in which `Payloads.load` takes them
        if self.cache is not None and self.cache.descriptor >= 0:
            files.append(self.cache.descriptor)
        offset, nbytes = self._place
        session.send(Load(self.number, offset, nbytes), files)
        self._loads = 1
        for _, offset, nbytes in self._sent[-1:]:
            self._loads += 1
            session.send(Load(self.number, offset, nbytes, is_change=True))
        if self._found is not None:
            session.send(self._found)
        elif not self._is_after_hook:
            self._look()

    def _look(self) -> None:
        """Have the first sample made; of a stream, once its item is there."""
        if self.feeds is None:
            self.pool.session.send(Look(self.number, 0))
        elif (first := self.feeds.first) is not None and first.made and self.known_form is None:
            self.pool.session.send(Look(self.number, first.offset))

    # ---- session.Listener; the pool's lock is held

    def hear(self, received: Received) -> None:
        """Take in what is said of the loader."""
        message = received.message
        if isinstance(message, Loaded):
            self._loads, self.was_loaded = self._loads - 1, True
            if not self._loads:
                for extents, _, _ in self._sent[:-1]:
                    self._give_back(extents)
                del self._sent[:-1]
        elif isinstance(message, LoaderFailed):
            from loaderpool.core.failures import may_pass

            self._may_pass, self._was_told = may_pass(message.error), False
            self.failure = functools.partial(made_of, message.error)
        elif isinstance(message, Ended):
            self.pool.session.listeners.pop(self.number, None)
            self._forget()
        elif isinstance(message, Found):
            self.known_form, _ = receive(message.content)
            self._found = message

    def on_load_died(self, how: str) -> None:
        """A supervisor died while it imported the function."""
        text = (
            f"The supervisor process crashed ({how}) while importing the modules of the function and the source. It is "
            "not restarted, because the import would crash the next one too. Import the module in setup= or in the "
            "function instead. If the machine ran out of memory, capture less data."
        )
        self.failure = functools.partial(PoolBrokenError, text)
        self._has_ended_supervisor = True
        self.on_close()  # what its stream still has is not wanted any more

    def on_close(self) -> None:
        """The pool is closed."""
        if self.feeds is not None:
            self.feeds.stop()

    # ---- the items of a stream; the pool's lock is held

    def on_run_ended(self, number: int) -> None:
        """No worker looks at what this run needs any more."""
        self.runs.pop(number, None)
        self.pool.session.listeners.pop(number, None)
        if self.feeds is not None and self.known_form is not None:
            self.feeds.free({id(run.feed) for run in self.runs.values()})

    def on_feed_news(self, feed: Feed) -> None:
        """A feed has another batch, or its end. Runs in: its thread."""
        assert self.feeds is not None
        if feed is self.feeds.first and feed.made == 1 and feed.end is None and not self.is_closed:
            self._look()
        for run in [*self.runs.values()]:
            if run.feed is feed and not run.is_over:
                run.fed(feed)

    def check(self) -> None:
        """Raise if no batch can be made: it, or its pool, was closed, or something has failed."""
        if self.is_closed or self.pool.is_closed:
            raise closed_error()
        if (make_error := self.failure or self._why_no_item()) is not None:
            raise make_error()

    def _give_back(self, extents: list[Extent]) -> None:
        for extent in extents:
            self.pool.arena.give_back(extent)

    def _forget(self) -> None:
        if self.feeds is not None:
            self.feeds.free_all()
        self._give_back(self._extents)
        for extents, _, _ in self._sent:
            self._give_back(extents)
        self._extents, self._sent = [], []
        self._placement.files.clear()
        if self.cache is not None:
            self.cache.close(clears=True)
