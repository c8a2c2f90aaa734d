"""Exceptions of signals' handlers, Ctrl-C first of all, come at a few chosen places of ours, and nowhere else.

Python runs a handler between any two bytecodes of the main thread, and what is half done there is lost where it raises.
So whatever begins, moves or ends something runs in a block of `InterruptsHeld`. In such a block handlers run

- out of a wait (`Session.wait`), at which everything that was begun is where its owner will find it;
- out of the user's own code, which is called in `InterruptsAllowed`;
- out of `checkpoint`, between the steps of long work;
- when the outermost block is left: by then the block's result is stored. `Undoing` ends what lost its owner.

The program's handlers get a gate in front of them, which stays: to set a handler costs each batch a system call.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, without stubs
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

# The functions of `signal` look numbers and handlers up in enums, which costs ten times what the calls beneath them do.
_handler_of: Callable[[int], Any] = _signal.getsignal
_SIGINT = int(signal.SIGINT)
_ALL = list(
    map(int, signal.valid_signals())
)  # the call itself takes longer than all looks at handlers
_main_thread = threading.main_thread().ident  # of this process

# After this a finalizer has returned. Shorter: it may still run, and the signal is sent once more; longer is only felt.
_MOMENT_S = 0.005

_depth = 0  # blocks of `InterruptsHeld` that the main thread is in
_due: collections.deque[int] = collections.deque()  # signals whose handlers are to be run


class InterruptsHeld:
    """A block in which signals are noted; on leaving the outermost one their handlers run, which may raise.

    On other threads than the main one nothing is to do.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _depth
        if _thread.get_ident() == _main_thread:
            handler = _handler_of(_SIGINT)
            if type(handler) is not _Gate and callable(handler):  # a notebook sets it for each cell
                gate_handlers()
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if _thread.get_ident() == _main_thread and _depth:
            _depth -= 1
            if _due and not _depth:
                _tell()


class InterruptsAllowed:
    """A part of a block of `InterruptsHeld` in which handlers run as signals come; they also run for earlier ones."""

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
    """A handler of the program's that runs when nothing of ours is half done, and where no exception is dropped."""

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


_MARK = "__loaderpool_signal__"  # attribute of an exception that a handler has raised: the signal's number


def is_of_a_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised this: it is no failure of the code that it came out of."""
    return _MARK in vars(error)


class _DropHook:
    """Sends a signal again if Python has dropped what its handler raised; shows other exceptions as before.

    Python drops exceptions of `__del__`, of callbacks of weak references, and of generators that are collected. No look
    at the stack tells all of these. Users close loaders in them, which may take a second.

    Args:
        hook: The program's `sys.unraisablehook`.
    """

    __slots__ = ("__wrapped__",)

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self.__wrapped__ = hook

    def __call__(self, dropped: Any) -> None:
        number = None if dropped.exc_value is None else vars(dropped.exc_value).get(_MARK)
        if number is None or _is_exiting or _thread.get_ident() != _main_thread:
            self.__wrapped__(dropped)
        else:
            send_again(number)


class FailuresIgnored:
    """A block whose exceptions are dropped, unless a signal's handler raised them."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, Exception) and not is_of_a_handler(error)


def gate_handlers() -> None:
    """Have the handlers that the program has now wait for blocks of `InterruptsHeld`. A handler may raise in it.

    Each block looks at that of SIGINT, and a pass or a loader at all as it begins.
    """
    if _thread.get_ident() == _main_thread:
        for number in _ALL:
            handler = _handler_of(number)
            if callable(handler) and type(handler) is not _Gate:
                _signal.signal(number, _Gate(handler))
        if type(sys.unraisablehook) is not _DropHook:
            sys.unraisablehook = _DropHook(sys.unraisablehook)


def is_left_to_python(number: int) -> bool:
    """Whether the program has left the handler of SIGINT to Python, which raises KeyboardInterrupt."""
    handler = _handler_of(number)
    return getattr(handler, "__wrapped__", handler) is signal.default_int_handler


def _tell() -> None:
    """Have the signals that came come again, unless the interpreter ends. The first exception ends it."""
    for _ in range(len(_due)):
        try:
            number = _due.popleft()
        except IndexError:  # `_send` has just taken the last one
            return
        if not _is_exiting:
            signal.raise_signal(number)


def _after_fork() -> None:
    global _main_thread, _depth
    before, _main_thread = _main_thread, _thread.get_ident()
    if (
        before != _main_thread
    ):  # a thread has forked, in whose child no main thread is there to leave the block
        _depth = 0
        _due.clear()


machine.at_forks(after_in_child=_after_fork)


