"""One run through a pool: tickets' answers as they arrive, batches in order as they are taken."""

from __future__ import annotations

import collections
import dataclasses
import pickle
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool import clock
from loaderpool.attachments import Attachment, read_attachment
from loaderpool.delivery import Delivery, aligned_empty
from loaderpool.errors import LoaderpoolError
from loaderpool.failures import lost_error, sample_error
from loaderpool.messages import Control, Status, Words, split32
from loaderpool.ring import Ring
from loaderpool.worker.failures import Failure, LostReport, RowFailure

if TYPE_CHECKING:
    from loaderpool.pool_engine import PoolEngine

__all__ = ["PoolRun"]

# Keys of completions kept to recognise a second one of the same work; more than can ever be outstanding at once.
_SEEN_KEYS = 8192


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
