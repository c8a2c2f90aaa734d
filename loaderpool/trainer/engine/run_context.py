"""`RunContext`: what the runs of one loader need of the engine that they are of."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from loaderpool.trainer.engine.batch_layout import BatchLayout
from loaderpool.trainer.engine.engine_failure import EngineFailure
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.stream.feed import Feed
from loaderpool.transport.payload.load_time import NOT_TOLD, LoadTime


class LiveRun(Protocol):
    """A run that the supervisor knows."""

    number: int
    feed: Feed | None

    @property
    def slots_ready(self) -> int:
        """How many slots have batches that are finished and not taken yet. Runs in: any thread."""

    def forget(self) -> None:
        """No worker reads anything of it any more. The session's lock is held."""


class RunOwner(Protocol):
    """The engine, as its runs call it. The session's lock is held."""

    is_closed: bool  # also without the lock: it only ever becomes True

    def check_open(self) -> None:
        """Raise where the loader, or the pool under it, was closed."""

    def outgrown(self, nbytes: int) -> None:
        """A batch of `nbytes` did not fit its slot."""

    def on_run_ended(self, run: LiveRun) -> None:
        """The supervisor has forgotten this run: it was the last word about it."""


@dataclasses.dataclass
class DeliveryCounts:
    """How a loader's batches were handed over. Changed with the session's lock held."""

    largest_chunk: int = 1  # batches of a delivery of a stream
    lent: int = 0
    copied: int = 0
    copied_ns: int = 0  # that this took
    oversize: int = 0
    load_time: LoadTime = NOT_TOLD  # of the payload, in the supervisor that took longest


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Made for each pass; an engine keeps none, or each would keep the other."""

    session: EngineSession
    number: int  # of the loader
    owner: RunOwner
    layout: BatchLayout
    failure: EngineFailure
    is_deterministic: bool
    runs: dict[int, LiveRun]  # by number, until the supervisor forgets them
    counts: DeliveryCounts
