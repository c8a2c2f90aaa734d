"""What `workers="auto"` has decided, for who is told of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Decision:
    """A change of the number of workers by `workers="auto"`."""

    time_s: float  # when, in seconds since 1970, as of `time.time()`
    workers_before: int
    workers: int
    reason: str


class Autotuned(NamedTuple):
    """How far `workers="auto"` may go, and what it did; as it stands here, where the number is the user's."""

    most: int = 0  # workers; 0: the number is not changed
    decisions: tuple[Decision, ...] = ()  # the latest last
