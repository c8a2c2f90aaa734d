"""A worker process. It reads a ticket, writes its rows into the slot, and reports `Done`.

supervisor --Ticket--> worker --rows--> slot
     ^------- Done -------+
"""

from __future__ import annotations

import collections
import functools
import mmap
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence

from loaderpool.errors import add_note
from loaderpool.memory.arena import Arena, SlotFile, map_memory_file
from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.recorder import CallKind
from loaderpool.system import clock, fault_points, machine
from loaderpool.transport import reports
from loaderpool.transport.channel import Channel, ChannelClosed
from loaderpool.transport.messages import Done, Ended, Found, Ticket
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.pickling import dumps, receive
from loaderpool.transport.reports import LOST_PIPES_STATUS, describe_failure
from loaderpool.worker.bundles import Bundle, Frame, HandedOver, unpacked
from loaderpool.worker.event_loop import EventLoop
from loaderpool.worker.own_process import end_stray
from loaderpool.worker.probe import probe
from loaderpool.worker.tickets import Abandoned, MadeRows, Progress, WorkFailed
from loaderpool.worker.work import Work


class TicketQueue:
    """Tickets that have arrived and are not answered, with the files of those that have items."""

    def __init__(self) -> None:
        self.waiting: collections.deque[Ticket] = collections.deque()
        self._files: dict[int, int] = {}  # descriptor of the file with a ticket's items, by ticket
        self._begun = 0  # number of the last ticket whose calls were started ahead

    def add(self, ticket: Ticket, descriptors: Sequence[int]) -> None:
        """Add a ticket that has arrived."""
        self.waiting.append(ticket)
        if ticket.items:
            (self._files[ticket.number],) = descriptors

    def begin_ahead(self, begin: Callable[[Ticket], bool]) -> bool:
        """Start the calls of waiting tickets by `begin`, each once.

        Return False at the first ticket that must wait for its turn.
        """
        for ticket in self.waiting:
            if ticket.deaths:  # this ticket must be made alone
                return False
            if ticket.number <= self._begun:
                continue
            if not begin(ticket):
                return False
            self._begun = ticket.number
        return True

    def items_of(self, ticket: Ticket) -> HandedOver:
        """Return the positions and items that another worker has read for a ticket."""
        nbytes, buffers = ticket.items
        with memoryview(map_memory_file(self._files[ticket.number], nbytes)).cast("B") as content:
            return unpacked(content, Bundle(0, nbytes, buffers, 0), ticket.loader)

    def drop_file(self, ticket: Ticket) -> None:
        """Close the file of a ticket that was answered."""
        if (file := self._files.pop(ticket.number, None)) is not None:
            os.close(file)


class Works:
    """The `Work` of each loader, which its first ticket creates, with the form of its batches.

    Args:
        payloads: Loaders, by number of their version.
        forms: Pickled form of the batches, by loader (`Found.content`).
        make: Creates a `Work` for a number and its payload.
    """

    def __init__(
        self,
        payloads: Mapping[int, WorkerPayload],
        forms: Mapping[int, bytes],
        make: Callable[[int, WorkerPayload], Work],
    ) -> None:
        self._payloads, self._forms, self._make = payloads, dict(forms), make
        self.known: dict[int, Work] = {}
        self._lanes: dict[int, tuple[int, int]] = {}  # (loader, epoch) of each run of generators

    def take_form(self, message: Found) -> None:
        """Store the form of a loader's batches."""
        self._forms[message.loader] = message.content

    def of(self, loader: int) -> Work:
        """Return the `Work` of a loader, with the form of its batches if it is known."""
        work = self.known.get(loader)
        if work is None:
            work = self.known[loader] = self._make(loader, self._payloads[loader])
        if work.form is None and loader in self._forms:
            work.set_form(*receive(self._forms[loader], own=loader))
        return work

    def counted_as(self, loader: int) -> int:
        """Return the number under which all versions of a loader are counted: its first one's."""
        return self._payloads[loader].loader if loader in self.known else loader

    def note_lane(self, ticket: Ticket) -> None:
        """Note that generators run here for the ticket's run."""
        self._lanes[ticket.run] = ticket.loader, ticket.epoch

    def forget(self, run: int) -> None:
        """Close the generators of an ended run, unless another run continues with them."""
        place = self._lanes.pop(run, None)
        if place is not None and place not in self._lanes.values():
            self.known[place[0]].items.forget(place[1])

    def close(self) -> None:
        """Close the generators of all loaders."""
        for work in self.known.values():
            work.close()


