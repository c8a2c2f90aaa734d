"""One loader's batches out of a pool: its function and source as they are sent, its form, its runs."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    UnpicklableError,
    closed_error,
    counted,
    warn,
)
from loaderpool.memory.layout import BatchForm
from loaderpool.plan.places import Position
from loaderpool.sources.recognise import check_length
from loaderpool.sources.stream import nothing_there
from loaderpool.system import clock
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld
from loaderpool.transport.payload.generators import Registry, seeder
from loaderpool.transport.payload.glance import Glance
from loaderpool.transport.payload.kept import counted_in_passes
from loaderpool.transport.payload.module_versions import note_modules, version_warnings
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.payload.structure import Difference, means_the_same
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache
    from loaderpool.core.engine_statistics import EngineStatistics
    from loaderpool.core.stream.feed import Feed, StreamFeeds

_LOCK_TIMEOUT_S = 1.0
# Objects that take no more, in their pickle and in arrays beside it, are pickled and compared as each epoch begins.
# Larger: an epoch's start takes longer than some 10 ms. Smaller: of more objects only a glance is taken.
_COMPARED_BYTES = 1_000_000
# The same of the CPU time that pickling them takes, so that many small objects do not hold up each epoch.
_COMPARED_NS = 10_000_000
_MOST_TRIES = 3
# Epochs that begin with what library objects keep of their last call, before that is taken for no change of the user's.
_MOST_KEPT_CHANGES = 2
# What workers and the reader of a stream are sent; in place of the latter why there is none, or None: no stream.
_Shipments = tuple[Shipment, Shipment | str | None]


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

    def __init__(self, pool: WorkerPool, checked: CheckedArguments, cache: SharedCache | None = None) -> None:
        self.pool, self._payload, self._stream = pool, checked.payload, checked.stream
        self.config, self.plan = checked.config, checked.plan
        with pool.lock:
            self.number = pool.take_number()
        self.settings = checked.payload.settings._replace(loader=self.number)
        self.cache = cache
        self.runs: dict[int, PoolRun] = {}  # that the supervisor has
        self._begun: weakref.WeakSet[PoolRun] = weakref.WeakSet()  # also those that begin again after its death
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
        self._is_quick = True  # pickling takes no more than `_COMPARED_NS`; once it does, that stays so
        self._is_stable = True  # the same objects give the same pickle
        self._can_travel = True  # they could be pickled when that was last tried
        self._length = checked.length
        self._changes = 0  # epochs that began with changed objects
        self._latest_change = self._ignored = ""
        self._has_begun = self._told_of_counts = False
        self._kept_changes = 0  # of these, for what objects of libraries keep of their last call
        roots = checked.payload.roots(checked.stream)
        with InterruptsAllowed():
            self.generators = Registry(roots)
        shipped = self._ship(None)
        modules = frozenset[str]().union(*(each.modules for each in shipped if isinstance(each, Shipment)))
        if not pool.hands_over_files:
            note_modules(modules, pool.modules)
        for warning in shipped[0].warnings:
            warn(warning)
        for text in version_warnings(modules, pool.modules):
            warn(text)
        self._glance = Glance(roots, shipped[0].without)
        if cache is not None and self._size <= _COMPARED_BYTES:
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
                    if version.was_told and self.feeds is not None and self._why_no_item() is not None:
                        self.feeds.begin_again()
                    if version.was_told and version.may_pass:  # a first sample that failed is tried again in a pass
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
            feed = None if self.feeds is None else self.feeds.of_pass(place.epoch, self.plan.after(place.start))
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
        is_whole, glance = is_whole or self.is_outdated, self._glance
        glance.warn({})  # of functions that were defined again
        is_small = self._size <= _COMPARED_BYTES and self._is_quick
        is_cheap = is_small and self._is_stable and self._can_travel
        is_glance = not (is_whole or is_cheap)
        if is_glance and not glance.changes():
            return
        changes, advice, difference = dict[str, str](), "", None
        try:
            shipped = self._ship_timed() if is_cheap else self._ship_again()
            self._can_travel = True
            if is_cheap and not self._is_quick and not is_whole:  # which is known by now
                is_glance = True
                if not glance.changes():
                    return
            difference = self._difference(shipped, is_whole)
            if difference is None or self._is_ignored(difference):
                if is_glance:  # or it would show the same each time
                    glance.renew()
                return
            changes = glance.changes()
            check_length(self._payload.source, self._length)
            if self.cache is not None:
                self.cache.check(self._payload.cached_of)
            feeds = self.feeds
            self._send(shipped)
        except UnpicklableError as error:
            if is_whole:
                raise
            self._can_travel = False  # it is tried again when a glance shows more
            changes = glance.changes() or {"the objects": "cannot be compared any more"}
            advice = f"{error} Or leave it out of the pickle in __getstate__."
        except MemoryLimitError as error:
            if not is_glance:
                raise
            advice = f"They could not be sent again: {error}"
        glance.renew()
        if advice:
            glance.warn(changes, advice=advice)
            return
        if self._has_begun and self.feeds is not feeds:
            self._warn_of_lost_counts()
        self.is_outdated = False
        self._changes += 1
        named = [f"{name}: {what}" for name, what in changes.items()] or filter(None, [difference and difference.name])
        self._latest_change = next((f" ({each})" for each in named), "")
        if is_glance and not (self._is_quick and self._pickled_bytes <= _COMPARED_BYTES):
            glance.warn(changes, *_sent_again(self._pickled_bytes))

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
        changes = self._glance.changes()
        if changes and self._is_stable and self._size <= _COMPARED_BYTES and not self.is_closed:
            with contextlib.suppress(UnpicklableError):
                changes = changes if self._differs(self._ship_again()) else {}
        self._glance.warn(changes, "These values changed after the workers got them; replay uses the new ones")

    def _difference(self, shipped: _Shipments, is_whole: bool) -> Difference | None:
        """Return what differs in objects that were pickled again from the workers'; None: nothing does."""
        for_workers, for_reader = shipped
        found = self.version.sent.difference(for_workers)
        if (found is None or found.is_kept) and isinstance(for_reader, Shipment):
            found = Difference("") if self.feeds is None else self.feeds.difference(for_reader) or found
        if self.is_outdated:
            return found or Difference("")
        if found is None or is_whole:
            return found
        if self._is_stable:
            again = self._ship_again()
            self._is_stable = all(
                means_the_same(one.pickled, other.pickled)
                for one, other in zip(shipped, again, strict=True)
                if isinstance(one, Shipment) and isinstance(other, Shipment)
            )
        return found if self._is_stable or self._glance.changes() else None

    def _differs(self, shipped: _Shipments) -> bool:
        """Return whether there is a difference that is not of an object's last call."""
        found = self._difference(shipped, is_whole=True)
        return found is not None and not found.is_kept

    def _is_ignored(self, difference: Difference) -> bool:
        """Return whether a difference is no change of the user's, as far as the epochs before have shown."""
        if self.is_outdated or not difference.is_kept:
            return False
        if self.cache is None and self._kept_changes < _MOST_KEPT_CHANGES:
            self._kept_changes += 1
            return False
        self._ignored, self._glance.counts_kept = difference.name, False
        return True

    def _ship_timed(self) -> _Shipments:
        """Pickle all that travels once more, and note if that takes long twice, for a collection may come once."""
        for _ in range(2):
            began_ns = clock.thread_cpu_ns()
            shipped = self._ship_again()
            if clock.thread_cpu_ns() - began_ns <= _COMPARED_NS:
                return shipped
        self._is_quick = False
        return shipped

    def _ship_again(self) -> _Shipments:
        """Pickle all that travels once more. Another thread may be changing it: then it is tried again."""
        for _ in range(_MOST_TRIES):
            try:
                return self._ship(self._like)
            except UnpicklableError as error:
                if not isinstance(error.__cause__, RuntimeError):  # "dictionary changed size during iteration"
                    raise
        return self._ship(self._like)

    def _ship(self, like: _Shipments | None) -> _Shipments:
        """Pickle all that travels, and note how large it is."""
        payload = self._payload.travelling(self.number)
        stream, for_reader = self._stream, None
        with InterruptsAllowed():  # pickling runs code of the user's, and may take long
            if stream is None:
                shipment = ship(payload, registry=self.generators, like=None if like is None else like[0])
            else:
                from loaderpool.core.stream.reader import ship_beside  # which few loaders need

                stream.captured = seeder(self.generators.pairs, self.config._replace(threads=1))
                own = self.config, self.plan, self.pool.hands_over_files, self.generators
                shipment, for_reader = ship_beside(payload, stream, *own, like)
        found = [each for each in (shipment, for_reader) if isinstance(each, Shipment)]
        self._pickled_bytes = sum(each.pickled_bytes for each in found)
        self._size = sum(len(each.pickled) + sum(buffer.nbytes for buffer in each.buffers) for each in found)
        self._like = _without_data(shipment), _without_data(for_reader)
        return shipment, for_reader

    def _send(self, shipped: _Shipments) -> None:
        """Send a version to the supervisor; later runs are of it."""
        for_workers, for_reader = shipped
        with self.pool.lock:
            if self._versions:
                self.pool.check_usable()
                if not self._was_asked:  # nobody counts on what a batch of the version before would look like
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
        if before is not None and (isinstance(for_reader, str) or before.difference(for_reader) is None):
            if self._why_no_item() is not None:
                before.begin_again()
            return
        assert self._stream is not None
        self.feeds = StreamFeeds(self, self.pool, self._stream, for_reader, None if before is None else before.sent)
        if before is not None:
            before.retire()
            self._old_feeds.append(before)

    def _drop_outdated(self) -> None:
        """Unload versions that no run is of any more. The pool's lock is held."""
        used = {run.version for run in self.runs.values()} | {run.version for run in self._begun if not run.is_over}
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
        placements = [self.version.sent.placement] if self._versions else []
        if feeds is not None and feeds.sent is not None:
            placements.append(feeds.sent.placement)
        shared, packed = sum(each.shared_bytes for each in placements), self._like[0].packed_items
        notes = [f"{shared:,} bytes of arrays are shared with the workers and not copied"] if shared else []
        notes += [f"copied into shared memory: {reason}" for each in placements for reason in each.copied_because]
        if packed:
            notes.append(f"{packed:,} items of the source were packed into bytes that the workers share")
        if feeds is not None:
            why = feeds.why_on_thread
            where = f"on a thread of the main process: {why}" if why else "in a separate process"
            notes.append(f"the stream is read {where}")
        if self._changes:
            times = counted(self._changes, "epoch")
            notes.append(f"{times} began with changed objects, for which workers start again{self._latest_change}")
        if not self._is_quick:
            notes.append("pickling takes long, so only a glance shows whether objects have changed as an epoch begins")
        if self._ignored:
            notes.append(
                f"{self._ignored} is not sent again: its object assigns it in each call. To send it: replace()"
            )
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


def _sent_again(nbytes: int) -> tuple[str, str]:
    """Return the first and the last line of a warning about changes of large objects."""
    first = f"These values changed, so the function and the source ({nbytes:,} bytes) were pickled again"
    last = (
        f"Only parts of objects are compared if they are larger than {_COMPARED_BYTES:,} bytes, or take more than "
        f"{_COMPARED_NS // 1_000_000} ms to pickle. Other changes may not be seen. To use all present values: "
        "loader = loader.replace()"
    )
    return first, last


def _without_data(shipment: Any) -> Any:
    """Return what is known of a shipment, without what it holds of the user's data."""
    return shipment._replace(pickled=b"", buffers=(), warnings=()) if isinstance(shipment, Shipment) else shipment
