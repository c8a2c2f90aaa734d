"""Ctrl-C while the main thread is in TensorFlow, which waits for a thread of tf.data, which waits for our batch.

Python's handler cannot run before the call into TensorFlow returns. So KeyboardInterrupt comes with the batch, as it
does with `from_generator`: the call succeeds, and the handler's turn comes at the next bytecode. Only where the batch
does not come (a function that hangs) is the wait for it broken off, by an error, which is the worse way: TensorFlow is
making an exception of that when the handler runs.

That a Ctrl-C came is told by a write to a descriptor (`signal.set_wakeup_fd`), which each wait for a batch polls as
well. It belongs to the waits that it came in, and to none where the main thread has run since: then the program knows.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from loaderpool.system import clock, fault_points, machine
from loaderpool.system.interrupts import InterruptsHeld, send_again

# Longer than nearly all batches take, for KeyboardInterrupt with the batch is the better way; shorter than the patience
# of a person whose function hangs.
_PATIENCE_S = 5.0

_told: tuple[int, int] | None = None
_latest: CtrlC | None = None


class CtrlC:
    """A Ctrl-C that came while batches were waited for, and that only Python's own handler will meet."""

    def __init__(self) -> None:
        self._came_ns = clock.monotonic_ns()
        self._turns = _turns
        # Run by the main thread between two bytecodes, behind the handlers of signals.
        ctypes.pythonapi.Py_AddPendingCall(_count_turn, None)

    @property
    def is_in_vain(self) -> bool:
        """Whether it has been in vain for too long: the main thread is still where it was."""
        patience_ns = fault_points.setting("ctrl_c_patience_s", _PATIENCE_S) * 1e9
        return self._turns == _turns and clock.monotonic_ns() - self._came_ns > patience_ns


_turns = 0  # that the main thread has had after a Ctrl-C


def _count(_: Any) -> int:
    global _turns
    _turns += 1
    return 0


_count_turn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_count)


def watch() -> None:
    """Have a Ctrl-C told to the waits of other threads from now on, where `signal.set_wakeup_fd` is free for it.

    Runs in: the main thread; on another one nothing is done. The two descriptors stay for the life of the process.
    """
    global _told
    if _told is not None or threading.get_ident() != threading.main_thread().ident:
        return
    if not hasattr(os, "set_blocking"):
        return
    _take_over()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # a kernel has Python's own handler back for each cell
        shell.events.register("pre_run_cell", _take_over)
    with InterruptsHeld():
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
        machine.at_forks(after_in_child=_stop)


def _stop() -> None:
    """In a fork: what it is sent would be told to the trainer's waits, through the same pipe."""
    global _told
    if _told is not None:
        ours, _told = _told, None
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, ours[1]):
            signal.set_wakeup_fd(before)
        for descriptor in ours:
            os.close(descriptor)


def told_descriptor() -> int | None:
    """Return what becomes readable with a signal, None where nothing does."""
    return None if _told is None else _told[0]


def check_patience(before: CtrlC | None) -> None:
    """Break a wait off.

    Args:
        before: the latest Ctrl-C when the wait began.

    Raises:
        KeyboardInterrupt: another one came since, long ago, and the main thread has not come to it.
    """
    if _latest is not before and _latest is not None and _latest.is_in_vain:
        raise KeyboardInterrupt("Ctrl-C, while the main thread waits for a batch that does not come")


def note_signals() -> CtrlC | None:
    """Take in what the descriptor tells; returns the latest Ctrl-C, which is none of a wait's that begins now.

    Runs in: any thread, at the begin of a wait, or when there is something.
    """
    global _latest
    if _told is None:
        return _latest
    try:
        numbers = os.read(_told[0], 4096)
    except BlockingIOError:
        return _latest
    if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _on_ctrl_c):
        _latest = CtrlC()
    return _latest


# ---- where it is raised ----
#
# Python's own handler raises KeyboardInterrupt at whatever bytecode is next. In these functions, and in what they call,
# that is the last that is heard of it: others drop all exceptions, and so does Python in finalizers. There ours has the
# signal come once more, a moment later.
_DROPPED_IN = {
    ("keras.src.utils.python_utils", "pythonify_logs"),  # `except: pass`, behind each step of a fit
    ("tensorflow.python.framework.tensor_shape", "__getitem__"),  # called from C++, which may crash, too
    ("tensorflow.python.framework.tensor_shape", "__len__"),
    ("loaderpool.adapters.tensorflow", "__del__"),
    ("loaderpool.trainer.session.lease", "_on_death"),
    ("loaderpool.system.undoing", "_follow"),
}


def _take_over(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_ctrl_c)


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt as by Python's own handler, but behind what would drop it or make another exception of it.

    What C++ makes an exception of an error with comes out, before Python 3.12, as pybind11's RuntimeError ("MISMATCH of
    original and normalized active exception types") where it raises. So there KeyboardInterrupt is raised in the frame
    that called: where the exception arrives, or at the next line where that frame made it itself.
    """
    if _is_dropped(frame):
        send_again()
        return
    caller = frame
    while caller is not None and _constructs_status_error(caller):
        caller = caller.f_back
    if caller is None or caller is frame or sys.gettrace() is not None:
        raise KeyboardInterrupt

    def trace(traced: FrameType, event: str, _: Any) -> Any:
        sys.settrace(None)
        traced.f_trace = None
        raise KeyboardInterrupt

    caller.f_trace = trace
    sys.settrace(lambda *_: None)


def _is_dropped(frame: FrameType | None) -> bool:
    """Whether an exception that is raised in this frame comes to one that drops it."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _DROPPED_IN:
            return True
        frame = frame.f_back
    return False


def _constructs_status_error(frame: FrameType) -> bool:
    if frame.f_code.co_name != "__init__":
        return False
    made = frame.f_locals.get("self")
    return isinstance(made, BaseException) and type(made).__module__.startswith("tensorflow")
