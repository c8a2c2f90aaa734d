"""`ConcurrentCalls`: several calls of the user's functions at the same time in one worker.

An `Executor` makes the calls, on threads or, of async functions, as coroutines of the worker's
event loop.

Calls start in the order of rows, ticket after ticket. So the main thread always waits for the call
that has run longest. While it waits for the last rows of a ticket, the calls of the next tickets
are made. If a worker dies, any of its tickets may be the cause, so each is made again alone.
"""

from __future__ import annotations

import collections
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from loaderpool.errors import ArgumentError
from loaderpool.sources.many_rows import MOST_ROWS
from loaderpool.system import clock
from loaderpool.transport.messages import Ticket
from loaderpool.worker.calls import Calls
from loaderpool.worker.contracts import Runner
from loaderpool.worker.event_loop import EventLoop, Outcome
from loaderpool.worker.fetching import Fetched
from loaderpool.worker.own_process import end_stray
from loaderpool.worker.rows import share_memory
from loaderpool.worker.tickets import MadeRows, Opened, Progress

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

# Interval in seconds at which the main thread, waiting for a call, checks for new tickets. Larger:
# threads idle if tickets arrive late. Smaller: the checks themselves take time.
_LOOK_S = 0.01
# The same once no more tickets can be started. Larger: calls of an abandoned run go on for longer.
_SLOW_LOOK_S = 0.1
# Results of later tickets that a ticket's own results are compared with. 0: a ticket with one call
# would have none to compare. Larger: more comparisons for each ticket.
_OTHERS = 2


class Call(Outcome):
    """Call of the function, made by an executor."""

    def __init__(self, calls: Calls, opened: Opened, start: int, stop: int) -> None:
        super().__init__()
        self.index = opened.indices[start]
        self._calls, self._rows = calls, (opened, start, stop)
        # Number of rows of the read that runs now, before the function is called; 0: none runs.
        self.reading_rows = 0
        self.thread = self.started_ns = self.ended_ns = 0
        # Its progress on a thread, or as a coroutine, once it has been submitted.
        self.future: Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_over = self.is_canceled = False

    def make(self) -> None:
        """Make the call, and store its outcome. Called in one of the worker's threads."""
        self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
        try:
            opened, start, _ = self._rows
            if opened.fetched is not None and self._calls.chain.batch_fn is None:
                # The read is for many rows, so its time does not count for this call.
                self.reading_rows = min(len(opened.indices), MOST_ROWS)
                opened.fetched.prepare(start)
                self.started_ns = clock.monotonic_ns()
                self.reading_rows = 0  # SYNC: stored last; pairs with `ConcurrentCalls._wait`
            self.result = self._calls.unit(*self._rows)
        except BaseException as error:
            end_stray(error)
            self.error = error
        self.ended_ns = clock.monotonic_ns()

    async def make_async(self, at_end: Callable[[Call], None]) -> None:
        """Make the call of an async function, and store its outcome. Then call `at_end`."""
        self.started_ns = clock.monotonic_ns()
        await self.settle(self._calls.unit_async(*self._rows))
        self.ended_ns = clock.monotonic_ns()
        at_end(self)


class Executor(Protocol):
    """Makes calls. Called by the main thread of a worker."""

    def submit(self, call: Call) -> None:
        """Queue a call, behind those that were submitted before. Pairs with `is_over`."""

    def is_over(self, call: Call) -> bool:
        """Return True if a call has ended."""

    def wait(self, call: Call, timeout_s: float) -> None:
        """Wait until a call has ended, but not longer than this."""

    def cancel(self, call: Call) -> bool:
        """Cancel a call that has not ended. Return False if the caller has to wait for it."""

    def close(self) -> None:
        """Release the threads. All calls have ended."""


