"""One loader's batches out of a pool: its ring of slots, its runs, and what the supervisor tells about both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from loaderpool.attachments import Attachment, read_attachment
from loaderpool.config import LoaderConfig
from loaderpool.errors import ClosedError, LoaderpoolError, MemoryLimitError
from loaderpool.failures import lost_error, sample_error, setup_error
from loaderpool.memory.extents import Extent
from loaderpool.memory.form import BatchForm, UnitKind, batch_form
from loaderpool.messages import Control, Notice, Words, join32
from loaderpool.plan.order import Plan
from loaderpool.pool_run import PoolRun
from loaderpool.ring import Ring, plan_ring
from loaderpool.session import Session
from loaderpool.spec import ElementSpec
from loaderpool.spec_choice import batch_bytes_like, choose_spec
from loaderpool.supervisor.loading import put_shipment
from loaderpool.supervisor.shipping import ship
from loaderpool.worker.jobs import Probe

__all__ = ["PoolEngine"]

# Whoever holds the lock gives it back in milliseconds; but a close may be a finalizer, which must not wait for ever.
_LOCK_TIMEOUT_S = 1.0


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
            self.session.wait_for(lambda: self._probe is not None or self._make_error is not None or self._is_closed)
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
