"""Points at which the exceptions of signal handlers, above all Ctrl-C, may be raised in loaderpool.

Python runs a handler between any two bytecodes of the main thread. If the handler raises in the
middle of a change, the half-done change is lost. So code that starts, moves or ends something runs
in a block of `InterruptsHeld`. Within such a block, handlers run only

- in a wait (`Session.wait`), when everything that was started is stored where its owner finds it;
- in the user's own code, which is called in `InterruptsAllowed`;
- in `checkpoint`, between the steps of long work;
- when the outermost block is left. The block's result is stored by then, and `Undoing` ends a thing
  that lost its owner.

Each of the program's handlers is wrapped in a gate. The gate stays, because setting a handler for
each batch would cost a system call.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own module, without stubs
import _thread
import collections
import contextlib
import functools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from loaderpool.system import machine

# The functions of `signal` convert numbers and handlers to enums, which costs ten times as much as
# the calls themselves.
_handler_of: Callable[[int], object] = _signal.getsignal
_SIGINT = int(signal.SIGINT)
# Calling `valid_signals` takes longer than reading all handlers.
_ALL = list(map(int, signal.valid_signals()))
_main_thread = threading.main_thread().ident  # main thread of this process

# Delay after which a finalizer has returned. Smaller: the finalizer may still run, and the signal
# is sent once more. Larger: the user notices the delay.
_MOMENT_S = 0.005

_depth = 0  # number of `InterruptsHeld` blocks that the main thread is in
_due: collections.deque[int] = collections.deque()  # signals whose handlers have yet to run


class InterruptsHeld:
    """Block in which signals are only recorded. Their handlers run when the outermost block ends.

    The handlers may raise then. On threads other than the main one, the block does nothing.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth
        if _thread.get_ident() == _main_thread:
            handler = _handler_of(_SIGINT)
            # A notebook sets this handler again for each cell.
            if type(handler) is not _Gate and callable(handler):
                gate_handlers()
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if _thread.get_ident() == _main_thread and _depth:
            _depth -= 1
            if _due and not _depth:
                _tell()


class InterruptsAllowed:
    """Part of an `InterruptsHeld` block in which handlers run, also for recorded signals."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        global _depth
        self._held = 0
        if _thread.get_ident() == _main_thread and _depth:
            self._held, _depth = _depth, 0
            if _due:
                try:
                    _tell()
                except BaseException:
                    _depth = self._held
                    raise

    def __exit__(self, *_: object) -> None:
        global _depth
        if self._held:
            _depth = self._held


class _Gate:
    """Wrapper of a signal handler of the program, which delays it if necessary.

    In an `InterruptsHeld` block the signal is recorded. If an exception would be dropped, the
    signal is sent again later. Otherwise the handler runs at once.
    """

    __slots__ = ("__wrapped__",)

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.__wrapped__ = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _depth:
            if number not in _due:
                _due.append(number)
        elif is_dropped(frame):
            send_again(number)
        elif not _runs_below(frame, functools.partial(self._run, number)):
            self._run(number, frame)

    def _run(self, number: int, frame: FrameType | None) -> None:
        try:
            self.__wrapped__(number, frame)
        except BaseException as error:
            BaseException.__setattr__(error, _MARK, number)
            raise


# Attribute with the signal's number, set on each exception that a handler raises.
_MARK = "__loaderpool_signal__"


def is_of_a_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised this error, and not the code that it interrupted."""
    return _MARK in vars(error)