class Threads:
    """`Executor` that makes calls on threads."""

    def __init__(self, threads: int) -> None:
        # imported here: it takes 1 ms, and most loaders have no threads
        from concurrent.futures import ThreadPoolExecutor, wait

        self._pool, self._wait_for = ThreadPoolExecutor(threads, "loaderpool"), wait

    def submit(self, call: Call) -> None:
        # Calls run in the context that the `setup` hook left: `numpy.errstate` and the like belong
        # to the context, not to the process.
        run = contextvars.copy_context().run
        try:
            call.future = self._pool.submit(run, call.make)
        except RuntimeError as error:
            # No more threads can be started.
            call.error, call.is_over = error, True

    def is_over(self, call: Call) -> bool:
        return call.is_over or (call.future is not None and call.future.done())

    def wait(self, call: Call, timeout_s: float) -> None:
        if call.future is not None:
            self._wait_for([call.future], timeout_s)

    def cancel(self, call: Call) -> bool:
        return call.future is not None and call.future.cancel()

    def close(self) -> None:
        self._pool.shutdown()


class Coroutines:
    """`Executor` that makes calls of async functions in the event loop.

    Args:
        event_loop: runs the coroutines, while the main thread is in `wait`.
        most: number of coroutines at the same time.
        calls: the loader's calls. Each coroutine gets their context.
    """

    def __init__(self, event_loop: EventLoop, most: int, calls: Calls) -> None:
        self._event_loop, self._loop = event_loop, event_loop.created()
        self._most, self._calls = most, calls
        self._context = contextvars.copy_context()  # for calls without a `setup` hook
        self._waiting: collections.deque[Call] = collections.deque()
        self._running = 0
        self._awaited: Call | None = None

    def submit(self, call: Call) -> None:
        self._waiting.append(call)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._most:
            call = self._waiting.popleft()
            if not call.is_canceled:
                self._running += 1
                # The task gets a copy of the context in which it is created.
                context = self._calls.context or self._context
                call.task = context.run(self._loop.create_task, call.make_async(self._end))

    def _end(self, call: Call) -> None:
        self._running -= 1
        call.task, call.is_over = None, True
        self._start()
        if call is self._awaited:
            self._loop.stop()

    def is_over(self, call: Call) -> bool:
        return call.is_over

    def wait(self, call: Call, timeout_s: float) -> None:
        self._awaited = call
        self._event_loop.turn(timeout_s)
        self._awaited = None

    def cancel(self, call: Call) -> bool:
        call.is_canceled = True
        if call.task is None:
            return True
        call.task.cancel()
        if not call.started_ns:  # the coroutine itself never starts
            call.task.add_done_callback(lambda _: self._end(call))
        return False

    def close(self) -> None:
        """Do nothing: the worker closes its event loop."""


class SubmittedTicket(NamedTuple):
    """A ticket whose calls were submitted."""

    opened: Opened
    calls: dict[int, Call]  # calls by their first row


