"""Ctrl-C comes at a few chosen places of ours, and nowhere else.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: behind a message to the supervisor and
before the note that it was given, between a process's start and the variable that would hold it. What is lost there is
missed by some later pass. So whatever begins, moves or ends something runs in a block of `InterruptsHeld`, as a thread
that can be cancelled only at its cancellation points does (pthreads(7)). In such a block KeyboardInterrupt comes

- out of a wait (`Session.wait_for`), at which everything that was begun is where its owner will find it;
- out of the user's own code, which is called in `InterruptsAllowed`;
- out of `checkpoint`, between the steps of long work;
- when the outermost block is left: by then the block's result is stored, not on its way.

What is left then is an ordinary exception at a known place, and `undoing` ends what lost its owner.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, without stubs
import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from loaderpool.system import machine

# Each wait for a batch sets the handler four times. The functions of `signal` look numbers and handlers up in enums,
# which costs ten times what the calls beneath them do.
_SIGINT = int(signal.SIGINT)
_main_thread = threading.main_thread().ident  # of this process; to ask each time costs what setting a handler does

# After this a finalizer has returned. Shorter: it may still run, and the signal is sent once more; longer is only felt.
_MOMENT_S = 0.005


class InterruptsHeld:
    """A block in which SIGINT is noted, not raised; on leaving it, what the program does about SIGINT is done.

    On other threads than the main one nothing is to do, for signals are handled there only. A block within another one
    is part of it: `with` gives the outermost, which knows what is pending.

    Args:
        wake: ends the wait that the block may be in, called by the signal's handler.
        then: what becomes of a Ctrl-C that came: "tell" the program; "send" it again in a moment, for finalizers, whose
            exceptions Python drops; "drop" it, for the interpreter ends anyway.
    """

    __slots__ = ("_handler", "_outer", "_then", "_wake", "is_pending")

    def __init__(self, wake: Callable[[], None] | None = None, then: Literal["tell", "send", "drop"] = "tell") -> None:
        self._wake, self._then = wake, then
        self._handler: Any = None  # the program's; of the module `_signal`, whose SIG_IGN and SIG_DFL are numbers
        self._outer: InterruptsHeld | None = None
        self.is_pending = False

    def __enter__(self) -> InterruptsHeld:  # noqa: PYI034 - the outermost, not always self
        if _thread.get_ident() == _main_thread:
            handler = _signal.getsignal(_SIGINT)
            outer = getattr(handler, "__self__", None)
            if type(outer) is InterruptsHeld:
                self._outer = outer
                self._wake, outer._wake = outer._wake, self._wake or outer._wake
                return outer
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        outer = self._outer
        if outer is not None:
            self._outer, outer._wake = None, self._wake
            return
        handler = self._handler
        if handler is not None:
            _signal.signal(_SIGINT, handler)
            self._handler = None
            if self.is_pending:
                self.is_pending = False
                if self._then == "tell":
                    _tell(handler)
                elif self._then == "send":
                    send_again()

    def _note(self, *_: object) -> None:
        self.is_pending = True
        if self._wake is not None:
            self._wake()


class InterruptsAllowed:
    """A part of a block of `InterruptsHeld` in which Ctrl-C does what the program says, as outside: the user's code.

    What came before is told on entering it. Elsewhere than in such a block nothing is to do.
    """

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        self._held = held = _holder()
        if held is None:
            return
        handler = held._handler
        try:
            _signal.signal(_SIGINT, handler)
            if held.is_pending:
                held.is_pending = False
                _tell(handler)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        held = self._held
        if held is None:
            return
        handler = _signal.getsignal(_SIGINT)  # the user's code may have set another one
        if handler is None:  # in C: it could not be put back
            held._handler = None
            return
        try:
            _signal.signal(_SIGINT, held._note)
        except BaseException:  # one more Ctrl-C, at this very call
            _signal.signal(_SIGINT, held._note)
            raise
        finally:
            if handler is not held._handler and getattr(handler, "__self__", None) is not held:
                held._handler = handler


def _tell(handler: Any) -> None:
    """Do what the program does about SIGINT, in the frame that has left the block."""
    if callable(handler):
        handler(_SIGINT, sys._getframe(2))
    else:  # user code in the block has set SIG_IGN, or SIG_DFL, which ends the process
        signal.raise_signal(signal.SIGINT)


def _after_fork() -> None:
    """A thread has forked while the main thread was in a block: in the child there is no main thread to leave it."""
    global _main_thread
    before, _main_thread = _main_thread, _thread.get_ident()
    held = getattr(_signal.getsignal(_SIGINT), "__self__", None)
    if type(held) is InterruptsHeld and before != _main_thread:
        _signal.signal(_SIGINT, held._handler)


machine.at_forks(after_in_child=_after_fork)


def checkpoint() -> None:
    """Tell the program of a Ctrl-C that came in this block; called where nothing is half done."""
    held = _holder()
    if held is not None and held.is_pending:
        with InterruptsAllowed():
            pass


def _holder() -> InterruptsHeld | None:
    """Return the outermost block that this code runs in."""
    if _thread.get_ident() != _main_thread:
        return None
    holder = getattr(_signal.getsignal(_SIGINT), "__self__", None)
    return holder if type(holder) is InterruptsHeld else None


def send_again() -> None:
    """Have a Ctrl-C that came where nothing can be raised, as in a finalizer, come once more in a moment."""
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        _thread.start_new_thread(_send, (_main_thread,))


def _send(thread: int | None) -> None:
    time.sleep(_MOMENT_S)
    if thread is not None:
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(thread, _SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)  # handled by the main thread in any case


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
        while True:
            threading.Event().wait()