class _DropHook:
    """Sends a signal again if Python dropped its handler's exception.

    Other exceptions are shown as before. Python drops exceptions of `__del__`, of weak reference
    callbacks, and of generators that are collected. The stack does not always show that the code
    runs in one of these. Users close loaders in them, which may take a second.

    Args:
        hook: The program's `sys.unraisablehook`.
    """

    __slots__ = ("__wrapped__",)

    def __init__(self, hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self.__wrapped__ = hook

    def __call__(self, dropped: sys.UnraisableHookArgs) -> None:
        number = None if dropped.exc_value is None else vars(dropped.exc_value).get(_MARK)
        if number is None or _is_exiting or _thread.get_ident() != _main_thread:
            self.__wrapped__(dropped)
        else:
            send_again(number)


class FailuresIgnored:
    """Block whose exceptions are dropped, unless a signal handler raised them."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, Exception) and not is_of_a_handler(error)


def gate_handlers() -> None:
    """Wrap the program's signal handlers in gates, so that they wait for `InterruptsHeld` blocks.

    Called in the main thread when a loader is made and when a pass begins, for all signals. Each
    `InterruptsHeld` block calls it too if the handler of SIGINT has no gate. A handler may raise
    during the call.
    """
    if _thread.get_ident() == _main_thread:
        for number in _ALL:
            handler = _handler_of(number)
            if type(handler) is not _Gate and callable(handler):
                _signal.signal(number, _Gate(handler))
        if type(sys.unraisablehook) is not _DropHook:
            sys.unraisablehook = _DropHook(sys.unraisablehook)


def is_left_to_python(number: int) -> bool:
    """Return True if Python's own handler, which raises KeyboardInterrupt, handles this signal."""
    handler = _handler_of(number)
    return getattr(handler, "__wrapped__", handler) is signal.default_int_handler


def _tell() -> None:
    """Raise the recorded signals again, unless the interpreter is exiting.

    If a handler raises, the remaining signals stay recorded.
    """
    for _ in range(len(_due)):
        try:
            number = _due.popleft()
        except IndexError:  # `_send` has just removed the last one
            return
        if not _is_exiting:
            signal.raise_signal(number)


def _after_fork() -> None:
    global _main_thread, _depth
    before, _main_thread = _main_thread, _thread.get_ident()
    # A thread other than the main one has forked. The child has no main thread that could leave the
    # block.
    if before != _main_thread:
        _depth = 0
        _due.clear()


machine.at_forks(after_in_child=_after_fork)


def checkpoint() -> None:
    """Run the handlers of signals that this block has recorded. Called between complete steps."""
    if _due:
        with InterruptsAllowed():  # does nothing on other threads
            pass


# Functions in which, or below which, an exception is dropped: by their callers' code, or by Python
# in finalizers.
DROPPED_IN = {
    # Runs after each step of a fit, and drops exceptions by `except: pass`.
    ("keras.src.utils.python_utils", "pythonify_logs"),
    # Called from C++, which drops the exception or crashes.
    ("tensorflow.python.framework.tensor_shape", "__getitem__"),
    ("tensorflow.python.framework.tensor_shape", "__len__"),
    # These have an `except OSError`, which includes TimeoutError.
    ("importlib._bootstrap_external", "find_spec"),
    ("importlib._bootstrap_external", "get_code"),
    ("_weakrefset", "_remove"),
    ("weakref", "__call__"),  # called by Python for a `finalize`
    ("weakref", "remove"),
    ("loaderpool.errors", "brief"),  # `reprlib` drops the exceptions
    ("loaderpool.sources.files", "__del__"),
    ("loaderpool.engine.session", "__del__"),
    ("loaderpool.engine.session", "_on_death"),
    ("loaderpool.memory.adoption", "_freeze_all"),
    ("loaderpool.memory.forks", "_before"),
    ("loaderpool.memory.forks", "_in_trainer"),
    ("loaderpool.memory.forks", "_in_child"),
}


def is_dropped(frame: FrameType | None) -> bool:
    """Return True if an exception raised in this frame would reach a function that drops it."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in DROPPED_IN:
            return True
        frame = frame.f_back
    return False


def _runs_below(frame: FrameType | None, handler: Callable[[FrameType], None]) -> bool:
    """Return True if the handler will run in a calling frame, after a TensorFlow error is made.

    A signal is handled in the constructor of that error if a wait of tf.data was broken off. Before
    Python 3.12, pybind11 would turn the handler's exception into a RuntimeError. So the handler
    runs in the frame that receives the constructed error, or one line later.
    """
    caller = frame
    while caller is not None and caller.f_code.co_name == "__init__":
        made = caller.f_locals.get("self")
        if not (isinstance(made, BaseException) and type(made).__module__.startswith("tensorflow")):
            break
        caller = caller.f_back
    if caller is None or caller is frame or sys.gettrace() is not None:
        return False

    def trace(traced: FrameType, event: str, _: object) -> None:
        sys.settrace(None)
        traced.f_trace = None
        handler(traced)

    caller.f_trace = trace
    sys.settrace(lambda *_: None)
    return True


def send_again(number: int = signal.SIGINT) -> None:
    """Send a signal again in a moment, because its handler cannot raise here, as in a finalizer."""
    if number not in _due:
        # The next block raises the signal if it is left before the moment is over.
        _due.append(number)
    # The interpreter is exiting and starts no threads any more.
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(_send, (number,))


def _send(number: int) -> None:
    time.sleep(_MOMENT_S)
    with contextlib.suppress(ValueError):  # a block has raised it already
        _due.remove(number)
        if hasattr(signal, "pthread_kill") and _main_thread is not None:
            signal.pthread_kill(_main_thread, number)
        else:
            signal.raise_signal(number)  # handled by the main thread in any case


class Undoing:
    """Cleanup that runs once: when it is called, or when its owner is collected.

    It does not run at the interpreter's exit. Make it in the `InterruptsHeld` block that starts the
    thing to be cleaned up. In the finalizer, the gates raise nothing.

    Args:
        owner: object whose collection triggers the cleanup.
        undo: the cleanup. It never raises, may run in a finalizer on any thread, and must not refer
            to the owner.
    """

    __slots__ = ("_finalizer",)

    def __init__(self, owner: object, undo: Callable[[], object]) -> None:
        self._finalizer = weakref.finalize(owner, undo)
        self._finalizer.atexit = False

    def now(self) -> None:
        """Run the cleanup now, unless it has run."""
        with InterruptsHeld():
            found = self._finalizer.detach()
            if found is not None:
                found[1]()

    def forget(self) -> None:
        """Cancel the cleanup, because nothing is left to clean up."""
        self._finalizer.detach()


# ---- reports of a Ctrl-C to waits ----

waits_told_by: Any = None
"""The module `ctrl_c` once its `watch` has run. None: other threads' waits get no reports."""


# ---- the interpreter's end ----

_is_exiting = False


def note_exit() -> None:
    """Record that the interpreter is exiting. Called at exit, when all pools are closed."""
    global _is_exiting
    _is_exiting = True


def wait_for_the_end() -> None:
    """Block this thread forever if it is a daemon thread and the interpreter is exiting.

    Called when a thread of the program wants a batch at exit. A daemon thread then ends with the
    interpreter, without an error. A thread of TensorFlow must return instead, because the
    interpreter's exit waits for it.
    """
    thread = threading.current_thread()
    if _is_exiting and thread.daemon and not isinstance(thread, threading._DummyThread):
        threading.Event().wait()
