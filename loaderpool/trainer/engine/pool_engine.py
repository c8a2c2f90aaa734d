"""One loader's batches out of a pool: its runs, and what the supervisor tells about it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.cache.setting import NO_COUNTS
from loaderpool.element.spec import ElementSpec
from loaderpool.errors import MemoryLimitError, SourceError, closed_error
from loaderpool.memory.batch_form import BatchForm
from loaderpool.memory.extents import Extent
from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import LanePlaces
from loaderpool.sources.stream import nothing_there
from loaderpool.supervisor.scheduler import tickets_per_worker
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.engine.batch_layout import BatchLayout
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.engine.engine_statistics import EngineStatistics, shipped, with_counts
from loaderpool.trainer.engine.probing import Probing
from loaderpool.trainer.engine.run_context import DeliveryCounts, EngineFailure, LiveRun, RunContext
from loaderpool.trainer.engine.subscription import PoolSubscription
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.warnings import warn_of_data
from loaderpool.transport.messages import Control, Notice, Words, join32
from loaderpool.transport.payload.captured_state import CapturedState
from loaderpool.transport.payload.ship import Placement, Shipment, named_parts, place, put_shipment, ship
from loaderpool.transport.pipes import Attachment, read_attachment

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.trainer.stream.feed import Ahead, Feed
    from loaderpool.trainer.stream.feeds import StreamFeeds


class _Update(NamedTuple):
    extents: list[Extent]
    offset: int
    nbytes: int


class SourceUpdates:
    """One loader's changes of attributes. Each has all that were ever changed, and is kept until the next was read.

    The caller holds the session's lock.

    Args:
        session: whose arena and pipe.
        loader: the loader's number.
        without: `Shipment.without` of the payload, so that the changes find the classes that it brought.
    """

    def __init__(self, session: EngineSession, loader: int, without: frozenset[str]) -> None:
        self._session, self._loader, self._without = session, loader, without
        self._sent: list[_Update] = []  # the oldest first
        self._is_read = False  # of the oldest, by the supervisor that runs now

    def send(self, changes: dict[str, Any]) -> None:
        """Send changes: `set` has new values by attribute, `deleted` names attributes that are gone."""
        self.send_shipped(ship(changes, without=self._without))

    def send_shipped(self, shipment: Shipment) -> None:
        """Send changes as they are to travel."""
        self._sent.append(_Update(*put_shipment(self._session.arena, shipment)))
        self._session.send(Control.UPDATE, self._loader, *self._sent[-1][1:])

    def was_read(self) -> None:
        """The supervisor has taken in the oldest that it had not; the one before it is given back."""
        if self._is_read:
            self._give_back(1)
        self._is_read = bool(self._sent)

    def repeat(self) -> None:
        """Another supervisor has the loader as it was made: send again what was changed since."""
        self._give_back(len(self._sent) - 1)
        self._is_read = False
        for update in self._sent:
            self._session.send(Control.UPDATE, self._loader, *update[1:])

    def give_back_all(self) -> None:
        """The loader is unloaded."""
        self._give_back(len(self._sent))

    def _give_back(self, count: int) -> None:
        for _ in range(count):
            for extent in self._sent.pop(0).extents:
                self._session.arena.give_back(extent)


class LoadMessage:
    """Has a supervisor load a loader; one that takes another's place is told the same again.

    Args:
        session: of the supervisor.
        number: the loader's.
        checked: what it was made with.
        epoch: the one whose first sample is made, if that is asked for.
        shipment: where its payload lies in the arena: offset and bytes.
        placement: where the arrays of the payload lie.
        cache: the loader's; None: it has none.
    """

    def __init__(
        self,
        session: EngineSession,
        number: int,
        checked: CheckedArguments,
        epoch: int,
        shipment: tuple[int, int],
        placement: Placement,
        cache: SharedCache | None,
    ) -> None:
        self._session, self._number, self._epoch = session, number, epoch
        self._config, self._is_by_sample = checked.config, checked.unit == "sample"
        self._shipment, self._placement, self._cache = shipment, placement, cache

    def send(self, probes: bool) -> None:
        """Send it; `probes`: the first samples shall be made, too. The session's lock is held.

        Raises:
            struct.error: a number that no message can hold.
        """
        files = self._placement.descriptors  # in the order in which `Payloads.load` takes them
        if self._cache is not None and self._cache.descriptor >= 0:
            files.append(self._cache.descriptor)
        self._session.send_files(self._number, files)
        self._session.send(Control.LOAD, *self._words(probes))

    def _words(self, probes: bool) -> tuple[int, ...]:
        limits, action = self._config.limits, self._config.on_error.action
        timeout_ns = int((limits.timeout_s or 0) * 1e9)
        may_exclude = action == "skip" or (action == "replace" and self._is_by_sample)
        kind = join32(int(may_exclude), int(self._is_by_sample))
        probed = self._epoch + 1 if probes else 0
        return self._number, *self._shipment, probed, limits.restarts_per_item, timeout_ns, kind


# Who holds the lock gives it back in milliseconds; but a close may be a finalizer, which must not wait for ever.
_LOCK_TIMEOUT_S = 1.0
_LOADING = "loaderpool: loading the function and its imports in a clean process"

# What a stream's items may take while they wait, of the budget for batches. Less: with large items workers idle while
# the next are read. More: they may take most of it beside the batches.
_FEED_SHARE = 4
_FEED_BYTES = 1 << 20  # at least


class PoolEngine:
    """Makes a loader's batches in a session's workers.

    Args:
        session: the running supervisor.
        checked: what the loader was made with; the payload is pickled here, once; a stream is read ahead from now on.
        first_epoch: the epoch whose first sample is made to find the spec.
        cache: the loader's, closed with this; None: it has none.

    Raises:
        UnpicklableError: function or source cannot travel.
        MemoryLimitError: no shared memory for what they hold.
    """

    def __init__(
        self,
        session: EngineSession,
        checked: CheckedArguments,
        first_epoch: int,
        cache: SharedCache | None = None,
    ) -> None:
        config, plan, stream = checked.config, checked.plan, checked.stream
        self.session, self.config, self.plan = session, config, plan
        calls_of_batch = plan.most_rows if checked.unit == "sample" else 1
        self._tickets_per_worker = tickets_per_worker(config.threads, calls_of_batch)
        self.cache = cache
        self._first_epoch = first_epoch
        self.failure = EngineFailure()
        self.layout: BatchLayout | None = None  # where the form is known
        self.runs: dict[int, LiveRun] = {}  # until the supervisor forgets them
        self.counts = DeliveryCounts()
        self._is_loaded = False
        self._loading: LongWork | None = None  # told of while a consumer waits for it
        self.is_closed = self._was_loaded = self._has_ended_supervisor = False
        self.feeds: StreamFeeds | None = None
        if cache is not None:
            cache.count_in(session.arena, session.lock)
        with InterruptsAllowed():  # pickling runs code of the user's, and may take long
            for_workers = {**checked.payload, "cache": None}  # a process that reads it makes its own
            if stream is None:
                shipment = ship(for_workers)
            else:
                from loaderpool.trainer.stream.feeds import StreamFeeds, ship_beside  # which few loaders need

                shipment, for_reader = ship_beside(for_workers, stream, config, plan, session.hands_over_files)
        warn_of_data(shipment)
        session.catch_up()  # if the supervisor has died since the last look, another one shall load this
        with session.lock:
            self.number = session.take_number()
            self._probing = Probing(session, self.number, checked, first_epoch)
            self._updates = SourceUpdates(session, self.number, shipment.without)
            self._placement = place(shipment, session.hands_over_files)
            cache_plan = None if cache is None else cache.plan
            self._extents, offset, nbytes = put_shipment(session.arena, shipment, self._placement, cache_plan)
            at = offset, nbytes
            self._load = LoadMessage(session, self.number, checked, first_epoch, at, self._placement, cache)
            try:
                if stream is not None:
                    self.feeds = StreamFeeds(session, stream, for_reader, config, self._feed_ahead, self._on_feed_news)
                self._load.send(probes=stream is None and self._probing.must_make_first)
            except BaseException:  # a number that no message can hold
                if self.feeds is not None:
                    self.feeds.free_all()
                for extent in self._extents:
                    session.arena.give_back(extent)
                raise
            session.routing.by_loader[self.number] = self
            self._shipped = shipped(shipment, self._placement, self.feeds)
        # After the message: the supervisor loads the payload meanwhile.
        self.captured: CapturedState | None = CapturedState(_compared(checked, self.feeds), shipment.without)
        if self.feeds is not None:
            try:
                self.feeds.begin(first_epoch, plan)
            except BaseException:
                self.close()
                raise

    # ---- Engine ----

    def form(self) -> BatchForm:
        """The batches' form. Blocks until the first sample has been made."""
        with InterruptsHeld():
            if self.failure.is_there:
                self._try_again()
            if self.layout is None:
                with self.session.lock:
                    self.check_open()
                    self._probing.want_first()
                with self._telling_of_the_load():
                    self.session.wait_for(lambda: self._probing.has_first or self.failure.is_there or self.is_closed)
                with self.session.lock:
                    self.check_open()
                    self.failure.check()
                    if self.layout is None:
                        self._lay_out()
        self.session.warnings.say()
        assert self.layout is not None
        return self.layout.form

    @contextlib.contextmanager
    def _telling_of_the_load(self) -> Iterator[None]:
        """Say after a second, in a line, that the supervisor still loads the function with what it imports."""
        session = self.session
        if self._was_loaded or session.long_work is not None:
            yield
            return
        with LongWork(_LOADING, measure=str, first_s=1.0) as self._loading:
            session.long_work = self._loading
            try:
                yield
            finally:
                if session.long_work is self._loading:
                    session.long_work = None

    def _lay_out(self) -> None:
        layout = BatchLayout(
            self.session, self, self.number, self.config, self.plan, self._probing, self._tickets_per_worker
        )
        self._extents.append(layout.extent)
        self.layout = layout
        layout.send()

    def spec(self) -> ElementSpec:
        with InterruptsHeld():
            form, probing = self.form(), self._probing
            with self.session.lock:
                probing.want_second(self._is_loaded)
            self.session.wait_for(lambda: probing.is_second_over or self.failure.is_there or self.is_closed)
            return probing.widen(form)

    def read_ahead(self, is_sure: bool) -> int:
        """How many batches to make ahead: where the next epoch is not sure, enough to keep workers busy."""
        assert self.layout is not None
        if not is_sure:
            return self.session.workers_wanted + 1
        return self._tickets_per_worker * self.session.workers_wanted * self.layout.form.max_chunk

    def begin(
        self, first_epoch: int, limit: int, plan: BasePlan, taken: Mapping[int, int], lanes: LanePlaces | None = None
    ) -> PoolSubscription:
        """Begin a run in the pool.

        Raises:
            MemoryLimitError: other runs are active and the budget has no slot for this one.
        """
        self.form()
        session = self.session
        with session.lock:
            session.run_todo()
            if not session.is_closed:
                self.failure.check()  # what a supervisor said at its end tells more than that it has ended
            session.check_usable()
            self.check_open()
            assert self.layout is not None
            quota = self.layout.quotas.make_way()
            feed = None if self.feeds is None else self.feeds.of_pass(first_epoch, plan)
            in_order, runs, counts = self.config.deterministic, self.runs, self.counts
            context = RunContext(session, self.number, self, self.layout, self.failure, in_order, runs, counts)
            run = PoolSubscription(context, first_epoch, limit, plan, taken, quota, feed, lanes)
            self.layout.quotas.add(run)
            if feed is not None and not feed.is_started:
                feed.start()
            return run

    def update(self, changes: dict[str, Any]) -> None:
        """Send changed attributes of the source's object; batches begun from now on see them."""
        with self.session.lock:
            self._updates.send(changes)

    def statistics(self) -> EngineStatistics:
        return with_counts(self._shipped, self.session, None if self.layout is None else self.layout.ring, self.counts)

    def cache_counts(self) -> Sequence[int]:
        return NO_COUNTS if self.cache is None else self.cache.counts()

    def close(self) -> None:
        """Unload the loader from its pool. Runs in: any thread, also in a finalizer."""
        if self.is_closed or self.session.is_foreign:
            return
        self.is_closed = True
        self.on_close()
        self.session.todo.append(self._unload)
        if self.session.lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self.session.run_todo()
                self.session.wake()
            finally:
                self.session.lock.release()

    # ---- feeds of a stream ----

    def _feed_ahead(self) -> Ahead:
        """How far a stream may be read ahead. The session's lock is held."""
        from loaderpool.trainer.stream.feed import Ahead

        if self.layout is None:
            least = self._tickets_per_worker * self.session.workers_wanted + 1
            return Ahead(least, least, _FEED_BYTES)
        least = self.layout.ring.tickets + 1
        # Chunks can only grow where more is there than the workers are at; but items should not lie here long. What was
        # cut stays out, however slow what stands before it in its worker's pipe is: so this must never shrink, or all
        # that may be read ahead could be in that one chunk while the other workers have nothing.
        chunk = min(self.layout.form.max_chunk, 2 * self.counts.largest_chunk)
        return Ahead(least, least * chunk, max(_FEED_BYTES, self.layout.ring.plan.limit_bytes // _FEED_SHARE))

    def _on_feed_news(self, feed: Feed) -> None:
        """A feed has another batch, or its end. Runs in: its thread; the session's lock is held."""
        assert self.feeds is not None
        is_wanted = not self.is_closed and not self._has_ended_supervisor
        if feed is self.feeds.first and not self._probing.has_first and is_wanted:
            if feed.made == 1 and feed.end is None:
                self._probing.ask_first(feed.offset)
            elif not feed.made:
                nothing = functools.partial(SourceError, nothing_there(self.config.drop_remainder))
                self.failure.note(feed.make_error or nothing, may_pass=not self.feeds.is_one_shot)
        for run in self.layout.quotas.active if self.layout is not None else ():
            if run.feed is feed:
                run.fed(feed)

    def _free_feeds(self) -> None:
        """Give back the memory of feeds that no worker looks at any more."""
        if self.feeds is not None and self._probing.has_first:
            self.feeds.free({id(run.feed) for run in self.runs.values()})

    def on_close(self) -> None:
        if self.feeds is not None:
            self.feeds.stop()

    # ---- slots ----

    def outgrown(self, nbytes: int) -> None:
        """A batch of `nbytes` did not fit its slot. The session's lock is held."""
        assert self.layout is not None
        with self._shortage_ends_all():
            self.layout.quotas.outgrown(nbytes)

    def on_run_ended(self, run: LiveRun) -> None:
        """The supervisor has forgotten this run. The session's lock is held."""
        self.runs.pop(run.number, None)
        self._free_feeds()

    @contextlib.contextmanager
    def _shortage_ends_all(self) -> Iterator[None]:
        """Where slots are short for the runs that there are, all that wait for a batch learn of it."""
        try:
            yield
        except MemoryLimitError as error:
            self.failure.note(functools.partial(MemoryLimitError, str(error)))
            self.session.wake()

    # ---- Listener; the session's lock is held ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this loader."""
        kind = words[0]
        if kind == Notice.SLOT_RETIRED:
            assert self.layout is not None
            with self._shortage_ends_all():
                self.layout.quotas.retired(words[1])
        elif kind == Notice.LOADED:
            self._loaded(words[2] / 1e9)
        elif kind == Notice.SPEC:
            self._probing.take(read_attachment(attachment))
        elif kind in (Notice.SPEC_FAILED, Notice.LOST) and words[1] and self._probing.gives_up_second():
            pass  # the batch's turn tells of it
        elif kind in (Notice.SPEC_FAILED, Notice.LOAD_FAILED, Notice.LOST, Notice.BROKEN):
            self.failure.note_told(words, attachment)
        elif kind == Notice.UNLOADED:
            self._forget()

    def on_new_supervisor(self) -> None:
        """Tell another supervisor all that it must know, and have what was not taken made again."""
        if self.is_closed:
            self._forget()
            return
        if self._has_ended_supervisor:
            return
        must_probe = self._probing.must_make_first and not self.failure.is_there
        probes, is_behind_hook = must_probe and self.feeds is None, self._probing.is_behind_hook
        self._load.send(probes=probes and not is_behind_hook)
        first_feed = None if self.feeds is None else self.feeds.first
        if must_probe and first_feed is not None and first_feed.made:
            self._probing.ask_first(first_feed.offset)
        self._is_loaded = False
        self._updates.repeat()
        if probes and is_behind_hook:
            self._probing.ask_first()
        if self.layout is not None:
            with self._shortage_ends_all():
                self.layout.ring.tell_new_supervisor()
                self.layout.send()
                self._forget_runs()
                self._free_feeds()
                self.layout.quotas.restart_all()

    @property
    def was_loaded(self) -> bool:
        return self._was_loaded

    def on_load_died(self, how: str) -> None:
        self._has_ended_supervisor = True
        self.on_close()  # what its stream still has is not wanted any more
        self.failure.note_load_died(how)

    def check_open(self) -> None:
        """Raise where this loader, or the pool under it, was closed."""
        if self.is_closed or self.session.is_closed:
            raise closed_error()

    def _try_again(self) -> None:
        """Try again what failed, a first sample say, after a consumer was told: as any other one in the next pass."""
        self.session.check_owner()
        with self.session.lock:
            if not self.failure.pass_over() or self._probing.has_first:
                return
            if self.feeds is None:
                self._probing.ask_first()
            elif not self.feeds.begin_again(self._first_epoch, self.plan):
                assert self.feeds.first is not None
                self._probing.ask_first(self.feeds.first.offset)

    def _unload(self) -> None:
        if self.layout is not None:
            self.layout.quotas.end_all()
        # The workers are gone, or no supervisor knows of it: no process looks at its memory any more.
        if self.session.is_closed or self._has_ended_supervisor:
            self._forget()
        else:
            self.session.send(Control.UNLOAD, self.number)

    def _loaded(self, took_s: float) -> None:
        """The supervisor has read the payload; and after it each update in turn, which is then its own."""
        if self._is_loaded:
            self._updates.was_read()
        else:
            self.counts.load_s = max(self.counts.load_s, took_s)
            self._probing.on_loaded()
        self._is_loaded = self._was_loaded = True
        if self._loading is not None:
            self._loading.end()

    def _forget_runs(self) -> None:
        for run in self.runs.values():
            run.forget()
        self.runs.clear()

    def _forget(self) -> None:
        arena = self.session.arena
        self._forget_runs()
        if self.feeds is not None:
            self.feeds.free_all()
        self.session.routing.by_loader.pop(self.number, None)
        for extent in self._extents:
            arena.give_back(extent)
        self._extents = []
        self._placement.files.clear()
        if self.cache is not None:
            self.cache.clear()
            self.cache.close()
        self._updates.give_back_all()
        if self.layout is not None:
            self.layout.ring.give_back_all()


def _compared(checked: CheckedArguments, feeds: StreamFeeds | None) -> dict[str, Any]:
    """What the workers, and a stream's reader, have as it was pickled, and are not told of."""
    parts = dict(named_parts(checked.payload))
    if feeds is not None and feeds.read_by == "process":
        assert checked.stream is not None
        parts["source"] = checked.stream.items
    if checked.has_hooks:  # what changes in it is sent
        parts.pop("source", None)
    return parts
