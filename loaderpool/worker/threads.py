"""Threads of one worker that make several samples at once, for functions that wait rather than compute.

    main thread   begin(job) ──calls──▶ [queue] ──▶ thread 1 … T     each with random streams of its own
         ▲                                              │
         └── takes the results in the order of rows ◀───┘

Only the calls of the user's functions are made on the threads. What is made of their results (conversion, the error
policy, rows in a slot), and what is said to others, is the main thread's, and the same as without threads.

Calls begin in the order in which they were put, tickets one after the other, so the call that the main thread waits for
is the one that has run longest: it is what the board names (docs/internals/architecture.md, "Threads").
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from loaderpool.memory.board import Board
from loaderpool.system import clock
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.calls import Calls
from loaderpool.worker.jobs import Abandoned, Job
from loaderpool.worker.progress import Progress

# How often the main thread, waiting for a call, looks whether there are more tickets whose calls could begin. Longer:
# threads idle where tickets come late; shorter: the looks themselves cost.
_LOOK_S = 0.01

# One call of the function: the row that it is for (of a call that makes a batch: its first), positions and indices.
Planned = tuple[int, Sequence[int], Sequence[int]]


class _Call:
    """One call, on its way from the main thread to another and back."""

    __slots__ = (
        "done",
        "ended_ns",
        "error",
        "indices",
        "is_done",
        "positions",
        "result",
        "row",
        "started_ns",
        "thread",
        "ticket_calls",
    )

    def __init__(self, ticket_calls: TicketCalls, row: int, positions: Sequence[int], indices: Sequence[int]) -> None:
        self.ticket_calls, self.row, self.positions, self.indices = ticket_calls, row, positions, indices
        self.result: Any = None
        self.error: BaseException | None = None
        self.started_ns = self.ended_ns = self.thread = 0
        self.is_done = False  # the main thread knows it
        self.done = threading.Lock()  # open once the call was made, or will not be
        self.done.acquire()

    def make(self, calls: Calls) -> None:
        """Make the call; the main thread goes on, whatever comes of it. Runs in: one of the worker's threads."""
        ticket_calls = self.ticket_calls
        if ticket_calls.is_unwanted:
            self.error = Abandoned()
        else:
            self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
            try:
                self.result = ticket_calls.make(calls, self)
            except BaseException as error:
                end_stray(error)
                self.error = error
            self.ended_ns = clock.monotonic_ns()
        self.done.release()


