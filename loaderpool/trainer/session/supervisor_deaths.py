"""The deaths of a session's supervisors: whether there may be another one, and what is said if not."""

from __future__ import annotations

from collections.abc import Iterable

from loaderpool.errors import SupervisorLostError
from loaderpool.plan.generator_positions import item_name
from loaderpool.supervisor.restart_limit import RestartLimit
from loaderpool.system import clock

# Supervisors in a row that may die before a consumer has taken anything. Smaller: a few kills from outside, while one
# of them starts, end the pool. Larger: the longer a sample that takes its supervisor along is tried.
_WITHOUT_PROGRESS = 8


class SupervisorDeaths:
    """Counts the deaths of a session's supervisors; the caller holds the session's lock.

    Args:
        max_restarts: how many are made good, and within how many seconds; None: any number.
    """

    def __init__(self, max_restarts: tuple[int, float] | None) -> None:
        self._limit, self._max_restarts = RestartLimit(max_restarts), max_restarts
        self._without_progress = 0  # since a consumer took anything
        self._deliveries = 0  # that consumers had taken at the latest one
        self._indices: tuple[int, ...] = ()  # at which the workers were at the latest one

    def note(self, indices: Iterable[int], deliveries: int) -> None:
        """A supervisor died.

        Args:
            indices: source indices of the samples that its workers were at.
            deliveries: how many consumers have taken so far: if more than at the latest death, then whatever ended
                supervisors before, it was not for good.
        """
        self._limit.note(clock.monotonic_ns())
        self._without_progress = self._without_progress + 1 if deliveries == self._deliveries else 1
        self._deliveries = deliveries
        self._indices = tuple(sorted(indices))

    @property
    def are_too_many(self) -> bool:
        """Whether so many supervisors died that another one would likely die, too."""
        return self._limit.is_exceeded or (self._max_restarts is not None and self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        return self._without_progress > _WITHOUT_PROGRESS

    def error(self, name: str, how: str) -> SupervisorLostError:
        """Return what is raised where the latest one is not replaced."""
        advice = " If the machine ran out of memory, lower Limits.memory or the number of workers"
        if self._limit.is_exceeded and self._max_restarts is not None:
            most, seconds = self._max_restarts
            advice = (
                f" {self._limit.count} died within {seconds:g} s, and restarts=({most}, {seconds:g}) makes good "
                f"{most}.{advice}"
            )
        if self._is_stuck and self._indices:
            at_work = ", ".join(map(item_name, self._indices)).replace(", source index", ",")
            advice = (
                f" It was the {self._without_progress}th in a row, and no batch was taken between; its workers were at "
                f"{at_work} or a few behind: does the function end more than its own process, as os.killpg does?"
            )
        return SupervisorLostError(f"{name} died ({how}); its workers ended too.{advice}")