class ConcurrentCalls:
    """`Runner` that makes a loader's concurrent calls in one worker.

    Args:
        calls: the calls that are made.
        executor: makes them.
        makes_units: True if a call makes a whole batch or element.
        progress: records the calls.
    """

    def __init__(
        self, calls: Calls, executor: Executor, makes_units: bool, progress: Progress
    ) -> None:
        self._calls, self._makes_units, self._progress = calls, makes_units, progress
        self.executor = executor
        self.begun: dict[Ticket, SubmittedTicket] = {}
        self._filling: dict[int, Call] = {}  # calls of the ticket that `run` fills
        self._look_ahead: Callable[[], bool] | None = None

    def begin(self, opened: Opened) -> None:
        """Submit the calls of a ticket, after those of earlier tickets. Pairs with `end`."""
        draws = self._calls.draws
        if not self.begun and draws.is_on:
            draws.globals_watch.seen = draws.globals_watch.look()
        calls: dict[int, Call] = {}
        self.begun[opened.ticket] = SubmittedTicket(opened, calls)
        if opened.fetched is not None:
            opened.fetched.reset()
            opened.fetched.others = (
                self._all_fetched if isinstance(self.executor, Threads) else None
            )
        rows, excluded = len(opened.indices), self._progress.failures.excluded
        for start, stop in (
            opened.bounds() if self._makes_units else zip(range(rows), itertools.count(1))
        ):
            if excluded(opened.ticket.epoch, opened.indices[start:stop]) is not None:
                continue
            call = calls[start] = Call(self._calls, opened, start, stop)
            # Taken now, because the next submitted ticket may be of another epoch.
            call.result = self._calls.kept.pop(opened.positions[start], None)
            if call.result is None:
                self.executor.submit(call)
            else:
                call.is_over = True

    def _all_fetched(self) -> list[Fetched]:
        opened = [each.opened for each in list(self.begun.values())]
        return [each.fetched for each in opened if each.fetched is not None]

    def unit(self, opened: Opened, start: int, stop: int) -> object:
        """Return the result of one call, as `Calls.unit` does. Blocks until the call is over."""
        call = self._filling[start]
        self._wait(call, is_needed=True)
        if call.started_ns:
            self._progress.note_call(call.started_ns, call.ended_ns, call.index)
        return call.get()

    def _wait(self, call: Call, is_needed: bool) -> None:
        """Wait until a call is over. If its result is needed, start calls of later tickets, too.

        Raises:
            Abandoned: the ticket's run was abandoned, so the result is not needed any more.
        """
        if self.executor.is_over(call):
            return
        has_more, noted_rows = False, -1
        while not self.executor.is_over(call):
            if noted_rows != call.reading_rows:
                noted_rows = call.reading_rows
                # The call may have started long ago, while the main thread waited for earlier rows.
                started_ns = call.started_ns or clock.monotonic_ns()
                self._progress.note_thread(call.thread, started_ns, call.index)
                self._progress.begin_blocks(noted_rows)
            if is_needed:
                self._progress.check_run()
                has_more = self._look_ahead is not None and self._look_ahead()
            self.executor.wait(call, _LOOK_S if has_more else _SLOW_LOOK_S)

    def run(
        self,
        opened: Opened,
        fill: Callable[[Runner, Opened], MadeRows],
        look_ahead: Callable[[], bool] | None,
    ) -> MadeRows:
        """Fill a ticket's slot with the results of calls.

        When this returns or raises, no call of the ticket is made any more.

        Args:
            opened: the ticket.
            fill: makes rows of the results.
            look_ahead: called while this waits for a call. It may submit more tickets, and returns
                True if more may come.

        Raises:
            ArgumentError: the function draws from the global generators, or returns one array
                several times.
            BaseException: an exception that `fill` raised.
        """
        self._look_ahead = look_ahead
        if opened.ticket not in self.begun:
            self.begin(opened)
        return self._calls.watched(self._fill, opened, fill)

    def _fill(self, opened: Opened, fill: Callable[[Runner, Opened], MadeRows]) -> MadeRows:
        # A call of some ticket drew from the global generators, so this is the second run. The
        # other tickets are submitted again when `run` gets them.
        if opened.ticket not in self.begun:
            for ticket in list(self.begun):
                self.end(ticket)
            self._look_ahead = None
            self.begin(opened)
        self._filling = self.begun[opened.ticket].calls
        try:
            filled = fill(self, opened)
            if share_memory(self._results(), opened.arrays or ()):
                raise ArgumentError(
                    "The function returns the same array, list or dict for several samples, which "
                    "concurrent calls would overwrite. Return a new one from each call, or a "
                    "read-only array, or set threads=1."
                )
            return filled
        finally:
            self.end(opened.ticket)

    def _results(self) -> Iterator[object]:
        """Yield the results of the ticket's calls, and of a few calls of other tickets.

        A ticket may have only one call. Shared memory shows only if two results are compared.
        """
        others = (
            call
            for each in self.begun.values()
            if each.calls is not self._filling
            for call in each.calls.values()
        )
        made = (call.result for call in others if call.result is not None)
        own = (call.result for call in self._filling.values())
        return itertools.chain(own, itertools.islice(made, _OTHERS))

    def end(self, ticket: Ticket) -> None:
        """Start no more calls of a ticket, and wait for those that run, because they may write into
        the slot. Coroutines are canceled first.

        Blocks until the last one is over. The board names each of them meanwhile, so that one that
        hangs is found.
        """
        calls = self.begun.pop(ticket).calls
        for call in [
            call
            for call in calls.values()
            if not self.executor.is_over(call) and not self.executor.cancel(call)
        ]:
            self._wait(call, is_needed=False)
        for call in calls.values():
            # Breaks a cycle: an error that no `unit` raised has a traceback whose frames refer to
            # the call.
            call.error = None
        calls.clear()
