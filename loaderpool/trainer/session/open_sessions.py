"""The sessions that are open in this process, and their end with the interpreter's."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from typing import Protocol

from loaderpool.system.interrupts import InterruptsHeld, note_exit


class _Session(Protocol):
    def close(self) -> None:
        """End supervisor and workers. May be called twice, from any thread."""


live: weakref.WeakSet[_Session] = weakref.WeakSet()


def live_sessions() -> Iterator[_Session]:
    """Return the sessions that are open in this process."""
    return iter(list(live))


def close_all() -> None:
    """Close every session, for the interpreter ends; in one step that Ctrl-C does not break off."""
    with InterruptsHeld(then="drop"):
        note_exit()
        for session in live_sessions():
            session.close()


# Before the interpreter is torn down: a tf.data thread that waits in one of our calls would hang the exit for ever.
atexit.register(close_all)
