"""Warns the user, in his line: that workers are not forked, and of data that travels in a costly form."""

from __future__ import annotations

import collections
import sys
import warnings
from typing import TYPE_CHECKING

from loaderpool import errors
from loaderpool.errors import LargeDataWarning, WorkersNotForkedWarning
from loaderpool.system import role
from loaderpool.transport.payload.ship import Shipment

if TYPE_CHECKING:
    from loaderpool.transport.payload.fork_check import ForkObstacle

_OWN_PREFIX = "loaderpool"


class PendingWarnings:
    """What came up in other processes, for the user to be warned of in a line of his.

    Attributes:
        obstacles: why workers are not forked.
    """

    def __init__(self) -> None:
        self.obstacles: tuple[ForkObstacle, ...] = ()
        self._due: collections.deque[tuple[type[Warning], str]] = collections.deque()

    @property
    def are_due(self) -> bool:
        """Whether there is one that was not said."""
        return bool(self._due)

    def note_obstacles(self, obstacles: tuple[ForkObstacle, ...], node: str) -> None:
        """Workers are not forked, on this node or (where it is empty) this machine; said of the first such node."""
        if not self.obstacles:
            self.obstacles = obstacles
            self.note(WorkersNotForkedWarning.__name__, _why_not_forked(obstacles, node))

    def note(self, category: str, text: str) -> None:
        """Something else; what a host is told of its own workers its dispatcher passes on.

        Args:
            category: the name of a class in `errors`.
            text: what is said.
        """
        if role.is_trainer():
            self._due.append((getattr(errors, category), text))

    def say(self) -> None:
        """Warn in the line of the user's that has led here. Not while a lock is held: it may raise.

        Raises:
            Warning: where a filter makes an error of it.
        """
        while self._due:
            try:
                category, text = self._due.popleft()
            except IndexError:  # another thread has said it
                return
            warnings.warn(text, category, stacklevel=level_outside())


def _why_not_forked(obstacles: tuple[ForkObstacle, ...], node: str) -> str:
    causes = "; ".join(obstacle.describe() for obstacle in obstacles[:3])
    more = f"; and {len(obstacles) - 3} more" if len(obstacles) > 3 else ""
    advice = "start threads in setup=, which runs once in each worker, instead of on import"
    if any(obstacle.runtimes for obstacle in obstacles):
        no_operation = "run no operation of a framework on import, capture NumPy arrays in place of its tensors"
        advice = f"{no_operation}, and {advice}"
    where = f" on node {node}" if node else ""
    return (
        f"the workers{where} are not forked: {causes}{more}, and a fork would copy the locks of such threads without "
        "the threads. So each worker is an interpreter of its own, which imports everything anew: safe, but slower to "
        f"start, and without shared memory for what modules hold. To have them forked, {advice}."
    )


def level_outside() -> int:
    """Return the `stacklevel`, for our caller, of the innermost frame that is not this package's."""
    level, frame = 0, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _OWN_PREFIX:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level + 1


def warn_of_data(shipment: Shipment) -> None:
    """Warn, in the line of the user's that has led here, of long lists that are not packed, and of those of ints.

    Raises:
        LargeDataWarning: where a filter makes an error of it.
    """
    texts = [str(each) for each in shipment.captured if each.left_because]
    for text in (*texts, *shipment.hints):
        warnings.warn(text, LargeDataWarning, stacklevel=level_outside())
