"""Ctrl-C while the main thread is in TensorFlow, which waits for a thread of tf.data, which waits for our batch.

Python's handler cannot run before the call into TensorFlow returns, so KeyboardInterrupt comes with the batch. Only
where the batch does not come (a function that hangs) is the wait for it broken off, by an error. That a Ctrl-C came
is told by a write to a descriptor (`signal.set_wakeup_fd`), which each wait for a batch polls. It belongs to the waits
that it came in, and to none where the main thread has gone on since.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from loaderpool.system import clock, fault_points, interrupts
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers, is_left_to_python

# Longer than nearly all batches take; shorter than the patience of a person whose function hangs.
_PATIENCE_S = 5.0

descriptor: int | None = None
"""What becomes readable with a signal; None: nothing does."""
_latest: tuple[int, object] | None = (
    None  # when a Ctrl-C came that only Python's own handler will meet, and `_main_at`
)


def _main_at() -> object:
    """Return the call that the main thread is in."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return id(frame), frame.f_lasti


def watch() -> None:
    """Have a Ctrl-C told to the waits of other threads from now on, where `signal.set_wakeup_fd` is free for it.

    Runs in: the main thread; on another one nothing is done. The two descriptors stay for the life of the process.
    """
    global descriptor
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
        descriptor = ends[0]
        interrupts.waits_told_by = sys.modules[__name__]


def check_patience(before: object) -> None:
    """Raise KeyboardInterrupt in a wait in which a Ctrl-C came long ago, and the main thread has not come to it.

    `before` is the latest Ctrl-C when the wait began.
    """
    if _latest is None or _latest is before:
        return
    patience_ns = fault_points.setting("ctrl_c_patience_s", _PATIENCE_S) * 1e9
    came_ns, main_at = _latest
    if clock.monotonic_ns() - came_ns > patience_ns and main_at == _main_at():
        raise KeyboardInterrupt(
            "Ctrl-C, while the main thread was waiting for a batch that did not arrive"
        )


def note_signals() -> object:
    """Take in what the descriptor tells; returns the latest Ctrl-C, which is none of a wait's that begins now."""
    global _latest
    if descriptor is not None:
        try:
            numbers = os.read(descriptor, 4096)
        except BlockingIOError:
            return _latest
        if signal.SIGINT in numbers and is_left_to_python(signal.SIGINT):
            _latest = clock.monotonic_ns(), _main_at()
    return _latest