class Worker:
    """Answers every ticket until the supervisor closes the channel.

    Runs in: the worker, on its main thread. Blocks: In `Channel.wait`, until a message arrives.

    Args:
        number: Number of the worker.
        cell: Its cell of the board.
        channel: Its end of the channel to the supervisor.
        arena: Arena with the board.
        slots: Memory file for the rows.
        payloads: Loaders that the supervisor had loaded when it forked this process.
        forms: Pickled form of the batches, by loader (`Found.content`).
    """

    def __init__(
        self,
        number: int,
        cell: int,
        channel: Channel,
        arena: Arena,
        slots: SlotFile,
        payloads: Mapping[int, WorkerPayload],
        forms: Mapping[int, bytes],
    ) -> None:
        self._number, self._cell, self._channel, self._arena, self._slots = (
            number,
            cell,
            channel,
            arena,
            slots,
        )
        self._numbers, self._base = arena.board.numbers, Board.base(cell)
        self._recorder = arena.recorder(cell, number)
        self._works = Works(payloads, forms, self._make_work)
        self._queue = TicketQueue()
        self._event_loop = EventLoop()
        self._identity = machine.file_identity(channel.fileno())

    def run(self) -> None:
        """Answer tickets until the channel ends, then close generators and coroutines."""
        self._numbers[self._base + Field.BEGUN] = 1
        try:
            self._serve()
        finally:
            self._event_loop.close()

    def _serve(self) -> None:
        while True:
            while not self._queue.waiting:
                fault_points.reach("worker.idle")
                begun_ns = clock.monotonic_ns()
                self._wait()
                self._numbers[self._base + Field.WAIT_NS] += clock.monotonic_ns() - begun_ns
                try:
                    self._read()
                except ChannelClosed:
                    self._works.close()
                    return
            self._answer(self._queue.waiting.popleft())

    def _wait(self) -> None:
        """Wait for a message. The coroutines that the user's functions have left run meanwhile."""
        if self._event_loop.is_created:
            self._event_loop.turn(None, self._channel.fileno())
        else:
            self._channel.wait()

    def _read(self) -> None:
        """Read all messages that have arrived. Never blocks."""
        while (received := self._channel.receive()) is not None:
            message = received.message
            if isinstance(message, Ticket):
                self._queue.add(message, received.descriptors)
            elif isinstance(message, Found):
                self._works.take_form(message)
            elif isinstance(message, Ended):
                self._works.forget(message.number)

    def _look_ahead(self) -> bool:
        """Start the calls of waiting tickets. Return True if more may follow.

        Called by the main thread during a ticket, while it waits for concurrent calls.

        Raises:
            Abandoned: the supervisor has closed the channel, so no result is needed any more.
        """
        try:
            self._read()
        except ChannelClosed:
            raise Abandoned from None
        # Raised further, the error would be blamed on the sample in work. Another worker gets the
        # tickets instead.
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        return self._queue.begin_ahead(self._begin)

    def _begin(self, ticket: Ticket) -> bool:
        work = self._works.known.get(ticket.loader)
        if ticket.offset < 0 or work is None:
            return False
        try:
            self._slots.prepare(ticket.offset, ticket.slot_bytes, ticket.is_fresh)
        except (MemoryError, OSError):  # `_answer` will report the error
            return False
        return work.begin(ticket, self._slots.map, ticket.offset, ticket.slot_bytes)

    def _make_work(self, loader: int, payload: WorkerPayload) -> Work:
        # All versions of a loader are counted under the number of the first one.
        calls = CallClock(self._arena.call_times, self._cell, payload.loader, self._recorder)
        progress = Progress(self._numbers, self._base, self._number, BaseException, calls)
        work = Work(payload, progress, self._arena.map, loader=loader, event_loop=self._event_loop)
        work.look_ahead, work.check = self._look_ahead, self._check_channel
        return work

    def _answer(self, ticket: Ticket) -> None:
        fault_points.reach("worker.ticket_taken")
        board, base = self._numbers, self._base
        board[base + Field.TICKET] = ticket.number
        self._recorder.ticket = ticket.number
        begun_ns = clock.monotonic_ns()
        rows = batches = 0
        answer: Done | Found
        filled: MadeRows | None = None
        try:
            if ticket.run and self._numbers[Board.mark(ticket.run)] == ticket.run:
                # This check comes first: after the run's end, the loader's memory may be reused.
                raise Abandoned
            work = self._works.of(ticket.loader)
            if work.setup is not None:
                work.ensure_setup()
            work.suspect(ticket.deaths > 0)
            for index, hung_s, exit_code in ticket.left_out:
                work.failures.exclude(ticket.epoch, index, hung_s, exit_code)
            if ticket.offset < 0:
                answer = self._look(work, ticket)
            else:
                self._slots.prepare(ticket.offset, ticket.slot_bytes, ticket.is_fresh)
                if ticket.items:
                    self._put_items(work, ticket)
                elif work.plan.lanes:
                    self._works.note_lane(ticket)
                filled = work.fill(ticket, self._slots.map, ticket.offset, ticket.slot_bytes)
                rows = filled.rows
                # The worker that makes the first row counts the batch.
                is_counted = filled.items and filled.read is None and not ticket.start
                batches = ticket.batches if is_counted else 0
                failed = pickle.dumps(filled.row_failures, 5) if filled.row_failures else b""
                answer = Done(ticket.number, filled.items, failures=failed)
        except Abandoned:
            self._works.forget(ticket.run)
            # Another ticket will get this slot, so no call may write into it any more.
            if ticket.loader in self._works.known:
                self._works.known[ticket.loader].drop(ticket)
            answer = Done(ticket.number)
        except WorkFailed as error:
            answer = Done(ticket.number, error=reports.of_sample(error.failure))
        except (MemoryError, OSError) as error:  # the slot's pages could not be reserved
            failure = describe_failure(error, epoch=ticket.epoch, worker=self._number)
            answer = Done(ticket.number, error=reports.of_sample(failure))
        took_ns = clock.monotonic_ns() - begun_ns
        self._check_channel()
        fault_points.reach("worker.before_note")
        board[base + Field.INDEX] = 0
        board[base + Field.SAMPLES] += rows
        board[base + Field.BATCHES] += batches
        board[base + Field.BUSY_NS] += took_ns
        fault_points.reach("worker.before_report")
        if isinstance(answer, Done):
            answer = answer._replace(seconds=took_ns / 1e9)
        if isinstance(answer, Done) and filled is not None and filled.is_in_file:
            self._send_file(answer, filled, ticket.epoch)
        else:
            self._channel.send(answer)
        self._queue.drop_file(ticket)
        # Cleared after the send: if the answer cannot be sent, this process ends, and the
        # supervisor blames the ticket.
        board[base + Field.TICKET] = 0
        fault_points.reach("worker.after_report")
        if ticket.offset < 0:
            self._recorder.note_call(begun_ns, begun_ns + took_ns, 0, CallKind.PROBE)
            return
        has_failed = isinstance(answer, Done) and bool(answer.error)
        of = (
            self._works.counted_as(ticket.loader),
            ticket.run,
            ticket.epoch,
            ticket.batch,
            ticket.batches,
        )
        self._recorder.note_ticket(
            begun_ns,
            begun_ns + took_ns,
            (*of, ticket.start, ticket.stop, ticket.deaths, has_failed),
        )

    def _put_items(self, work: Work, ticket: Ticket) -> None:
        try:
            work.items.put(*self._queue.items_of(ticket))
        except work.failures.catches as error:
            add_note(error, "while items of a generator were unpickled, which another worker read")
            raise work.failures.of(error, ticket.epoch) from None

    def _look(self, work: Work, ticket: Ticket) -> Found:
        found = probe(work, ticket.epoch, work.plan_of(ticket), ticket.feed)
        content = dumps(found)
        return Found(ticket.number, ticket.loader, content, found.elapsed_ns / 1e9)

    def _send_file(self, answer: Done, filled: MadeRows, epoch: int) -> None:
        """Send an answer with a file: a batch that did not fit its slot, or items for another
        worker.
        """
        try:
            batch, read = filled.oversize, filled.read
            if batch is not None:
                answer = answer._replace(oversize=batch.nbytes)
                self._channel.send_contents(
                    answer, batch.nbytes, lambda buffer: batch.write(buffer, 0)
                )
            elif read is not None:
                answer = answer._replace(items=(read.nbytes, read.buffers))
                self._channel.send_contents(answer, read.nbytes, functools.partial(_write, read))
        except (MemoryError, OSError) as error:  # no memory or descriptor is left
            failure = describe_failure(error, epoch=epoch, worker=self._number)
            self._channel.send(Done(answer.ticket, error=reports.of_sample(failure)))

    def _check_channel(self) -> None:
        """End this process if it is a fork by the user's code, or if its channel was closed.

        The user's code may have closed the descriptor, or replaced it by another file.
        """
        end_stray()
        if machine.file_identity(self._channel.fileno()) != self._identity:
            os._exit(LOST_PIPES_STATUS)


def _write(read: Frame, file: mmap.mmap) -> None:
    with memoryview(file) as view:  # otherwise the mapping could not be closed
        read.write_into(view)