class TicketCalls:
    """The calls of one ticket, for the code that makes rows of their results, in the place of `Calls`.

    Args:
        worker_threads: whose threads make them.
        job: what the ticket is about.
        planned: the calls, in the order in which they begin.
        read: gives the item of a source index; None: the source does.
        arrays: the components' arrays over the slot, for a function that takes `out`.
        kept: of a call that was made already, by its row: the result.
    """

    needs_positions = False

    def __init__(
        self,
        worker_threads: WorkerThreads,
        job: Job,
        planned: Iterator[Planned],
        read: Callable[[int], Any] | None,
        arrays: Sequence[npt.NDArray[Any]] | None,
        kept: Mapping[int, Any],
    ) -> None:
        self._worker_threads, self._epoch, self._read, self._arrays = worker_threads, job.epoch, read, arrays
        self._numbers, self._mark, self._run = worker_threads.progress.numbers, Board.mark(job.run), job.run
        self._is_over = False
        self.look_ahead: Callable[[], bool] | None = None
        self.calls: dict[int, _Call] = {}
        for row, positions, indices in planned:
            call = self.calls[row] = _Call(self, row, positions, indices)
            if row in kept:
                call.result, call.is_done = kept[row], True

    # ---- in the worker's threads ----

    @property
    def is_unwanted(self) -> bool:
        """Whether no further call shall begin."""
        return self._is_over or bool(self._numbers[self._mark] == self._run)

    def make(self, calls: Calls, call: _Call) -> Any:
        """Return what the call gives; raises whatever it raises."""
        if self._read is not None:
            calls.read_by(self._read)
        if self._worker_threads.makes_units:
            return calls.unit(self._epoch, call.positions, call.indices)
        results: list[Any] = []
        calls.samples(self._epoch, call.positions, call.indices, results, self._arrays, call.row)
        return results[0]

    # ---- in the main thread ----

    def samples(
        self,
        epoch: int,
        positions: Sequence[int],
        indices: Sequence[int],
        results: list[Any],
        arrays: Sequence[npt.NDArray[Any]] | None = None,
        row: int = 0,
    ) -> None:
        """Return samples, as `Calls.samples` does. Blocks: until the rows from `row` on were made."""
        for at in range(len(indices)):
            results.append(self._take(row + at))

    def unit(self, epoch: int, positions: Sequence[int], indices: Sequence[int], row: int = 0) -> Any:
        """Return the unit of a call, as `Calls.unit` does. Blocks: until it was made."""
        return self._take(row)

    def _take(self, row: int) -> Any:
        call = self.calls[row]
        if not call.is_done:
            self._wait(call)
            if call.ended_ns:
                self._worker_threads.progress.note_call(call.started_ns, call.ended_ns, call.indices[0])
        if call.error is not None:
            raise call.error
        return call.result

    def _wait(self, call: _Call) -> None:
        done, look_ahead = call.done, self.look_ahead
        if not done.acquire(blocking=False):
            # It may have begun long ago, while rows before it were waited for.
            self._worker_threads.progress.note_thread(call.thread, call.started_ns or clock.monotonic_ns())
            while look_ahead is not None and look_ahead():
                if done.acquire(timeout=_LOOK_S):
                    break
            else:
                done.acquire()
        call.is_done = True

    def end(self) -> None:
        """Begin no further call, and wait for those that run: they may be writing into the slot.

        Blocks: until the last of them is over. The board names each, so that one that hangs is found.
        """
        self._is_over = True
        self.look_ahead = None
        progress = self._worker_threads.progress
        for call in self.calls.values():
            if not call.is_done:
                if call.started_ns:
                    progress.note_thread(call.thread, call.started_ns)
                    progress.numbers[progress.index_field] = call.indices[0] + 1
                self._wait(call)


class WorkerThreads:
    """The threads of one loader's work in one worker; they are started with the first calls.

    Runs in: a worker, after its fork. The threads are daemons: nothing waits for them when the worker ends.

    Args:
        calls: the function; each thread has its own copy of this.
        threads: how many.
        makes_units: a call makes a whole batch or element, no sample.
        progress: the worker's cell.
    """

    def __init__(self, calls: Calls, threads: int, makes_units: bool, progress: Progress) -> None:
        self._calls, self._threads, self.makes_units, self.progress = calls, threads, makes_units, progress
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: list[threading.Thread] = []

    def begin(
        self,
        job: Job,
        planned: Iterator[Planned],
        read: Callable[[int], Any] | None = None,
        arrays: Sequence[npt.NDArray[Any]] | None = None,
        kept: Mapping[int, Any] | None = None,
    ) -> TicketCalls:
        """Have a ticket's calls made, after those of earlier ones."""
        if not self._running:
            self._start()
        ticket_calls = TicketCalls(self, job, planned, read, arrays, kept or {})
        for call in ticket_calls.calls.values():
            if not call.is_done:
                self._queue.put(call)
        return ticket_calls

    def _start(self) -> None:
        for number in range(self._threads):
            # As the `setup` hook has left it: `numpy.errstate` and the like are not the process's but the context's.
            context = contextvars.copy_context()
            thread = threading.Thread(
                target=context.run,
                args=(self._serve, self._calls.copy()),
                name=f"loaderpool-{number}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # the machine, or a limit, has no more: fewer make the same
                if not self._running:
                    raise
                return
            self._running.append(thread)

    def _serve(self, calls: Calls) -> None:
        """Make calls until the threads end. Runs in: one of the worker's threads."""
        while True:
            call = self._queue.get()
            if call is None:
                return
            call.make(calls)
            del call  # its result is the main thread's alone

    def close(self) -> None:
        """End the threads. Blocks: until their calls are over. A worker ends without this."""
        for _ in self._running:
            self._queue.put(None)
        for thread in self._running:
            thread.join()
        self._running = []
