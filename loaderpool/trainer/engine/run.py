"""A run: what the supervisor was asked for under one number, and its answers.

A run that gives slots back, or that goes on elsewhere, ends its run and begins another at the first batch that was
not taken. Late answers find the old run by its number, and only give their slots back.
"""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING

from loaderpool.errors import LoaderpoolError
from loaderpool.memory.extents import Extent
from loaderpool.plan.base import BasePlan, Start
from loaderpool.system import clock
from loaderpool.trainer.engine.reorder_buffer import Arrived, ReorderBuffer
from loaderpool.trainer.engine.run_context import RunContext
from loaderpool.trainer.session.remote_errors import lost_error, sample_error
from loaderpool.transport.messages import Control, Notice, Status, Words, join32, split32
from loaderpool.transport.pickling import put_object
from loaderpool.transport.pipes import Attachment, read_attachment
from loaderpool.transport.reports import Failure, LostReport, Verdict

if TYPE_CHECKING:
    from loaderpool.trainer.stream.feed import Feed

# Keys of completions kept to recognise a second one of the same work; more than can ever be outstanding at once.
_SEEN_KEYS = 8192
_FINISHED = int(Status.FINISHED)
_LOW = 0xFFFFFFFF  # of two numbers that `join32` has put into one word


class Run:
    """Tickets' answers under one number, from RUN_BEGIN to RUN_ENDED.

    Args:
        context: of the loader whose batches they are.
        number: of the run, as the supervisor knows it.
        first_epoch: from whose first batch batches are counted.
        plan: of its batches.
        buffer: where they wait.
        feed: where the items of its batches come from, where the source is a stream.
    """

    def __init__(
        self,
        context: RunContext,
        number: int,
        first_epoch: int,
        plan: BasePlan,
        buffer: ReorderBuffer,
        feed: Feed | None,
    ) -> None:
        self._context, self._session, self._plan = context, context.session, plan
        # As the supervisor is told them: a plan computes them again for who asks.
        self._per_epoch, self._full_batches = plan.batches_per_epoch, plan.full_batches
        self._rows_vary, self._most_rows, self._last_rows = plan.rows_vary, plan.most_rows, plan.last_rows
        self.number = number
        self._first_epoch = first_epoch
        self.buffer = buffer
        self.feed = feed
        self.is_over = self._is_tidy = False
        self.lent: dict[int, None] = {}  # slots that the consumer looks at; changed by finalizers, on any thread
        self._parts: dict[int, Arrived] = {}  # batches of which some rows are there
        self._seen: dict[tuple[int, int], None] = {}
        self._start: Extent | None = None  # where workers read the beginning of its epoch

    @property
    def slots_ready(self) -> int:
        """How many slots have batches that wait to be taken. Runs in: any thread, without the lock."""
        return self.buffer.waiting

    def place_start(self, start: Start) -> tuple[int, int]:
        """What tells workers where its epoch begins: a position and 0, or an offset in the arena and bytes.

        Ownership: `forget` gives the arena's bytes back.
        """
        if isinstance(start, int):
            return start, 0
        self._start, nbytes = put_object(self._session.arena, start)
        return self._start.offset, nbytes

    def forget(self) -> None:
        """No worker will read anything of it any more. The session's lock is held."""
        start, self._start = self._start, None
        if start is not None:
            self._session.arena.give_back(start)

    # ---- ending ----

    def end(self) -> None:
        """The consumer abandoned the rest. Never blocks; may run in a finalizer, and twice."""
        session = self._session
        if not self.is_over:
            self.is_over = True
            if session.is_foreign:  # the run is our parent's, and goes on there
                return
            # Workers see this before their next row; the rest waits for the thread that has the lock.
            session.arena.board.abandon(self.number)
            session.todo.append(self._tidy)
            session.run_todo()

    def end_now(self) -> None:
        """`end` and all that follows from it, and nothing that others have left to be done. The lock is held."""
        self.is_over = True
        self._session.arena.board.abandon(self.number)
        self._tidy()

    def _tidy(self) -> None:
        if self._is_tidy:
            return
        self._is_tidy = True
        for arrived in self.buffer.clear():
            self.give_back(arrived)
        if not self._session.is_closed:
            self._session.send(Control.RUN_END, self.number)

    def give_back(self, arrived: Arrived) -> None:
        """It is abandoned: its slot is free again."""
        if arrived.slot is not None:
            self._context.layout.ring.lender.give_back(arrived.slot, arrived.ticket)

    # ---- Listener; the session's lock is held ----

    def on_notice(self, words: Words, attachment: Attachment) -> None:
        """A notice about this run."""
        kind = words[0]
        if kind == Notice.UNSURE:
            self.on_unsure(words)
        elif kind == Notice.RUN_ENDED:
            self.forget()
            self._context.owner.on_run_ended(self)

    def on_completion(self, words: Words, attachment: Attachment) -> None:
        """A ticket was answered. The session's lock is held."""
        _, _, _, first, count_attempt, row_range, slot, status_worker = words
        row_start, row_stop = split32(row_range)
        key = (first, row_start)
        if key in self._seen:  # answered before: by a worker that died after it had sent this
            return
        self._seen[key] = None
        if len(self._seen) > _SEEN_KEYS:
            del self._seen[next(iter(self._seen))]
        status = status_worker & _LOW
        if self.feed is not None:
            rows = self.feed.rows_of(first)
        elif self._rows_vary:
            rows = row_stop - row_start  # its tickets are of whole batches, which tell their rows themselves
        else:
            rows = self._most_rows if first % self._per_epoch < self._full_batches else self._last_rows
        arrived = self._parts.pop(first, None)
        if arrived is None:
            arrived = Arrived(first, count_attempt & _LOW, rows, slot)
        if words[1] > arrived.ticket:  # the supervisor may answer for a part that had no ticket yet: 0
            arrived.ticket = words[1]
        if status == _FINISHED:
            if attachment:
                arrived.row_failures = read_attachment(attachment)
        elif status in (Status.FAILED, Status.LOST):
            report = read_attachment(attachment)
            if isinstance(report, LostReport) and report.verdict is Verdict.HOST:
                report = self._naming(report, first, arrived.count)
            if arrived.make_error is None or row_start < arrived.error_row:
                make = sample_error if status == Status.FAILED else lost_error
                arrived.make_error, arrived.error_row = functools.partial(make, report), row_start
            if self._redo_batches_before(arrived, words[1], report):
                return
        elif status == Status.ABANDONED and not self.is_over:  # never the slot's bytes, wherever the error is
            text = f"Batch {first} was lost although it is still needed. This is a bug in loaderpool; please report it."
            arrived.make_error = functools.partial(LoaderpoolError, text)
        elif status == Status.OVERSIZE and isinstance(attachment, tuple):
            mapped, nbytes, whole = attachment
            arrived.oversize = (mapped, nbytes)
            if whole > nbytes:
                arrived.row_failures = pickle.loads(bytes(memoryview(mapped)[nbytes:whole]))
        arrived.rows_done += row_stop - row_start
        if arrived.rows_done < rows:
            self._parts[first] = arrived
            return
        arrived.arrived_ns = clock.monotonic_ns()
        if self.is_over:
            self.give_back(arrived)
        elif not self.buffer.put(arrived):
            self.give_back(arrived)
            if self.feed is not None:
                self.feed.take(range(first, first + arrived.count), self.buffer.done_before)

    def on_unsure(self, words: Words) -> None:
        """A worker died while it sent a completion over the socket (PROTO-6). The session's lock is held.

        If it was sent it is here by now, and the slot is ours; if not, no process has it.
        """
        _, ticket, _, first, _, row_range, slot, _ = words
        if (first, split32(row_range)[0]) in self._seen:
            return
        if self.is_over:
            self.on_completion((*words[:7], join32(Status.ABANDONED, 0)), None)
        else:
            self._session.send(Control.REDO, ticket, slot)

    def _naming(self, report: LostReport, first: int, count: int) -> LostReport:
        """Return what is told of hosts that died, with the batches over which they did and what these are made of."""
        batch = first % self._per_epoch
        if not self._plan.begins_at:  # of the rest of an epoch batches are counted from there
            report = report._replace(batches=range(batch, batch + count))
        if self.feed is not None or self._plan.lanes:  # of these there is no index
            return report
        positions = self._plan.positions_of(report.epoch, batch, count)[:1000]
        return report._replace(indices=tuple(self._plan.indices(report.epoch, positions)))

    def _redo_batches_before(self, arrived: Arrived, ticket: int, report: Failure | LostReport) -> bool:
        """Whether a chunk failed behind its first batch: those before are made again, and the error waits for its turn.

        Otherwise how much is delivered before an error would hang on how large chunks happened to be.
        """
        if arrived.count == 1 or arrived.slot is None or self.is_over or not self._context.is_deterministic:
            return False
        plan = self._plan
        epoch, batch = divmod(arrived.first, plan.batches_per_epoch)
        epoch += self._first_epoch
        positions = plan.positions_of(epoch, batch, arrived.count)
        position = report.position if isinstance(report, Failure) else None
        if position is not None:
            row = positions.tolist().index(position)
        elif report.index is not None:
            row = plan.indices(epoch, positions).index(report.index)
        else:
            return False
        before, rows_before = 0, plan.rows(epoch, batch)
        while rows_before <= row:
            before += 1
            rows_before += plan.rows(epoch, batch + before)
        if not before:
            return False
        behind = arrived.first + before
        self.buffer.put(Arrived(behind, 1, arrived.rows, slot=None, make_error=arrived.make_error))
        del self._seen[arrived.first, 0]
        self._session.send(Control.REDO, ticket, arrived.slot, before)
        return True
