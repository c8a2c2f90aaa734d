"""How many deaths within some time are made good: workers' in the supervisor, the supervisor's in the trainer."""

from __future__ import annotations

import collections


class RestartLimit:
    """Counts the latest deaths, and says whether there were more of them than may be.

    Args:
        max_restarts: a number of deaths and the seconds within which more of them are too many; None: no limit.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._most = max_restarts[0] if max_restarts else None
        self._window_ns = int(max_restarts[1] * 1e9) if max_restarts else 0
        self._deaths: collections.deque[int] = collections.deque()  # when; kept only where there is a limit

    @property
    def count(self) -> int:
        """How many there were of late."""
        return len(self._deaths)

    @property
    def is_exceeded(self) -> bool:
        """Whether these were too many."""
        return self._most is not None and len(self._deaths) > self._most

    def note(self, now_ns: int) -> None:
        """Count the death of a process."""
        if self._most is not None:
            self._deaths.append(now_ns)
            while self._deaths[0] < now_ns - self._window_ns:
                self._deaths.popleft()

    def forgive(self, deaths: int) -> None:
        """Count the latest deaths no more."""
        for _ in range(min(deaths, len(self._deaths))):
            self._deaths.pop()
