"""One loader's batches out of a pool: its function and source as they are sent, its form, its runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from loaderpool.core.changes import COMPARED_BYTES, ObjectChanges, Shipments, Shipping
from loaderpool.core.delivery import CheckedArguments, DeliveryCounts, with_classes
from loaderpool.core.messages import Found
from loaderpool.core.pool import WorkerPool
from loaderpool.core.run import PoolRun
from loaderpool.core.version import Version
from loaderpool.errors import (
    LoaderpoolError,
    MemoryLimitError,
    SetupError,
    SourceError,
    closed_error,
    warn,
)
from loaderpool.memory.layout import BatchForm
from loaderpool.plan.places import Position
from loaderpool.sources.recognise import check_length
from loaderpool.sources.stream import nothing_there
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.glance import Glance
from loaderpool.transport.payload.kept import counted_in_passes
from loaderpool.transport.payload.module_versions import note_modules, version_warnings
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.core.engine_statistics import EngineStatistics
    from loaderpool.core.stream.feed import Feed, StreamFeeds

_LOCK_TIMEOUT_S = 1.0


class PoolEngine:
    """Makes a loader's batches in a pool's workers.

    Attributes:
        number: of the loader, in the pool; that of its first version.
        cache: the loader's; None: it has none.
        generators: the random generators of the payload.
        settings: what a supervisor needs to know that does not load the payload.
        found: what batches look like, as it was found; None: not yet.
        is_after_hook: the first sample is made after a hook of the user's, which has not run yet.
        is_outdated: the next pass begins with a new version, whatever has changed.

    Args:
        pool: whose workers make them.
        checked: what the loader was made with; the payload is pickled here.
        cache: the loader's, closed with this; None: it has none.

    Raises:
        UnpicklableError: function or source cannot travel.
        MemoryLimitError: no shared memory for what they hold.
    """

    def __init__(
        self, pool: WorkerPool, checked: CheckedArguments, cache: SharedCache | None = None
    ) -> None:
        self.pool, self._payload, self._stream = pool, checked.payload, checked.stream
        self.config, self.plan = checked.config, checked.plan
        with pool.lock:
            self.number = pool.take_number()
        self.settings = checked.payload.settings._replace(loader=self.number)
        self.cache = cache
        self.runs: dict[int, PoolRun] = {}  # that the supervisor has
        self._begun: weakref.WeakSet[PoolRun] = (
            weakref.WeakSet()
        )  # also those that begin again after its death
        self.counts = DeliveryCounts()
        self.lent: list[dict[int, None]] = []  # of each run: slots that have views
        self.is_closed = self.is_outdated = False
        self.known_form: BatchForm | None = None
        self.found: Found | None = None
        self._was_asked = False  # `form` has returned it: it stays
        self.is_after_hook = checked.has_epoch_begin
        if cache is not None:
            cache.count_in(pool.arena, pool.lock)
        self.feeds: StreamFeeds | None = None
        self._old_feeds: list[StreamFeeds] = []  # which read what the stream was before
        self._versions: list[Version] = []  # the present one last
        self._is_comparing = False  # a signal's handler may begin a pass meanwhile
        self._length = checked.length
        self._has_begun = self._told_of_counts = False
        roots = checked.payload.roots(checked.stream)
        with InterruptsAllowed():
            self.generators = Registry(roots)
        self._shipping = Shipping(checked, self.generators, self.number, pool.hands_over_files)
        shipped = self._shipping.pickle()
        modules = frozenset[str]().union(
            *(each.modules for each in shipped if isinstance(each, Shipment))
        )
        if not pool.hands_over_files:
            note_modules(modules, pool.modules)
        for warning in shipped[0].warnings:
            warn(warning)
        for text in version_warnings(modules, pool.modules):
            warn(text)
        glance = Glance(roots, shipped[0].without)
        self._changes = ObjectChanges(
            self._shipping, glance, self._sent_difference, cache is not None
        )
        if cache is not None and self._shipping.nbytes <= COMPARED_BYTES:
            with InterruptsAllowed():
                cache.identify(checked.payload.cached_of)
        try:
            self._send(shipped)
        except BaseException:
            self.close()
            raise

    def form(self) -> BatchForm:
        """The batches' form. Blocks until the first sample has been made."""
        try:
            return self._form()
        except SetupError as error:
            self.name_variable(error)
            raise

    def name_variable(self, error: SetupError) -> None:
        """Name the variable that could not be loaded in the error's message. Not with the pool's lock held."""
        if error._load_error:
            from loaderpool.transport.payload.diagnose import describe_unloadable  # seldom needed

            with InterruptsAllowed():
                cause = describe_unloadable(self._payload.roots(self._stream), error._load_error)
            if cause:
                error.args = (str(error).replace(error._advice, cause, 1),)
                error._load_error = ""

    def _form(self) -> BatchForm:
        self.pool.check_owner()  # first: in a fork a thread that is not there may hold the lock
        if self.known_form is None:
            with InterruptsHeld():
                with self.pool.lock:
                    version = self.version
                    if (
                        version.was_told
                        and self.feeds is not None
                        and self._why_no_item() is not None
                    ):
                        self.feeds.begin_again()
                    if (
                        version.was_told and version.may_pass
                    ):  # a first sample that failed is tried again in a pass
                        version.failure, version.may_pass = None, False
                        version.look()
                    elif self.is_after_hook:
                        self.is_after_hook = False
                        version.look()
                while not self._is_decided():
                    self.pool.session.wait(self._is_decided)
                with self.pool.lock:
                    if self.known_form is None:
                        self.version.was_told = True
                        self.check(self.version)
        self.pool.say_warnings()
        assert self.known_form is not None
        self._was_asked = True
        return self.known_form

    def _is_decided(self) -> bool:
        """Whether the form is known, or no batch can be made."""
        is_over = self.is_closed or self.pool.is_closed or self.version.failure is not None
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
            self.check(self.version)
            feed = (
                None
                if self.feeds is None
                else self.feeds.of_pass(place.epoch, self.plan.after(place.start))
            )
            run = PoolRun(self, self.version, self.pool, place, limit, feed)
            self._begun.add(run)
            self._has_begun = True
            try:
                run.begin()
                if feed is not None and not feed.is_started:
                    feed.start()
            except BaseException:
                run.end()
                raise
            self._drop_outdated()  # now: its slots are the run's by now
            return run

    # ---- the user's objects, as they are when a pass begins

    def refresh(self, is_whole: bool = False) -> None:
        """Use the functions and objects as they are now for later runs: send a new version if they have changed.

        Runs in: the thread on which a pass begins, one at a time.

        Args:
            is_whole: they are compared, however large they are; else large ones at a glance.

        Raises:
            UnpicklableError: `is_whole`, and they cannot travel any more.
            SourceError: the source has fewer items than when the loader was made.
            CacheError: what is kept in the cache is of other functions or another source.
            MemoryLimitError: there is no shared memory for the new version.
        """
        if self._is_comparing or self.is_closed:
            return
        self._is_comparing = True
        try:
            if len(self._versions) > 1 or self._old_feeds:
                with self.pool.lock:
                    self._drop_outdated()
            self._refresh(is_whole)
        finally:
            self._is_comparing = False

    def _refresh(self, is_whole: bool) -> None:
        change = self._changes.look(is_whole, self.is_outdated)
        if change is None:
            return
        check_length(self._payload.source, self._length)
        if self.cache is not None:
            self.cache.check(self._payload.cached_of)
        feeds = self.feeds
        try:
            self._send(change.shipped)
        except MemoryLimitError as error:
            if not change.is_glance:
                raise
            self._changes.warn_of_failure(change, error)
            return
        if self._has_begun and self.feeds is not feeds:
            self._warn_of_lost_counts()
        self.is_outdated = False
        self._changes.note_sent(change)

    def _warn_of_lost_counts(self) -> None:
        """Warn if the stream has counted in passes, for it begins again from this process's copy."""
        assert self._stream is not None
        names = counted_in_passes(type(self._stream.items))
        if names and not self._told_of_counts:
            self._told_of_counts = True
            shown = ", ".join(f"source.{name}" for name in names)
            warn(
                f"The stream has changed, so it begins again from this process's copy. It loses what it counted in "
                f"{shown} in another process. Set that before each epoch, too"
            )

    def warn_of_replay(self) -> None:
        """Warn of what has changed since the workers got it, for one sample is made here.

        Raises:
            LoaderpoolWarning: where a filter makes an error of it.
        """
        self._changes.warn_of_replay(can_compare=not self.is_closed)

    def _sent_difference(self, shipped: Shipments) -> Difference | None:
        """Return what differs in shipments from those that workers and reader have; None: nothing does."""
        for_workers, for_reader = shipped
        found = self.version.sent.difference(for_workers)
        if (found is None or found.is_kept) and isinstance(for_reader, Shipment):
            found = (
                Difference("") if self.feeds is None else self.feeds.difference(for_reader) or found
            )
        return found

    def _send(self, shipped: Shipments) -> None:
        """Send a version to the supervisor; later runs are of it."""
        for_workers, for_reader = shipped
        with self.pool.lock:
            if self._versions:
                self.pool.check_usable()
                if (
                    not self._was_asked
                ):  # nobody counts on what a batch of the version before would look like
                    self.known_form = self.found = None
            version = Version(self, for_workers, self._versions[-1] if self._versions else None)
            try:
                if for_reader is not None:
                    self._renew_feeds(for_reader)
            except BaseException:
                version.sent.give_back()
                raise
            self._versions.append(version)
            version.begin()
            if self.feeds is not None and self.feeds.first is None and self.known_form is None:
                self.feeds.begin()

    def _renew_feeds(self, for_reader: Shipment | str) -> None:
        """Read the stream as it is sent now in later passes. The pool's lock is held."""
        from loaderpool.core.stream.feed import StreamFeeds  # which few loaders need

        before = self.feeds
        if before is not None and (
            isinstance(for_reader, str) or before.difference(for_reader) is None
        ):
            if self._why_no_item() is not None:
                before.begin_again()
            return
        assert self._stream is not None
        self.feeds = StreamFeeds(
            self, self.pool, self._stream, for_reader, None if before is None else before.sent
        )
        if before is not None:
            before.retire()
            self._old_feeds.append(before)

    def _drop_outdated(self) -> None:
        """Unload versions that no run is of any more. The pool's lock is held."""
        used = {run.version for run in self.runs.values()} | {
            run.version for run in self._begun if not run.is_over
        }
        for version in self._versions[:-1]:
            if version not in used:
                version.end()
        for feeds in [*self._old_feeds]:
            feeds.free({id(run.feed) for run in self.runs.values()})
            if feeds.is_done:
                feeds.free_all()
                self._old_feeds.remove(feeds)

    @property
    def version(self) -> Version:
        """The version of which runs are that begin now."""
        if not self._versions:
            raise closed_error()
        return self._versions[-1]

    def reseed(self) -> None:
        """Seed random generators by their present keys in later runs."""
        self.is_outdated = True

    def statistics(self) -> EngineStatistics:
        """What it knows for `Loader.statistics()`, but for its cache."""
        from loaderpool.core.engine_statistics import (
            pool_statistics,
        )  # few loaders are asked for them

        return pool_statistics(self.pool, self.counts, self.slots_lent, self._notes())

    @property
    def slots_lent(self) -> int:
        """How many slots have views, of all runs."""
        self.lent = [each for each in self.lent if each]
        return sum(map(len, self.lent))

    def _notes(self) -> tuple[str, ...]:
        """What is to be said of how function and source have travelled."""
        feeds = self.feeds
        placements = [self.version.sent.placement] if self._versions else []
        if feeds is not None and feeds.sent is not None:
            placements.append(feeds.sent.placement)
        shared, packed = sum(each.shared_bytes for each in placements), self._shipping.packed_items
        notes = (
            [f"{shared:,} bytes of arrays are shared with the workers and not copied"]
            if shared
            else []
        )
        notes += [
            f"copied into shared memory: {reason}"
            for each in placements
            for reason in each.copied_because
        ]
        if packed:
            notes.append(
                f"{packed:,} items of the source were packed into bytes that the workers share"
            )
        if feeds is not None:
            why = feeds.why_on_thread
            where = f"on a thread of the main process: {why}" if why else "in a separate process"
            notes.append(f"the stream is read {where}")
        notes += self._changes.notes()
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
                for version in [*self._versions]:
                    version.end()
            finally:
                pool.lock.release()

    # ---- what is said of versions; the pool's lock is held

    def on_found(self, version: Version, message: Found) -> None:
        """Take over the form of the batches if the present version has found it."""
        if version in self._versions[-1:]:
            form, _ = receive(message.content)
            self.known_form = with_classes(form)
            self.found = message

    def on_version_ended(self, version: Version) -> None:
        """No process looks at a version any more."""
        if version in self._versions:
            self._versions.remove(version)
            version.sent.give_back()
        if not self._versions:
            for feeds in self._all_feeds():
                feeds.free_all()
            if self.cache is not None:
                self.cache.close(clears=True)

    def _all_feeds(self) -> list[StreamFeeds]:
        return self._old_feeds if self.feeds is None else [*self._old_feeds, self.feeds]

    def on_close(self) -> None:
        """The pool is closed."""
        for feeds in self._all_feeds():
            feeds.stop()

    # ---- the items of a stream; the pool's lock is held

    def add_run(self, number: int, run: PoolRun) -> None:
        """Note that the supervisor knows a run by this number."""
        self.runs[number] = run

    def drop_run(self, number: int) -> None:
        """Note that the supervisor that knew a run by this number is lost."""
        self.runs.pop(number, None)

    def active_runs(self) -> int:
        """Return the number of runs whose consumers still take batches."""
        return sum(not run.is_over for run in self.runs.values())

    def on_run_ended(self, number: int) -> None:
        """No worker looks at what this run needs any more."""
        self.runs.pop(number, None)
        self.pool.session.listeners.pop(number, None)
        if self.known_form is not None:
            for feeds in self._all_feeds():
                feeds.free({id(run.feed) for run in self.runs.values()})

    def on_feed_news(self, feed: Feed) -> None:
        """A feed has another batch, or its end. Runs in: its thread."""
        assert self.feeds is not None
        if feed is self.feeds.first and feed.made == 1 and feed.end is None and not self.is_closed:
            self.version.look()
        for run in [*self.runs.values()]:
            if run.feed is feed and not run.is_over:
                run.fed(feed)

    def check(self, version: Version) -> None:
        """Raise if no batch can be made of a version: the loader, or its pool, was closed, or something has failed."""
        if self.is_closed or self.pool.is_closed:
            raise closed_error()
        if (make_error := version.failure or self._why_no_item()) is not None:
            raise make_error()
