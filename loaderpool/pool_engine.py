"""One loader's batches out of a pool: its ring of slots, its runs, and what the supervisor tells about both."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from loaderpool import clock
from loaderpool.config import LoaderConfig
from loaderpool.delivery import Delivery, aligned_empty
from loaderpool.errors import ClosedError, LoaderpoolError, MemoryLimitError
from loaderpool.failures import lost_error, sample_error, setup_error
from loaderpool.memory.extents import Extent
from loaderpool.memory.form import BatchForm, UnitKind, batch_form
from loaderpool.messages import Control, Notice, Status, Words, join32, split32
from loaderpool.plan.order import Plan
from loaderpool.ring import Ring, plan_ring
from loaderpool.session import Attachment, Session, read_attachment
from loaderpool.spec import ElementSpec
from loaderpool.spec_choice import batch_bytes_like, choose_spec
from loaderpool.supervisor.loading import put_shipment
from loaderpool.supervisor.shipping import ship
from loaderpool.worker.failures import Failure, LostReport, RowFailure
from loaderpool.worker.work import Probe

__all__ = ["PoolEngine", "PoolRun"]

# Keys of completions kept to recognise a second one of the same work; more than can ever be outstanding at once.
_SEEN_KEYS = 8192
# Whoever holds the lock gives it back in milliseconds; but a close may be a finalizer, which must not wait for ever.
_LOCK_TIMEOUT_S = 1.0


@dataclasses.dataclass(slots=True)
class _Arrival:
    """A slot whose batches are all there (or whose error is)."""

    first: int
    count: int
    rows: int  # of each batch
    slot: int | None  # None: it holds another arrival
    rows_done: int = 0
    error: LoaderpoolError | None = None
    error_row: int = 0
    oversize: tuple[Any, int] | None = None  # mapped memory file and its length
    row_failures: tuple[RowFailure, ...] = ()


class PoolEngine:
    """Makes a loader's batches in a session's workers.

    Args:
        session: the running supervisor.
        payload: what `Work` needs; pickled here, once.
        config: the loader's settings.
        plan: its plan.
        unit: what one call of the function makes.
        given_spec: the user's element_spec.
        first_epoch: the epoch whose first sample is made to find the spec.

    Raises:
        UnpicklableError: function or source cannot travel.
        MemoryLimitError: no shared memory for what they hold.
    """

    def __init__(
        self,
        session: Session,
        payload: Mapping[str, Any],
        config: LoaderConfig,
        plan: Plan,
        unit: UnitKind,
        given_spec: ElementSpec | None,
        first_epoch: int,
    ) -> None:
        self.session, self.config, self.plan, self.unit = session, config, plan, unit
        self._given_spec = given_spec
        self._first_epoch = first_epoch
        # Makes the error that ended the loader, anew for each who meets it: a kept exception would keep, through its
        # traceback, every frame that it passed, and so the loader itself.
        self._make_error: Callable[[], LoaderpoolError] | None = None
        self._is_probe_error = self._was_told = False
        self._probe: Probe | None = None
        self._form: BatchForm | None = None
        self._layout_extent: Extent | None = None
        self._updates: list[Extent] = []
        self._is_closed = False
        self.runs: dict[int, PoolRun] = {}
        self.ring: Ring | None = None
        self.batches_lent = self.batches_copied = self.batches_oversize = 0
        shipment = ship(dict(payload))
        self._by_reference = not shipment.is_framework_free  # updates must find the classes that the payload brought
        with session.lock:
            self.number = session.take_number()
            self._extents, offset, nbytes = put_shipment(session.arena, shipment)
            session.listeners[self.number] = self
            session.order(Control.LOAD, *self._load_words(offset, nbytes, first_epoch))

    def _load_words(self, offset: int, nbytes: int, first_epoch: int) -> tuple[int, ...]:
        config = self.config
        timeout_ns = int((config.timeout_s or 0) * 1e9)
        may_exclude = config.on_error.action != "raise" and self.unit == "sample"
        deaths = config.max_restarts_per_item
        return (self.number, offset, nbytes, first_epoch + 1, deaths, timeout_ns, int(may_exclude))

    # ---- Engine ----

    def form(self) -> BatchForm:
        """The batches' form. Blocks until the first sample has been made."""
        if self._form is None:
            self.session.check_owner()
            self._probe_again()
            self.session.wait_for(
                lambda: self._probe is not None or self._make_error is not None or self._is_closed
            )
            with self.session.lock:
                self.check_open()
                self._raise_error()
                if self._form is None:
                    self._decide_form()
        assert self._form is not None
        return self._form

    def begin(self, first_epoch: int, start: int, limit: int) -> PoolRun:
        """Begin a run at batch `start` of the first epoch.

        Raises:
            MemoryLimitError: other runs are active and the budget has no slot for this one.
        """
        self.form()
        session = self.session
        with session.lock:
            session.run_todo()
            session.check_usable()
            self._raise_error()
            quota = self._quota_for_a_new_run()
            run = PoolRun(self, session.take_number(), first_epoch, start, limit, quota)
            self.enter(run)
            return run

    def enter(self, run: PoolRun) -> None:
        """Have the supervisor begin a run where it stands. The session's lock is held."""
        self.runs[run.number] = run
        self.session.runs[run.number] = self
        per_epoch = self.plan.batches_per_epoch
        self.session.order(
            Control.RUN_BEGIN, run.number, self.number, run.first_epoch, per_epoch, run.next, run.limit, run.quota
        )

    def update(self, changes: dict[str, Any]) -> None:
        """Send changed attributes of the source's object; batches begun from now on see them."""
        shipment = ship(changes, by_reference=self._by_reference)
        with self.session.lock:
            extents, offset, nbytes = put_shipment(self.session.arena, shipment)
            self._updates += extents
            self.session.order(Control.UPDATE, self.number, offset, nbytes)

    def close(self) -> None:
        """Unload the loader from its pool. Runs in: any thread, also in a finalizer."""
        if self._is_closed or self.session.is_foreign:
            return
        self._is_closed = True
        self.session.todo.append(self._unload)
        if self.session.lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self.session.run_todo()
                self.session.wake()
            finally:
                self.session.lock.release()

    # ---- form, ring and quota ----

    def _decide_form(self) -> None:
        assert self._probe is not None
        session, config, plan = self.session, self.config, self.plan
        spec = choose_spec(self._probe.spec, self._given_spec, config, self.unit)
        form = batch_form(
            spec,
            self.unit,
            batch_size=config.batch_size,
            batch_bytes_seen=batch_bytes_like(self._probe, config, self.unit),
            may_leave_rows_out=config.on_error.action == "skip",
            may_replace_rows=config.on_error.action == "replace",
        )
        ring_plan = plan_ring(form, workers=session.workers_wanted, memory_limit=config.memory_limit)
        form = ring_plan.form
        self.ring = Ring(session, self, self.number, ring_plan)
        self._layout_extent, nbytes = session.arena.put_object((form, self._given_spec is not None))
        last_rows = plan.rows(plan.batches_per_epoch - 1)
        batch_ns = self._probe.elapsed_ns * form.batch_rows // max(1, self._probe.rows)
        session.order(
            Control.LAYOUT,
            self.number,
            self._layout_extent.offset,
            nbytes,
            join32(form.max_chunk, form.can_split),
            join32(plan.rows(0) if plan.full_batches else form.batch_rows, last_rows),
            plan.full_batches,
            min(batch_ns, 2**62),
        )
        self._form = form

    def _quota_for_a_new_run(self) -> int:
        """Slots for a new run: all, or where others are active some that these cannot take (rule 7).

        The ring grows for it, or, where the budget is spent, the others give up part of theirs.
        """
        assert self.ring is not None
        ring = self.ring
        active = [run for run in self.runs.values() if not run.is_over]
        if not active:
            return ring.count
        # What the consumer keeps of other passes serves nobody: what the active ones hold is among the rest.
        usable = ring.unlent_count(but={slot for run in active for slot in run.lent})
        for run in active:
            if run.quota > usable:
                run.set_quota(usable)
        spare = usable - sum(run.quota for run in active)
        wanted = ring.slots_of_another_run()
        if spare < wanted:
            spare += ring.make_room(wanted - max(0, spare))
        if spare >= 1:
            return spare
        fixed = [run for run in active if not run.can_restart]
        # What was lent by a run that starts anew is no longer its.
        usable = ring.unlent_count(but={slot for run in fixed for slot in run.lent})
        share = (usable - sum(run.quota for run in fixed)) // (len(active) - len(fixed) + 1)
        if share < 1:
            raise MemoryLimitError(
                f"{len(active)} iterators of this loader are active and memory_limit leaves no slot for another: each "
                f"needs at least one of {ring.slot_bytes:,} bytes. Raise memory_limit, or end the other iterators"
            )
        for run in active:
            if run.can_restart:
                run.restart(share)
        return share

    def reserve(self) -> int:
        """Slots of a run that are never lent, so that workers always have somewhere to write."""
        assert self.ring is not None
        return max(1, min(self.session.workers_wanted + 1, self.ring.count // 2))

    # ---- Listener; the session's lock is held ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this loader."""
        kind = words[0]
        if kind == Notice.COMPLETION:
            run = self.runs.get(words[2])
            if run is not None:
                run.on_completion(words, attachment)
        elif kind == Notice.RUN_ENDED:
            self.runs.pop(words[1], None)
        elif kind == Notice.SLOT_RETIRED:
            assert self.ring is not None
            self.ring.retired(words[1])
        elif kind == Notice.SPEC:
            self._probe = read_attachment(attachment)
        elif kind == Notice.SPEC_FAILED:
            self._make_error = functools.partial(sample_error, read_attachment(attachment))
            self._is_probe_error = True
        elif kind == Notice.LOAD_FAILED:
            failure, advice = read_attachment(attachment)
            what = "the supervisor could not load function and source"
            self._make_error = functools.partial(setup_error, failure, what, advice, place="the supervisor")
        elif kind == Notice.LOST:
            self._make_error = functools.partial(lost_error, read_attachment(attachment))
            self._is_probe_error = words[1] != 0
        elif kind == Notice.UNLOADED:
            self._forget()

    def on_broken(self) -> None:
        """The supervisor died: whoever waits is told by the session."""

    def check_open(self) -> None:
        """Raise where this loader, or the pool under it, was closed."""
        if self._is_closed or self.session.is_closed:
            raise ClosedError("this Loader, or its pool, is closed; make a new one")

    def raise_error(self) -> None:
        """Raise what ended the whole loader, if anything did."""
        self._raise_error()

    @property
    def has_error(self) -> bool:
        """Whether the whole loader failed."""
        return self._make_error is not None

    def _raise_error(self) -> None:
        if self._make_error is not None:
            self._was_told = True
            raise self._make_error()

    def _probe_again(self) -> None:
        """The first sample failed and somebody was told: try it anew, as any other sample is in the next pass."""
        with self.session.lock:
            if self._is_probe_error and self._was_told:
                self._make_error, self._is_probe_error, self._was_told = None, False, False
                self.session.order(Control.PROBE, self.number, self._first_epoch)

    def _unload(self) -> None:
        for run in list(self.runs.values()):
            run.end_now()
        if not self.session.is_closed:
            self.session.order(Control.UNLOAD, self.number)

    def _forget(self) -> None:
        arena = self.session.arena
        self.session.listeners.pop(self.number, None)
        for extent in [*self._extents, *self._updates, *filter(None, [self._layout_extent])]:
            arena.give_back(extent)
        self._extents, self._updates, self._layout_extent = [], [], None
        if self.ring is not None:
            self.ring.give_back_all()


class PoolRun:
    """Batches of consecutive epochs as the workers finish them, handed out in order (or not, if not deterministic)."""

    def __init__(self, engine: PoolEngine, number: int, first_epoch: int, start: int, limit: int, quota: int) -> None:
        self._engine = engine
        self.number = number
        self.first_epoch = first_epoch
        self.quota = quota
        self.is_over = False
        self.wait_ns = 0
        self.next = start  # the batch that is delivered next; unordered: how many were, from `start` on
        self.limit = limit
        self._is_ordered = engine.config.deterministic
        self._ready: dict[int, _Arrival] = {}  # by first batch
        self._unordered: dict[int, collections.deque[_Arrival]] = collections.defaultdict(collections.deque)  # by epoch
        self._parts: dict[int, _Arrival] = {}  # batches of which some rows are there
        self._seen: dict[tuple[int, int], None] = {}
        self._lent: dict[int, None] = {}

    def take(self) -> Delivery:
        """The next batches. Blocks until they are there.

        Raises:
            LoaderpoolError: what the user's function raised, or what ended the pool.
        """
        engine, session = self._engine, self._engine.session
        session.check_owner()
        if session.todo:
            session.run_todo()
        if not self._is_ready():
            started = clock.monotonic_ns()
            try:
                session.wait_for(lambda: self._is_ready() or engine.has_error or self.is_over)
            finally:
                self.wait_ns += clock.monotonic_ns() - started
        with session.lock:
            engine.check_open()  # first: batches that are ready do not outlive the close by chance
            if not self._is_ready():
                engine.raise_error()
                session.check_usable()
                raise StopIteration
            arrival = self._pop()
            if arrival.error is not None:
                self._give_back(arrival)
                raise arrival.error
            return self._deliver(arrival)

    def extend(self, limit: int) -> None:
        """More batches are wanted, or may be made ahead."""
        self.limit = limit
        self._engine.session.order(Control.RUN_EXTEND, self.number, limit, self.quota)

    @property
    def lent(self) -> AbstractSet[int]:
        """Slots of this run that the consumer looks at."""
        return self._lent.keys()

    def set_quota(self, quota: int) -> None:
        """Hold at most so many slots from now on. The session's lock is held."""
        self.quota = quota
        self.extend(self.limit)

    @property
    def can_restart(self) -> bool:
        """Whether what is not delivered yet can be made again: only in order is it known what that is."""
        return self._is_ordered

    def restart(self, quota: int) -> None:
        """Give back every slot that is not delivered, and have those batches made again in fewer slots.

        The session's lock is held. A consumer that waits goes on waiting: the batches will be the same.
        """
        engine, session = self._engine, self._engine.session
        old = PoolRun(engine, self.number, self.first_epoch, self.next, self.limit, self.quota)
        old._ready, old._parts, old._seen = self._ready, self._parts, self._seen
        engine.runs[old.number] = old  # takes its late completions
        old._lent = self._lent
        self._ready, self._parts, self._seen, self._lent = {}, {}, {}, {}
        old.end()
        self.number, self.quota = session.take_number(), quota
        engine.enter(self)

    def end(self) -> None:
        """Nobody wants the rest. Never blocks; may run in a finalizer, and twice."""
        if not self.is_over:
            self.is_over = True
            if self._engine.session.is_foreign:  # the run is our parent's, and goes on there
                return
            # Workers see this before their next row; the rest waits for whoever has the lock.
            self._engine.session.arena.board.abandon(self.number)
            self._engine.session.todo.append(self._tidy)
            self._engine.session.run_todo()

    def end_now(self) -> None:
        """`end`, with the lock held."""
        self.end()

    def _tidy(self) -> None:
        for arrival in [*self._ready.values(), *(a for queue in self._unordered.values() for a in queue)]:
            self._give_back(arrival)
        self._ready.clear()
        self._unordered.clear()
        if not self._engine.session.is_closed:
            self._engine.session.order(Control.RUN_END, self.number)

    # ---- arriving ----

    def on_completion(self, words: Words, attachment: Attachment) -> None:
        """A ticket of this run was answered. The session's lock is held."""
        _, _, _, first, count_attempt, row_range, slot, status_worker = words
        row_start, row_stop = split32(row_range)
        key = (first, row_start)
        if key in self._seen:  # answered before: by a worker that died after it had sent this
            return
        self._seen[key] = None
        if len(self._seen) > _SEEN_KEYS:
            del self._seen[next(iter(self._seen))]
        status, _ = split32(status_worker)
        rows = self._engine.plan.rows(first % self._engine.plan.batches_per_epoch)
        arrival = self._parts.pop(first, None)
        if arrival is None:
            arrival = _Arrival(first, split32(count_attempt)[0], rows, slot)
        if status in (Status.FAILED, Status.LOST):
            report = read_attachment(attachment)
            error = sample_error(report) if status == Status.FAILED else lost_error(report)
            if arrival.error is None or row_start < arrival.error_row:
                arrival.error, arrival.error_row = error, row_start
            if self._redo_batches_before(arrival, words[1], report):
                return
        elif status == Status.OVERSIZE and isinstance(attachment, tuple):
            mapped, nbytes, whole = attachment
            arrival.oversize = (mapped, nbytes)
            if whole > nbytes:
                arrival.row_failures = pickle.loads(bytes(memoryview(mapped)[nbytes:whole]))
        elif attachment:
            arrival.row_failures = read_attachment(attachment)
        arrival.rows_done += row_stop - row_start
        if arrival.rows_done < rows:
            self._parts[first] = arrival
        elif self.is_over:
            self._give_back(arrival)
        elif self._is_ordered:
            self._ready[first] = arrival
        else:
            self._unordered[first // self._engine.plan.batches_per_epoch].append(arrival)

    def _redo_batches_before(self, arrival: _Arrival, ticket: int, report: Failure | LostReport) -> bool:
        """Whether a chunk failed behind its first batch: those before are made again, and the error waits for its turn.

        Otherwise how much is delivered before an error would hang on how large chunks happened to be.
        """
        if arrival.count == 1 or arrival.slot is None or self.is_over or not self._is_ordered:
            return False
        plan = self._engine.plan
        epoch, batch = divmod(arrival.first, plan.batches_per_epoch)
        positions = plan.positions_of(batch, arrival.count).tolist()
        position = report.position if isinstance(report, Failure) else None
        if position is not None:
            before = positions.index(position) // arrival.rows
        elif report.index is not None:
            indices = plan.indices(self.first_epoch + epoch, plan.positions_of(batch, arrival.count))
            before = indices.index(report.index) // arrival.rows
        else:
            return False
        if not before:
            return False
        behind = arrival.first + before
        self._ready[behind] = _Arrival(behind, 1, arrival.rows, slot=None, error=arrival.error)
        del self._seen[arrival.first, 0]
        self._engine.session.order(Control.REDO, ticket, arrival.slot, before)
        return True

    def _give_back(self, arrival: _Arrival) -> None:
        ring = self._engine.ring
        if ring is not None and arrival.slot is not None:
            ring.lender.give_back(arrival.slot)

    def _is_ready(self) -> bool:
        if self._is_ordered:
            return self.next in self._ready
        return bool(self._unordered.get(self.next // self._engine.plan.batches_per_epoch))

    def _pop(self) -> _Arrival:
        if self._is_ordered:
            arrival = self._ready.pop(self.next)
        else:
            epoch = self.next // self._engine.plan.batches_per_epoch
            arrival = self._unordered[epoch].popleft()
        self.next += arrival.count
        return arrival

    # ---- delivering ----

    def _deliver(self, arrival: _Arrival) -> Delivery:
        engine = self._engine
        ring, form = engine.ring, engine._form
        assert ring is not None and form is not None and arrival.slot is not None
        if arrival.oversize is not None:
            mapped, nbytes = arrival.oversize
            ring.lender.give_back(arrival.slot)
            ring.outgrown(nbytes // arrival.count * form.max_chunk)
            engine.batches_oversize += arrival.count
            anchor = np.ndarray((nbytes,), np.uint8, buffer=mapped)
        else:
            extent = ring.extents[arrival.slot]
            if self._may_lend(ring):
                anchor = ring.lender.lend(arrival.slot, extent.offset, extent.nbytes, self._lent)
                engine.batches_lent += arrival.count
            else:
                shown = engine.session.arena.anchor(extent.offset, extent.nbytes)
                nbytes = form.used_bytes(shown, arrival.rows * arrival.count)
                anchor = aligned_empty(nbytes)
                anchor[:] = shown[:nbytes]
                ring.lender.give_back(arrival.slot)
                engine.batches_copied += arrival.count
        return Delivery(form, anchor, arrival.first, arrival.count, arrival.rows, arrival.row_failures)

    def _may_lend(self, ring: Ring) -> bool:
        """Lend-or-copy: enough slots must stay for the workers, for this run and for all of them."""
        reserve = self._engine.reserve()
        if len(self._lent) < self.quota - reserve and len(ring.lender.lent) < ring.count - reserve:
            return True
        if len(self._lent) < ring.count and ring.grow_by_one():
            self.quota += 1
            self.extend(self.limit)
            return len(ring.lender.lent) < ring.count - reserve
        return False


