"""What follows from deaths of workers: which sample is to blame, and when there were too many. Pure.

Of the supervisor's state.
"""

from __future__ import annotations

import collections

from loaderpool.core.records import Death, Job
from loaderpool.transport.reports import Verdict

_TOGETHER = 3  # a ticket is given up at so many times the deaths of one sample: together its samples kill
_IDLE = 5  # beside the number of workers: so many may die running before they have begun anything


class Deaths:
    """The deaths of late: some, within some seconds, are made good; None: any number.

    Attributes:
        idle: running, before anything was begun.
    """

    def __init__(self, restarts: tuple[int, float] | None) -> None:
        self._restarts = restarts
        self._at: collections.deque[float] = collections.deque()  # when
        self.idle = 0

    def note(self, now: float, death: Death, had_begun: bool, workers: int) -> tuple[Verdict | None, int]:
        """A worker has died; return why nothing can go on (None: it can), and after how many deaths."""
        self.idle = 0 if had_begun or death.has_begun else self.idle + 1
        if not death.hung_s:
            self._at.append(now)
        if self._restarts is not None:
            number, seconds = self._restarts
            while self._at and self._at[0] < now - seconds:
                self._at.popleft()
            if len(self._at) > number:
                return Verdict.STORM, len(self._at)
        return (Verdict.BEFORE if self.idle > _IDLE + workers else None), self.idle

    def blame(self, job: Job, death: Death) -> Verdict | None:
        """A worker has died over this job; return why that is given up, None: it is made again.

        It is given up if the last two deaths were at the same sample, or if its samples took too many in all.
        """
        job.deaths.append(death.sample)
        deaths, most = len(job.deaths), job.loader.most_deaths
        is_same = deaths >= most and job.deaths[-1] == job.deaths[-2]
        if not (death.hung_s or is_same):
            return Verdict.TOGETHER if deaths >= _TOGETHER * most else None
        for _ in range(min(deaths - bool(death.hung_s), len(self._at))):  # they are explained, so they are no storm
            self._at.pop()
        return Verdict.ALONE
