"""Ctrl-C while the main thread is in TensorFlow, which waits for a thread of tf.data, which waits for our batch.

Python's handler cannot run before the call into TensorFlow returns, so KeyboardInterrupt comes with the batch. Only
where the batch does not come (a function that hangs) is the wait for it broken off, by an error. That a Ctrl-C came
is told by a write to a descriptor (`signal.set_wakeup_fd`), which each wait for a batch polls. It belongs to the waits
that it came in, and to none where the main thread has run since.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Any, NamedTuple

from loaderpool.system import clock, fault_points, interrupts, machine
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers, is_left_to_python

# Longer than nearly all batches take; shorter than the patience of a person whose function hangs.
_PATIENCE_S = 5.0


class CtrlC(NamedTuple):
    """A Ctrl-C that came while batches were waited for, and that only Python's own handler will meet."""

    came_ns: int
    turns: int  # that the main thread has had until then


descriptor: int | None = None
"""What becomes readable with a signal; None: nothing does."""
_told_by: int | None = None  # its other end
_latest: CtrlC | None = None
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
    global descriptor, _told_by
    is_main = threading.get_ident() == threading.main_thread().ident
    if descriptor is not None or not is_main or not hasattr(os, "set_blocking"):
        return
    gate_handlers()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # a kernel has Python's own handler back for each cell
        shell.events.register("pre_run_cell", lambda *_: gate_handlers())
    with InterruptsHeld():
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # an event loop's, say
            signal.set_wakeup_fd(before)
            return
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        descriptor, _told_by = ends
        interrupts.waits_told_by = sys.modules[__name__]
        machine.at_forks(after_in_child=_stop)


def _stop() -> None:
    """In a fork: what it is sent would be told to the trainer's waits."""
    global descriptor, _told_by
    if descriptor is not None and _told_by is not None:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, _told_by):
            signal.set_wakeup_fd(before)
        os.close(descriptor)
        os.close(_told_by)
        descriptor = _told_by = interrupts.waits_told_by = None


def check_patience(before: CtrlC | None) -> None:
    """Raise KeyboardInterrupt in a wait in which a Ctrl-C came long ago, and the main thread has not come to it.

    Args:
        before: the latest Ctrl-C when the wait began.
    """
    if _latest is None or _latest is before or _latest.turns != _turns:
        return
    patience_ns = fault_points.setting("ctrl_c_patience_s", _PATIENCE_S) * 1e9
    if clock.monotonic_ns() - _latest.came_ns > patience_ns:
        raise KeyboardInterrupt("Ctrl-C, while the main thread was waiting for a batch that did not arrive")


def note_signals() -> CtrlC | None:
    """Take in what the descriptor tells; returns the latest Ctrl-C, which is none of a wait's that begins now."""
    global _latest
    if descriptor is None:
        return _latest
    try:
        numbers = os.read(descriptor, 4096)
    except BlockingIOError:
        return _latest
    if signal.SIGINT in numbers and is_left_to_python(signal.SIGINT):
        _latest = CtrlC(clock.monotonic_ns(), _turns)
        # Run by the main thread between two bytecodes, after the handlers of signals.
        ctypes.pythonapi.Py_AddPendingCall(_count_turn, None)
    return _latest
