"""An interpreter that ends while tf.data calls into Python ends all the same."""

from __future__ import annotations

import atexit
import threading

from loaderpool.system.clock import monotonic_s
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.session.open_sessions import close_all

# After the last call has returned to C++ its thread still has a few bytecodes of TensorFlow's wrapper to go. Too short
# risks an exit that hangs, longer is only felt at exit.
_QUIET_S = 0.02


class ExitGate:
    """Keeps the interpreter's end from coming while a tf.data thread is inside Python code.

    tf.data cannot cancel a call into Python, and a thread that is in one when the interpreter is torn down never comes
    back, so that the destructor of its iterator waits for it for ever. `atexit` runs before that: it closes the pools,
    which wakes every wait; then it waits until the last call has left, until the iterators that ended so are forgotten
    by TensorFlow (a call into Python of its own), and until no new call has come for a moment.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self.ending: set[int] = set()  # ids of iterators that said they are at their end and still exist
        self._inside = 0
        self._calls = 0
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._inside += 1
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._inside -= 1

    def shut(self) -> None:
        """Let no thread in any more and wait until all are out, 2 s at most."""
        with InterruptsHeld(then="drop"):
            self.is_shut = True
            close_all()
            if not self._calls:
                return
            gone_by = monotonic_s() + 2.0
            calls = -1
            while monotonic_s() < gone_by and (self._inside or self.ending or calls != self._calls):
                calls = self._calls
                threading.Event().wait(_QUIET_S)


exit_gate = ExitGate()
atexit.register(exit_gate.shut)