def checkpoint() -> None:
    """Run the handlers of signals that came in this block; called where nothing is half done."""
    if _due:
        with InterruptsAllowed():  # which does nothing on other threads
            pass


# In these functions, and in what they call, an exception is dropped: by others, or by Python in finalizers.
DROPPED_IN = {
    ("keras.src.utils.python_utils", "pythonify_logs"),  # `except: pass`, after each step of a fit
    (
        "tensorflow.python.framework.tensor_shape",
        "__getitem__",
    ),  # called from C++, which may crash, too
    ("tensorflow.python.framework.tensor_shape", "__len__"),
    (
        "importlib._bootstrap_external",
        "find_spec",
    ),  # `except OSError`, which a TimeoutError is, too
    ("importlib._bootstrap_external", "get_code"),
    ("_weakrefset", "_remove"),
    ("weakref", "__call__"),  # of `finalize`
    ("weakref", "remove"),
    ("loaderpool.errors", "brief"),  # by `reprlib`
    ("loaderpool.sources.files", "__del__"),
    ("loaderpool.core.session", "__del__"),
    ("loaderpool.core.session", "_on_death"),
    ("loaderpool.memory.adoption", "_freeze_all"),
    ("loaderpool.memory.forks", "_before"),
    ("loaderpool.memory.forks", "_in_trainer"),
    ("loaderpool.memory.forks", "_in_child"),
}


def is_dropped(frame: FrameType | None) -> bool:
    """Whether an exception that is raised in this frame comes to one that drops it."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in DROPPED_IN:
            return True
        frame = frame.f_back
    return False


def _runs_below(frame: FrameType | None, handler: Callable[[FrameType], None]) -> bool:
    """Whether a handler runs in a frame below: where an error that TensorFlow has constructed arrives, or a line later.

    It comes in there where a wait of tf.data was broken off. Before Python 3.12 pybind11 makes a RuntimeError of it.
    """
    caller = frame
    while caller is not None and caller.f_code.co_name == "__init__":
        made = caller.f_locals.get("self")
        if not (isinstance(made, BaseException) and type(made).__module__.startswith("tensorflow")):
            break
        caller = caller.f_back
    if caller is None or caller is frame or sys.gettrace() is not None:
        return False

    def trace(traced: FrameType, event: str, _: Any) -> Any:
        sys.settrace(None)
        traced.f_trace = None
        handler(traced)

    caller.f_trace = trace
    sys.settrace(lambda *_: None)
    return True


def send_again(number: int = signal.SIGINT) -> None:
    """Have a signal that came where nothing can be raised, as in a finalizer, come once more in a moment."""
    if number not in _due:
        _due.append(number)  # the next block is told, if it is left before that
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        _thread.start_new_thread(_send, (number,))


def _send(number: int) -> None:
    time.sleep(_MOMENT_S)
    with contextlib.suppress(ValueError):  # a block has told it
        _due.remove(number)
        if hasattr(signal, "pthread_kill") and _main_thread is not None:
            signal.pthread_kill(_main_thread, number)
        else:
            signal.raise_signal(number)  # handled by the main thread in any case


class Undoing:
    """Undoes something once: by a call, or when its owner is collected. Not at the interpreter's exit.

    To be made in the block of `InterruptsHeld` in which the thing is begun. In the finalizer the gates raise nothing.

    Args:
        owner: with whose end it is undone.
        undo: never raises; may run in a finalizer, on any thread, and must not refer to the owner.
    """

    __slots__ = ("_finalizer",)

    def __init__(self, owner: Any, undo: Callable[[], object]) -> None:
        self._finalizer = weakref.finalize(owner, undo)
        self._finalizer.atexit = False

    def now(self) -> None:
        """Undo it, unless that was done."""
        with InterruptsHeld():
            found = self._finalizer.detach()
            if found is not None:
                found[1]()

    def forget(self) -> None:
        """Note that nothing is left to undo."""
        self._finalizer.detach()


# ---- what tells waits of a Ctrl-C ----

waits_told_by: Any = None
"""The module `ctrl_c`, from its `watch` on; None: waits of other threads are not told of signals."""


# ---- the interpreter's end ----

_is_exiting = False


def note_exit() -> None:
    """Note that the interpreter ends: all pools are closed now."""
    global _is_exiting
    _is_exiting = True


def wait_for_the_end() -> None:
    """A daemon thread of the program's that wants a batch at exit goes with the interpreter, without a word.

    A thread of TensorFlow's must return instead, for the interpreter's end waits for that.
    """
    thread = threading.current_thread()
    if _is_exiting and thread.daemon and not isinstance(thread, threading._DummyThread):
        threading.Event().wait()
