"""Ctrl-C while the main thread waits inside TensorFlow for a batch of a loader.

TensorFlow then waits for a thread of tf.data, and that thread waits for the batch. Python cannot
run its signal handler before the call into TensorFlow returns, so KeyboardInterrupt is raised when
the batch arrives. If the batch does not arrive, because a function hangs, the thread's wait for it
is broken off with an error.

A Ctrl-C is reported by a write to a descriptor (`signal.set_wakeup_fd`), which each wait for a
batch polls. It counts for the waits during which it came. It counts for none once the main thread
has continued.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from loaderpool.system import clock, fault_points, interrupts
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers, is_left_to_python

# Longer than nearly all batches take, and shorter than a person waits when a function hangs.
_PATIENCE_S = 5.0

descriptor: int | None = None
"""Descriptor that becomes readable when a signal comes; None before `watch`."""
# Time of the latest Ctrl-C that only Python's own handler will process, and `_main_at` then.
_latest: tuple[int, object] | None = None


def _main_at() -> object:
    """Return an identifier of the call that the main thread is executing."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return id(frame), frame.f_lasti


def watch() -> None:
    """Report each Ctrl-C to the waits of other threads from now on.

    Runs in: the main thread. On another thread, or if `signal.set_wakeup_fd` is not free, nothing
    happens. The two descriptors stay open until the process ends.
    """
    global descriptor
    is_main = threading.get_ident() == threading.main_thread().ident
    if descriptor is not None or not is_main or not hasattr(os, "set_blocking"):
        return
    gate_handlers()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # An IPython kernel restores Python's own handler before each cell, so the gate is set again.
    if shell is not None:
        shell.events.register("pre_run_cell", lambda *_: gate_handlers())
    with InterruptsHeld():
        before = signal.set_wakeup_fd(-1)
        if before != -1:  # used already, for example by an event loop
            signal.set_wakeup_fd(before)
            return
        ends = os.pipe()
        for end in ends:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        descriptor = ends[0]
        interrupts.waits_told_by = sys.modules[__name__]


def check_patience(before: object) -> None:
    """Raise KeyboardInterrupt if a Ctrl-C came long ago in this wait and is still not handled.

    Called by each wait for a batch. It raises only if the main thread is still in the same call.

    Args:
        before: latest Ctrl-C when the wait began, as `note_signals` returned it.
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
    """Read the signals that the descriptor has reported, and return the latest Ctrl-C.

    Called by a wait before it begins, and when the descriptor is readable. A Ctrl-C from before the
    wait does not count for that wait.
    """
    global _latest
    if descriptor is not None:
        try:
            numbers = os.read(descriptor, 4096)
        except BlockingIOError:
            return _latest
        if signal.SIGINT in numbers and is_left_to_python(signal.SIGINT):
            _latest = clock.monotonic_ns(), _main_at()
    return _latest
