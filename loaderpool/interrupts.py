"""Ctrl-C, held back while a step must be whole.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: between the read of a pipe and the look at
what was read, between a lock's release and its next acquisition. What is lost there is missed by some later pass. So
the trainer's side does such steps with the signal held back; a wait is ended by it, and it is raised on the way out.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["InterruptsHeld", "note_missed"]

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
    """

    __slots__ = ("_handler", "_wake", "is_pending")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        self._handler: Any = None
        self.is_pending = False

    def __enter__(self) -> InterruptsHeld:  # noqa: PYI034 - Self is in typing from 3.11 on
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), InterruptsHeld):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        global _was_missed
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self.is_pending or _was_missed:
                self.is_pending = _was_missed = False
                handler(signal.SIGINT, sys._getframe(1))

    def _note(self, *_: object) -> None:
        self.is_pending = True
        if self._wake is not None:
            self._wake()
