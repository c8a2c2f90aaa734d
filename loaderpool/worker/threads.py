"""Threads of one worker that make several samples at once, for functions that wait rather than compute.

Only the calls of the user's functions are made on threads. What is made of their results (conversion, the error policy,
rows in a slot), and what is said to others, is the main thread's, and the same as without threads.

Calls begin in the order of rows, ticket after ticket. So the call that the main thread waits for has run longest, and
threads make calls of the next tickets while the last rows of one are waited for. Of a worker that died it is unknown
which of its tickets was to blame, so each is made again with nothing beside it.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy.typing as npt

from loaderpool.errors import LoaderpoolWarning
from loaderpool.system import clock
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.calls import Calls, refuse_draws
from loaderpool.worker.jobs import Abandoned, Exclusions, Filled, Job, Opened
from loaderpool.worker.progress import Progress
from loaderpool.worker.rows import share_memory

# How often the main thread, waiting for a call, looks whether there are more tickets whose calls could begin. Longer:
# threads idle where tickets come late; shorter: the looks themselves cost.
_LOOK_S = 0.01
# Results of later tickets that a ticket's own are compared with. More would cost their number for each ticket.
_OTHERS = 2
_Rows = Sequence[npt.NDArray[Any]]
_Key = tuple[int, int, int, int, int]  # tells a ticket from others that a worker has at the same time


class _Call:
    """One call of the function."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.future: Future[None] | None = None  # None: the result was there
        # Held until the call was made. Not the future is waited for: this shows no frames of Python's in stacks.
        self.running = threading.Lock()
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = self.started_ns = self.ended_ns = 0

    def make(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Runs in: one of the worker's threads."""
        self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
        try:
            self.result = work(*arguments)
        except BaseException as error:
            end_stray(error)
            self.error = error
        self.ended_ns = clock.monotonic_ns()
        self.running.release()


class TicketCalls:
    """The calls of one ticket, in the place of `Calls` for the code that makes rows of their results.

    Attributes:
        look_ahead: called while a call is waited for; it may begin more tickets, and tells whether more may come.
    """

    needs_positions = False

    def __init__(self, opened: Opened, progress: Progress) -> None:
        self.opened = opened
        self.by_row: dict[int, _Call] = {}  # of a call that makes a batch: by its first row
        self.look_ahead: Callable[[], bool] | None = None
        self._progress = progress

    def samples(
        self,
        epoch: int,
        positions: Sequence[int],
        indices: Sequence[int],
        results: list[Any],
        arrays: _Rows | None = None,
        row: int = 0,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        """Return samples, as `Calls.samples` does. Blocks: until the rows from `row` on were made."""
        for at in range(len(indices)):
            value = self.unit(epoch, positions, indices, row + at)
            results.append(value if take is None else take(value))

    def unit(self, epoch: int, positions: Sequence[int], indices: Sequence[int], row: int = 0) -> Any:
        """Return the result of a row's call, as `Calls.unit` does. Blocks: until it was made."""
        call = self.by_row[row]
        if call.future is not None:
            self._wait(call)
            self._progress.note_call(call.started_ns, call.ended_ns, call.index)
        if call.error is not None:
            raise call.error
        return call.result

    def _wait(self, call: _Call) -> None:
        running = call.running
        if running.locked():
            # It may have begun long ago, while rows before it were waited for.
            self._progress.note_thread(call.thread, call.started_ns or clock.monotonic_ns(), call.index)
            while self.look_ahead is not None and self.look_ahead():
                if running.acquire(timeout=_LOOK_S):
                    break
            else:
                running.acquire()
            running.release()

    def end(self) -> None:
        """Begin no further call, and wait for those that run: they may be writing into the slot.

        Blocks: until the last of them is over. The board names each, so that one that hangs is found.
        """
        self.look_ahead = None
        begun = [call for call in self.by_row.values() if call.future is not None and not call.future.cancel()]
        for call in begun:
            self._wait(call)


class ThreadCalls:
    """A loader's threads in one worker, and the tickets that they have begun.

    Runs in: a worker, after its fork, which ends without waiting for them. Each thread has its own copy of `calls`.
    """

    def __init__(
        self, calls: Calls, threads: int, makes_units: bool, progress: Progress, exclusions: Exclusions
    ) -> None:
        self._calls, self._threads, self._makes_units = calls, threads, makes_units
        self._progress, self._exclusions, self._watch = progress, exclusions, calls.watch
        self._executor = _started(threads)
        self._of_thread = threading.local()
        self._tickets: dict[_Key, TicketCalls] = {}
        self.is_one_by_one = False

    def opened(self, job: Job) -> Opened | None:
        """Return the ticket's rows, if it was begun."""
        ticket = self._tickets.get(_key(job))
        return None if ticket is None else ticket.opened

    def begin(self, opened: Opened, arrays: _Rows | None) -> TicketCalls:
        """Have a ticket's calls made, after those of the tickets begun before; `arrays` are for those with `out`."""
        if not self._tickets and self._watch is not None:
            self._watch.arm()
        job, indices, positions = opened.job, opened.indices, opened.positions.tolist()
        ticket = self._tickets[_key(job)] = TicketCalls(opened, self._progress)
        bounds = job.bounds(len(indices)) if self._makes_units else zip(range(len(indices)), itertools.count(1))
        for start, stop in bounds:
            places, part, row = positions[start:stop], indices[start:stop], job.row_start + start
            if self._exclusions.find(job.epoch, part) is not None:
                continue
            call = ticket.by_row[row] = _Call(part[0])
            if kept := self._calls.take_kept(job.epoch, part[0]):
                call.result = kept[0]
                continue
            call.running.acquire()
            # As the `setup` hook has left it: `numpy.errstate` and the like are the context's, not the process's.
            run = contextvars.copy_context().run
            call.future = self._executor.submit(run, call.make, self._make, opened, places, part, arrays, row)
        return ticket

    def _make(
        self, opened: Opened, positions: Sequence[int], indices: Sequence[int], arrays: _Rows | None, row: int
    ) -> Any:
        """Return what a call gives. Runs in: one of the worker's threads."""
        if self._progress.is_abandoned(opened.job.run):
            raise Abandoned
        calls: Calls | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            calls = self._of_thread.calls = self._calls.copy()
        if opened.read is not None:
            calls.read_by(opened.read)
        if self._makes_units:
            return calls.unit(opened.job.epoch, positions, indices)
        results: list[Any] = []
        calls.samples(opened.job.epoch, positions, indices, results, arrays, row)
        return results[0]

    def run(
        self,
        opened: Opened,
        fill: Callable[[Calls | TicketCalls], Filled],
        arrays: _Rows | None,
        look_ahead: Callable[[], bool] | None,
    ) -> Filled:
        """Fill a ticket's slot with what threads make. When this returns or raises, none of them is at it any more.

        A function that returns one array again and again has all its threads fill it: where results share memory, the
        ticket and all that follow are made by one thread.

        Raises:
            ArgumentError: the function draws from the global generators.
            BaseException: whatever `fill` raises.
        """
        key, is_alone = _key(opened.job), opened.job.attempt > 0
        if self.is_one_by_one:
            return self._run_alone(opened, fill)
        for _ in range(2):  # the first may have imported what draws on import
            ticket = self._tickets.get(key) or self.begin(opened, arrays)
            ticket.look_ahead = None if is_alone else look_ahead
            try:
                filled = fill(ticket)
                self.is_one_by_one = share_memory(self._results(ticket), arrays or ())
            finally:
                ticket.end()
                del self._tickets[key]
            if self.is_one_by_one:
                self._drop_tickets()
                warnings.warn(
                    f"The function returns one array, list or dict for several samples, so threads={self._threads} "
                    "are not used. Return a new one from each call, or a read-only array.",
                    LoaderpoolWarning,
                    stacklevel=2,
                )
                return self._run_alone(opened, fill)
            if self._watch is None or not self._watch.drew():
                return filled
            self._drop_tickets()  # whose draw it was is unknown
            is_alone = True
        raise refuse_draws(self._threads)

    def _results(self, ticket: TicketCalls) -> Iterator[Any]:
        """What the ticket's calls gave, and some other calls, as there may be only one."""
        others = (call for other in self._tickets.values() if other is not ticket for call in other.by_row.values())
        made = (call.result for call in others if call.result is not None)
        return itertools.chain((call.result for call in ticket.by_row.values()), itertools.islice(made, _OTHERS))

    def _run_alone(self, opened: Opened, fill: Callable[[Calls | TicketCalls], Filled]) -> Filled:
        calls = self._calls
        if opened.read is not None:  # others may have been opened since
            calls = calls.copy()
            calls.read_by(opened.read)
        return calls.watched(fill)

    def _drop_tickets(self) -> None:
        """Drop all that was begun; the turns of the other tickets will begin them again."""
        for ticket in self._tickets.values():
            ticket.end()
        self._tickets.clear()

    def close(self) -> None:
        """End the threads; a worker ends without this."""
        self._executor.shutdown()


def _started(threads: int) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run: one that starts them later would have queued a call that fails.

    Raises:
        RuntimeError: the machine, or a limit, has no thread at all; where it has fewer, they do the work.
    """
    while True:
        executor, go, have = ThreadPoolExecutor(threads, "loaderpool"), threading.Event(), 0
        try:
            while have < threads:
                executor.submit(go.wait)
                have += 1
            return executor
        except RuntimeError:
            if not have:
                raise
        finally:
            go.set()
        executor.shutdown()
        threads = have


def _key(job: Job) -> _Key:
    return job.run, job.epoch, job.batch, job.row_start, job.attempt
