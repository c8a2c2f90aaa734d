"""`EventLoop`: runs the coroutines of the user's async functions.

A process has one loop for all its loaders. It runs on the thread that processes the tickets, while
that thread waits for a call; a worker also runs it while it waits for a ticket. So a session that
the `setup` hook opens lives as long as the worker, with its background tasks. A second thread would
compete for the interpreter lock with each call: on a busy machine that takes half of the rate.

The first coroutine imports `asyncio`, which takes a tenth of a second.
"""

from __future__ import annotations

import contextvars
import os
import threading
import traceback
import types
import weakref
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

from loaderpool.worker.own_process import end_stray

if TYPE_CHECKING:
    import asyncio

# Seconds in which canceled coroutines have to end. It is less than the time that the supervisor
# gives a worker. Smaller: `finally` blocks that wait for a server are cut off.
_ENDS_S = 0.4

_Result = TypeVar("_Result")
_State = TypeVar("_State")


class CallTimeoutError(Exception):
    """A call took longer than `Limits.timeout_s` and was canceled. The cause shows where it was."""

    def __init__(self, ran_s: float) -> None:
        super().__init__(f"the call was canceled after {ran_s:.1f} s")
        self.ran_s = ran_s


class Outcome:
    """The result or the error of one call, which another thread may have made."""

    def __init__(self) -> None:
        self.result: object = None
        self.error: BaseException | None = None

    async def settle(self, awaitable: Awaitable[object]) -> None:
        """Store the outcome of an awaitable. Never raises, because SystemExit would end a loop."""
        try:
            self.result = await awaitable
        except BaseException as error:
            end_stray(error)
            self.error = error

    def get(self) -> object:
        """Return the result, or raise the error."""
        error, self.error = self.error, None
        if error is None:
            return self.result
        try:
            raise error
        finally:
            # Its traceback refers to this frame. The cycle would keep the function's objects until
            # a garbage collection.
            del error


class EventLoop:
    """An event loop, which is created for the first coroutine.

    Attributes:
        is_created: True from the first coroutine on.
        close: cancels all coroutines, waits until they have ended, and closes the loop. Idempotent.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        # Thread of the loop, if another loop runs in the calling thread, as in a notebook.
        self._threads: list[threading.Thread] = []
        self._pid = 0  # process that has created the loop
        self.close: Callable[[], object] = lambda: None

    @property
    def is_created(self) -> bool:
        return self._loop is not None

    def run(self, coroutine: Awaitable[object], context: contextvars.Context | None) -> object:
        """Return the result of a coroutine. Blocks until it has ended.

        Called by the thread that processes the tickets. If a signal handler raises meanwhile, the
        coroutine is canceled.

        Args:
            coroutine: the coroutine.
            context: the coroutine gets a copy of it. None: of this thread's context.

        Raises:
            BaseException: the exception of the coroutine.
        """
        loop, outcome = self.created(), Outcome()
        context = contextvars.copy_context() if context is None else context.copy()
        task: asyncio.Task[None] | None = None

        def begin() -> asyncio.Task[None]:
            nonlocal task
            task = loop.create_task(outcome.settle(coroutine))
            return task

        if not (self._threads or _loop_runs_here()):
            made = context.run(begin)
            try:
                loop.run_until_complete(made)
            except BaseException:
                made.cancel()
                loop.run_until_complete(made)
                raise
            return outcome.get()
        if not self._threads:
            thread = threading.Thread(
                target=_serve, args=(loop,), name="loaderpool-loop", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        is_over = threading.Event()
        loop.call_soon_threadsafe(
            lambda: begin().add_done_callback(lambda _: is_over.set()), context=context
        )
        try:
            is_over.wait()
        except BaseException:
            loop.call_soon_threadsafe(lambda: task is not None and task.cancel())
            is_over.wait(_ENDS_S)
            raise
        return outcome.get()

    def turn(self, timeout_s: float | None, descriptor: int | None = None) -> None:
        """Run the loop until a callback stops it. Called in workers only, by the main thread.

        Args:
            timeout_s: time in seconds after which it stops; None: no limit.
            descriptor: it also stops when there is something to read from this descriptor.
        """
        loop = self.created()
        timer = None if timeout_s is None else loop.call_later(timeout_s, loop.stop)
        if descriptor is not None:
            loop.add_reader(descriptor, loop.stop)
        try:
            loop.run_forever()
        # raised by a task that the user's function has left
        except (KeyboardInterrupt, SystemExit):
            traceback.print_exc()
        finally:
            if descriptor is not None:
                loop.remove_reader(descriptor)
            if timer is not None:
                timer.cancel()

    def created(self) -> asyncio.AbstractEventLoop:
        """Return the loop. The first call in a process creates it.

        A fork cannot use the loop of its parent, because it lacks the thread of the loop and shares
        its selector.
        """
        import asyncio

        pid = os.getpid()
        if self._loop is None or self._pid != pid:
            self._loop, self._threads, self._pid = asyncio.new_event_loop(), [], pid
            self.close = weakref.finalize(self, _close, self._loop, self._threads, pid)
        return self._loop


def _loop_runs_here() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then finish it. Runs in: a thread of the loop's own."""
    while True:
        try:
            loop.run_forever()
            break
        except BaseException:  # raised by a task that the user's function has left
            traceback.print_exc()
    _finish(loop)


