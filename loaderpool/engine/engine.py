"""`PoolEngine`: makes one loader's batches in a pool. It owns the loader's versions, form and runs.

Called in the main process. "Under the lock" refers to the pool's lock.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from loaderpool.engine.changes import COMPARED_BYTES, ObjectChanges, Shipments, Shipping
from loaderpool.engine.delivery import CheckedArguments, DeliveryCounts
from loaderpool.engine.known_form import KnownForm
from loaderpool.engine.orders import StoredOrders
from loaderpool.engine.pool import WorkerPool
from loaderpool.engine.run import PoolRun, Runs
from loaderpool.engine.stream.versions import FeedVersions
from loaderpool.engine.version import Version
from loaderpool.errors import (
    MemoryLimitError,
    SetupError,
    closed_error,
    warn,
)
from loaderpool.memory.layout import BatchForm
from loaderpool.plan.batches import Plan
from loaderpool.plan.places import Position
from loaderpool.sources.recognise import check_length
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.transport.messages import Found
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.glance import Glance
from loaderpool.transport.payload.module_versions import note_modules, version_warnings
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.engine.engine_statistics import EngineStatistics
    from loaderpool.engine.stream.feed import Feed

_LOCK_TIMEOUT_S = 1.0  # maximum wait of `close`, because a finalizer must not wait forever


class PoolEngine:
    """Makes a loader's batches in a pool's workers.

    Attributes:
        checked: Arguments of the loader.
        cache: Cache of the loader; None: it has none.
        generators: Random generators of the user's objects.
        settings: Settings for supervisors that do not load the payload. Their `loader` is the
            number of the loader in the pool, and of its first version.
        runs: Runs of the loader.
        known: Form of the batches.
        feeds: Feeds of the loader's stream, if the source is one.
        orders: Orders of epochs in the arena, if they are drawn.

    Args:
        pool: Pool whose workers make the batches.
        checked: Arguments of the loader. The payload is pickled here.
        cache: Cache of the loader, which `close` closes; None: it has none.

    Raises:
        UnpicklableError: The function or the source cannot be pickled.
        MemoryLimitError: There is too little shared memory for their data.
    """

    def __init__(
        self, pool: WorkerPool, checked: CheckedArguments, cache: SharedCache | None = None
    ) -> None:
        self.pool, self.checked, self.plan, self.cache = pool, checked, checked.plan, cache
        self._length = checked.length  # the source may change later
        with pool.lock:
            number = pool.take_number()
        self.settings = checked.payload.settings._replace(loader=number)
        self.is_closed = False
        self.runs = Runs()
        is_drawn = checked.plan.order.is_drawn
        self.known = KnownForm(awaits_start=checked.has_epoch_begin or is_drawn)
        self.orders = StoredOrders(pool)
        self.feeds = FeedVersions(checked.stream, checked.plan)
        self._versions: list[Version] = []  # the present version is the last one
        if cache is not None:
            cache.count_in(pool.arena, pool.lock)
        roots = checked.payload.roots(checked.stream)
        with InterruptsAllowed():
            self.generators = Registry(roots)
        shipping = Shipping(checked, self.generators, number, pool.hands_over_files)
        shipped = shipping.pickle()
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
        self._changes = ObjectChanges(shipping, glance, cache is not None)
        if cache is not None and shipping.nbytes <= COMPARED_BYTES:
            with InterruptsAllowed():
                cache.identify(checked.payload.cached_of)
        try:
            self._send(shipped)
        except BaseException:
            self.close()
            raise

    def form(self, plan: Plan | None = None) -> BatchForm:
        """Return the form of the batches. Blocks until the first sample has been made."""
        try:
            return self._form(plan)
        except SetupError as error:
            self.name_variable(error)
            raise

    def name_variable(self, error: SetupError) -> None:
        """Add the name of the variable that cannot be loaded to the error.

        Called without the lock, because it runs the user's code.
        """
        if error._load_error:
            # Imported here, because it is seldom needed.
            from loaderpool.transport.payload.diagnose import describe_unloadable

            with InterruptsAllowed():
                cause = describe_unloadable(
                    self.checked.payload.roots(self.checked.stream), error._load_error
                )
            if cause:
                error.args = (str(error).replace(error._advice, cause, 1),)
                error._load_error = ""

    def _form(self, plan: Plan | None) -> BatchForm:
        # Checked first, because in a fork a thread that no longer exists may hold the lock.
        self.pool.check_owner()
        if self.known.form is None:
            plan = self.checked.plan_of_first(plan)
            with InterruptsHeld():
                with self.pool.lock:
                    self._retry_first_sample(plan)
                while not self._is_decided():
                    self.pool.session.wait(self._is_decided)
                with self.pool.lock:
                    if self.known.form is None:
                        self.version.was_told = True
                        self.check(self.version)
        self.pool.warnings.say()
        return self.known.fix()

    def _retry_first_sample(self, plan: Plan) -> None:
        """Request the first sample once a pass starts, or again after a failure.

        The failure must have been reported, and be of a kind that may not recur. Under the lock.
        """
        version = self.version
        if version.was_told:
            self.feeds.retry_first()
        if version.was_told and version.may_pass:
            version.failure, version.may_pass = None, False
        elif self.known.awaits_start:
            self.known.awaits_start = False
        else:
            return
        self.orders.store(plan)
        # No worker reads the orders of passes that have failed.
        self.orders.free(self.runs.orders)
        version.look()

    def _is_decided(self) -> bool:
        """Return True if the form is known, or if no batch can be made. Under the lock."""
        if self.is_closed or self.pool.is_closed or self.version.failure is not None:
            return True
        return self.known.form is not None or self.feeds.why_no_item() is not None

    def read_ahead(self) -> int:
        """Return the number of batches to make of the next epoch, which may never be requested.

        They keep all workers busy.
        """
        return self.pool.workers.wanted + 1

    def begin(self, place: Position, limit: int, plan: Plan) -> PoolRun:
        """Start a run. Its `end` pairs with this call.

        Args:
            place: Position of the first batch. The remainder of an epoch has a run of its own.
            limit: Number after the last batch that may be made. Ignored for streams, whose batches
                are made as they are read.
            plan: Plan of the whole epoch.
        """
        self.form(plan)
        with self.pool.lock:
            self.pool.check_usable()
            self.check(self.version)
            with contextlib.ExitStack() as undo:
                feed = self.feeds.of_pass(place.epoch, plan.after(place.start))
                if feed is not None:
                    undo.callback(feed.stop)
                order = self.orders.store(plan)
                run = PoolRun(self, self.version, self.pool, place, limit, plan, feed, order)
                undo.callback(run.end)
                self.runs.note_start(run)
                run.begin()
                if feed is not None and not feed.is_started:
                    feed.start()
                undo.pop_all()
            # Last, so that the new run gets the slots that an unloaded version would return.
            self._drop_outdated()
            return run

    # ---- the user's objects, as they are when a pass starts ----

    def refresh(self, is_whole: bool = False) -> None:
        """Use the present functions and objects for later runs. Sends a new version if they differ.

        Called by the thread on which a pass starts, one at a time.

        Args:
            is_whole: Compare objects of any size. Otherwise only parts of large ones are compared.

        Raises:
            UnpicklableError: `is_whole` is True, and an object can no longer be pickled.
            SourceError: The source has fewer items than when the loader was created.
            CacheError: The cached results are of other functions or of another source.
            MemoryLimitError: There is too little shared memory for the new version.
        """
        if self._changes.is_comparing or self.is_closed:
            return
        self._changes.is_comparing = True
        try:
            if len(self._versions) > 1 or self.feeds.earlier:
                with self.pool.lock:
                    self._drop_outdated()
            self._refresh(is_whole)
        finally:
            self._changes.is_comparing = False

    def _refresh(self, is_whole: bool) -> None:
        change = self._changes.look(is_whole, self._sent_difference)
        if change is None:
            return
        check_length(self.checked.payload.source, self._length)
        if self.cache is not None:
            self.cache.check(self.checked.payload.cached_of)
        feeds = self.feeds.present
        try:
            self._send(change.shipped)
        except MemoryLimitError as error:
            if not change.is_glance:
                raise
            self._changes.warn_of_failure(change, error)
            return
        if self.runs.have_started and self.feeds.present is not feeds:
            self.feeds.warn_of_lost_counts()
        self._changes.note_sent(change)

    def warn_of_replay(self) -> None:
        """Warn of values that have changed since the workers got them, because replay uses them.

        Raises:
            LoaderpoolWarning: A warning filter turns the warning into an error.
        """
        self._changes.warn_of_replay(not self.is_closed, self._sent_difference)

    def _sent_difference(self, shipped: Shipments) -> Difference | None:
        """Return the difference of shipments from those that workers and reader have, or None."""
        for_workers, for_reader = shipped
        found = self.version.sent.difference(for_workers)
        if (found is None or found.is_kept) and isinstance(for_reader, Shipment):
            found = self.feeds.difference(for_reader) or found
        return found

    def _send(self, shipped: Shipments) -> None:
        """Create a version and send it to the supervisor. Later runs use it."""
        for_workers, for_reader = shipped
        with self.pool.lock:
            if self._versions:
                self.pool.check_usable()
                self.known.forget_unless_fixed()
            version = Version(self, for_workers, self._versions[-1] if self._versions else None)
            try:
                if for_reader is not None:
                    self.feeds.renew(self, self.pool, for_reader)
            except BaseException:
                version.sent.give_back()
                raise
            self._versions.append(version)
            version.begin()
            if self.known.form is None:
                self.feeds.begin_first()

    def _drop_outdated(self) -> None:
        """Unload versions that no run uses. Under the lock."""
        used = self.runs.versions
        for version in self._versions[:-1]:
            if version not in used:
                version.end()
        self.feeds.free_earlier(self.runs.feeds)

    @property
    def version(self) -> Version:
        """The present version, which new runs use."""
        if not self._versions:
            raise closed_error()
        return self._versions[-1]

    def reseed(self) -> None:
        """Seed random generators by their present keys in later runs."""
        self._changes.is_outdated = True

    def statistics(self) -> EngineStatistics:
        """Return the counts for `Loader.statistics()`, without those of the cache."""
        # Imported here, because few programs call it.
        from loaderpool.engine.engine_statistics import pool_statistics

        return pool_statistics(self.pool, self.runs.counts, self.runs.slots_lent, self._notes())

    def _notes(self) -> tuple[str, ...]:
        """Return notes on how the function and the source were sent to the workers."""
        feeds = self.feeds.present
        placements = [self.version.sent.placement] if self._versions else []
        if feeds is not None and feeds.sent is not None:
            placements.append(feeds.sent.placement)
        shared = sum(each.shared_bytes for each in placements)
        packed = self._changes.shipping.packed_items
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
        """Unload the loader from its pool. Idempotent. Called by any thread and by finalizers."""
        pool = self.pool
        if self.is_closed or pool.is_foreign:
            return
        self.is_closed = True
        self.on_close()
        if pool.lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                for run in [*self.runs.by_number.values()]:
                    run.end()
                for version in [*self._versions]:
                    version.end()
            finally:
                pool.lock.release()

    # ---- called by versions, under the lock ----

    def on_found(self, version: Version, message: Found) -> None:
        """Store the form of the batches if it comes from the present version."""
        if version in self._versions[-1:]:
            self.known.learn(message)

    def on_version_ended(self, version: Version) -> None:
        """Release a version that no process uses any more. May be called twice for a version."""
        if version in self._versions:
            self._versions.remove(version)
            version.sent.give_back()
        if not self._versions:
            self.feeds.free_all()
            self.orders.free_all()
            if self.cache is not None:
                self.cache.close(clears=True)

    def on_close(self) -> None:
        """Stop reading the stream, because the pool is being closed. Called without the lock."""
        self.feeds.stop()

    # ---- called by runs and feeds, under the lock ----

    @property
    def counts(self) -> DeliveryCounts:
        """Counts of deliveries, over all runs."""
        return self.runs.counts

    def on_run_ended(self, number: int) -> None:
        """Release the resources of a run, because no worker reads them any more."""
        self.runs.by_number.pop(number, None)
        self.pool.session.listeners.pop(number, None)
        if self.known.form is not None:
            self.feeds.free(self.runs.feeds)
            self.orders.free(self.runs.orders)

    def on_feed_news(self, feed: Feed) -> None:
        """Report a new batch, or the end, to a feed's runs. Called by the feed's thread."""
        if self.feeds.has_first_item(feed) and not self.is_closed:
            self.version.look()
        for run in [*self.runs.by_number.values()]:
            if run.feed is feed and not run.is_over:
                run.fed(feed)

    def check(self, version: Version) -> None:
        """Raise an error if no batch can be made from a version.

        Raises:
            LoaderpoolError: The loader or its pool is closed, loading the version has failed, or
                the stream has no item.
        """
        if self.is_closed or self.pool.is_closed:
            raise closed_error()
        if (make_error := version.failure or self.feeds.why_no_item()) is not None:
            raise make_error()
