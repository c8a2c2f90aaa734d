"""`RunContext`: what the runs of one loader need of the engine that they are of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from loaderpool import errors
from loaderpool.errors import LoaderpoolError, PoolBrokenError
from loaderpool.trainer.engine.batch_layout import BatchLayout
from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.remote_errors import lost_error, sample_error, setup_error
from loaderpool.transport.messages import Notice, Words
from loaderpool.transport.pipes import Attachment, read_attachment
from loaderpool.transport.reports import Failure

if TYPE_CHECKING:
    from loaderpool.trainer.stream.feed import Feed


class EngineFailure:
    """The error that all of a loader's passes end with; none at first. What changes it holds the session's lock.

    Attributes:
        is_there: the whole loader has failed.
    """

    def __init__(self) -> None:
        self.is_there = False
        # Makes a new error for each that meets it: a kept exception would keep, through its traceback, every frame
        # that it passed, and so the loader itself.
        self._make_error: Callable[[], LoaderpoolError] | None = None
        self._may_pass = self._was_told = False

    def note(self, make_error: Callable[[], LoaderpoolError], *, may_pass: bool = False) -> None:
        """The loader fails with this error; `may_pass`: what led to it is tried again once a consumer was told."""
        self._make_error, self._may_pass, self._was_told = make_error, may_pass, False
        self.is_there = True

    def note_told(self, words: Words, attachment: Attachment) -> None:
        """The supervisor says that the first sample or the start failed, or that a process was lost."""
        report = read_attachment(attachment)
        is_of_one = words[1] != 0  # else all loaders end
        if words[0] == Notice.SPEC_FAILED:
            self.note(functools.partial(sample_error, report), may_pass=is_of_one)
        elif words[0] == Notice.LOST:
            self.note(functools.partial(lost_error, report), may_pass=is_of_one)
        elif words[0] == Notice.BROKEN:
            name, text = report
            self.note(functools.partial(getattr(errors, name), text))
        else:
            self._note_start_failed(report[0], report[1], is_of_one)

    def _note_start_failed(self, why: Failure, advice: str, is_of_one: bool) -> None:
        where = f" on node {why.node}" if why.node else ""
        if is_of_one:
            place = f"the supervisor{where}"
            what = f"{place} could not load the function and the source"
            self.note(functools.partial(setup_error, why, what, advice, place))
        else:
            what = f"no worker could be started{where}"
            self.note(functools.partial(setup_error, why, what, advice, has_traceback=False))

    def note_load_died(self, how: str) -> None:
        """The supervisor died while it loaded function and source."""
        text = (
            f"The supervisor process crashed ({how}) while importing the modules of the function and the source. It is "
            "not restarted, because the import would crash the next one too. Import the module in setup= or in the "
            "function instead. If the machine ran out of memory, capture less data."
        )
        self.note(functools.partial(PoolBrokenError, text))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self._make_error is not None:
            self._was_told = True
            raise self._make_error()

    def pass_over(self) -> bool:
        """Forget an error that may pass and that a consumer was told of; whether there was one."""
        if not (self._may_pass and self._was_told):
            return False
        self._make_error, self._may_pass, self._was_told = None, False, False
        self.is_there = False
        return True


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
    load_s: float = 0.0  # of the payload, in the supervisor that took longest


class RunContext(NamedTuple):
    """Made for each pass; an engine keeps none, or each would keep the other."""

    session: EngineSession
    number: int  # of the loader
    owner: RunOwner
    layout: BatchLayout
    failure: EngineFailure
    is_deterministic: bool
    runs: dict[int, LiveRun]  # by number, until the supervisor forgets them
    counts: DeliveryCounts