def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all coroutines, wait until they have ended, and close the loop."""
    import asyncio

    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_ENDS_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _close(loop: asyncio.AbstractEventLoop, threads: list[threading.Thread], pid: int) -> None:
    """Finish a loop. Its coroutines have `_ENDS_S` seconds to end.

    Called by `EventLoop.close`, or by its finalizer.
    """
    if os.getpid() != pid:  # a fork, whose selector is that of its parent
        return
    if threads:
        loop.call_soon_threadsafe(loop.stop)
        threads[0].join(2 * _ENDS_S)
    elif not _loop_runs_here():
        _finish(loop)
    elif not loop.is_running():  # otherwise the user's coroutine closes its own loader
        loop.close()


async def limited(
    awaitable: Awaitable[_Result],
    limit_s: float,
    at_limit: Callable[[], object],
    paused_ns: Callable[[], int],
) -> _Result:
    """Return the result of an awaitable, which is canceled after a time.

    Args:
        awaitable: the awaitable.
        limit_s: the time in seconds, without pauses.
        at_limit: called just before the cancellation.
        paused_ns: returns the time in nanoseconds of all pauses of the loop so far.

    Raises:
        CallTimeoutError: it took longer.
    """
    import asyncio

    loop, task, is_late = asyncio.get_running_loop(), asyncio.current_task(), False
    begun_s, seen_ns = loop.time(), paused_ns()
    timer: asyncio.TimerHandle

    def end() -> None:
        nonlocal is_late, seen_ns, timer
        if more_ns := paused_ns() - seen_ns:
            seen_ns += more_ns
            timer = loop.call_later(more_ns / 1e9, end)
            return
        is_late = True
        at_limit()
        if task is not None:
            task.cancel()

    timer = loop.call_later(limit_s, end)
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if is_late:
            raise CallTimeoutError(loop.time() - begun_s) from error
        raise
    finally:
        timer.cancel()


@types.coroutine
def by_steps(
    awaitable: Awaitable[_Result], look: Callable[[], _State], note: Callable[[_State], object]
) -> Generator[object, object, _Result]:
    """Await `awaitable`. Call `look` before each of its steps, and `note` with the result after it.

    No other coroutine runs during a step. So any change during a step was made by this coroutine.
    """
    iterator = awaitable.__await__()
    step: Callable[[Any], object] = iterator.send
    argument: object = None
    while True:
        before = look()
        try:
            awaited = step(argument)
        except StopIteration as ended:
            result: _Result = ended.value
            return result
        finally:
            note(before)
        try:
            argument = yield awaited
            step = iterator.send
        except BaseException as error:
            step, argument = iterator.throw, error
