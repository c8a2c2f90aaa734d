"""Ctrl-C, held back while a step must be whole.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: between the read of a pipe and the look at
what was read, between a lock's release and its next acquisition. What is lost there is missed by some later pass. So
the trainer's side does such steps with the signal held back; a wait is ended by it, and it is raised on the way out.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, without stubs
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = [
    "InterruptsHeld",
    "is_ctrl_c_told",
    "note_exit",
    "note_missed",
    "tell_other_threads",
    "told_descriptor",
    "wait_for_the_end",
]

# Each wait for a batch sets the handler four times. The functions of `signal` look numbers and handlers up in enums,
# which costs ten times what the calls beneath them do.
_SIGINT = int(signal.SIGINT)

_was_missed = False


def note_missed() -> None:
    """A KeyboardInterrupt came up where it could not be raised: the next block that is left raises it."""
    global _was_missed
    _was_missed = True


class InterruptsHeld:
    """A block in which SIGINT is noted, not raised; on leaving it, what the program does about SIGINT is done.

    Elsewhere than on the main thread nothing is to do, for signals are handled there only; nor in a block within one.

    Args:
        wake: ends the wait that the block may be in, called by the signal's handler.
        is_last: the interpreter ends anyway, so what came meanwhile is dropped.
    """

    __slots__ = ("_handler", "_is_last", "_wake", "is_pending")

    def __init__(self, wake: Callable[[], None] | None = None, is_last: bool = False) -> None:
        self._wake, self._is_last = wake, is_last
        self._handler: Any = None
        self.is_pending = False

    def __enter__(self) -> InterruptsHeld:  # noqa: PYI034 - Self is in typing from 3.11 on
        if threading.get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(_SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), InterruptsHeld):
                self._handler = handler
                _signal.signal(_SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        global _was_missed
        handler, self._handler = self._handler, None
        if handler is not None:
            _signal.signal(_SIGINT, handler)
            if (self.is_pending or _was_missed) and not self._is_last:
                self.is_pending = _was_missed = False
                handler(signal.SIGINT, sys._getframe(1))

    def _note(self, *_: object) -> None:
        self.is_pending = True
        if self._wake is not None:
            self._wake()


# ---- Ctrl-C while the main thread is in TensorFlow ----
#
# There Python's handler cannot run before the call into TensorFlow returns, and that waits for a thread of tf.data,
# which waits for our next batch. What can be done at once is a write to a descriptor (`signal.set_wakeup_fd`), which
# whoever waits for a batch polls as well.

_told: tuple[int, int] | None = None


def tell_other_threads() -> None:
    """From now on a Ctrl-C also ends the waits of other threads, where `signal.set_wakeup_fd` is free for it.

    Runs in: the main thread; on another one nothing is done. The two descriptors stay for the life of the process.
    """
    global _told
    if _told is not None or threading.get_ident() != threading.main_thread().ident:
        return
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if before != -1:  # an event loop's, say
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)
        return
    _told = read_end, write_end
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_ctrl_c)


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt as by Python's own handler, but for one place where that would come out as another error.

    A wait that was broken off comes back through TensorFlow as an error, and the handler's turn comes when the first
    bytecode is run: in the constructor of TensorFlow's exception. What is raised there becomes pybind11's RuntimeError
    ("MISMATCH of original and normalized active exception types"; TensorFlow 2.21). So it is raised where that error
    arrives: in the frame that made the call into C++.
    """
    caller = frame
    while caller is not None and _constructs_status_error(caller):
        caller = caller.f_back
    if caller is None or caller is frame or sys.gettrace() is not None:
        raise KeyboardInterrupt

    def trace(traced: FrameType, event: str, _: Any) -> Any:
        if event == "exception":
            sys.settrace(None)
            traced.f_trace = None
            raise KeyboardInterrupt
        return trace

    caller.f_trace = trace
    sys.settrace(lambda *_: None)


def _constructs_status_error(frame: FrameType) -> bool:
    if frame.f_code.co_name != "__init__":
        return False
    made = frame.f_locals.get("self")
    return isinstance(made, BaseException) and type(made).__module__.startswith("tensorflow")


def told_descriptor() -> int | None:
    """What becomes readable with a signal, None where nothing does."""
    return None if _told is None else _told[0]


def is_ctrl_c_told() -> bool:
    """Whether a Ctrl-C was told of since the last call and will be a KeyboardInterrupt: no handler of the program's."""
    if _told is None:
        return False
    try:
        numbers = os.read(_told[0], 4096)
    except BlockingIOError:  # another thread was first
        return False
    return signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _on_ctrl_c)


# ---- the interpreter's end ----

_is_exiting = False


def note_exit() -> None:
    """The interpreter ends: all pools are closed now."""
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
