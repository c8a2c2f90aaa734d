"""Warns the user, in his line: that workers are not forked, and of data that travels in a costly form."""

from __future__ import annotations

import collections
import sys
import warnings
from typing import TYPE_CHECKING

from loaderpool.errors import LoaderpoolWarning
from loaderpool.system import process

if TYPE_CHECKING:
    from loaderpool.transport.payload.captured_state import CapturedState
    from loaderpool.transport.payload.ship import Shipment

_OWN_PREFIX = "loaderpool"
_MOST_CHANGES = 5  # that one warning names


class PendingWarnings:
    """What came up in other processes, for the user to be warned of in a line of his.

    Attributes:
        are_not_forked: workers are executed, as a fork would be unsafe.
        due: texts that were not said.
    """

    def __init__(self) -> None:
        self.are_not_forked = False
        self.due: collections.deque[str] = collections.deque()

    def note_not_forked(self, text: str) -> None:
        """Workers are not forked; why, is said of the first machine on which that is so."""
        if not self.are_not_forked:
            self.are_not_forked = True
            self.note(text)

    def note(self, text: str) -> None:
        """Something else; what a node is told of its own workers its dispatcher passes on."""
        if process.is_trainer():
            self.due.append(text)

    def say(self) -> None:
        """Warn in the line of the user's that has led here. Not while a lock is held: it may raise.

        Raises:
            Warning: where a filter makes an error of it.
        """
        while self.due:
            try:
                text = self.due.popleft()
            except IndexError:  # another thread has said it
                return
            warnings.warn(text, LoaderpoolWarning, stacklevel=level_outside())


def level_outside() -> int:
    """Return the `stacklevel`, for our caller, of the innermost frame that is not this package's."""
    level, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _OWN_PREFIX:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level + 1


def warn_of_data(shipment: Shipment) -> None:
    """Warn, in the line of the user's that has led here, of what each worker would have a copy of.

    Raises:
        LoaderpoolWarning: where a filter makes an error of it.
    """
    for warning in shipment.warnings:
        warnings.warn(warning, stacklevel=level_outside())


def warn_of_changes(captured: CapturedState, in_replay: bool = False) -> None:
    """Warn, in the line of the user's that has led here, of what has changed since a loader was made; of each once.

    Args:
        captured: what the loader's workers have.
        in_replay: said of a replay, which has the present values; then all is told, again, too.

    Raises:
        LoaderpoolWarning: where a filter makes an error of it.
    """
    changes = captured.changes(all_of_them=in_replay)
    if in_replay:  # of the loader's own function it has the one that the workers have
        changes = [change for change in changes if not change.root]
    if not changes:
        return
    more = [f"and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
    lines = "\n  ".join([*map(str, changes[:_MOST_CHANGES]), *more])
    roots = ", ".join(f"{change.root}={change.name}" for change in changes if change.root)
    users = "this replay uses the new values, but the workers" if in_replay else "its workers"
    what = f"These values changed after the loader was created; {users} still use the old ones:\n  {lines}"
    text = f"{what}\nTo use the new values everywhere: loader = loader.replace({roots})"
    warnings.warn(text, LoaderpoolWarning, stacklevel=level_outside())
