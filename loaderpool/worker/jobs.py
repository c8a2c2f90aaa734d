"""What is asked of a loader's work, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ElementSpec
from loaderpool.memory.layout import VaryingLayout
from loaderpool.plan.base import bounds_of
from loaderpool.plan.order import Start
from loaderpool.system import process
from loaderpool.transport.reports import Failure, RowFailure, describe_timeout, how_it_ended


class Abandoned(Exception):
    """This ticket's run was abandoned."""


class WorkFailed(Exception):
    """The user's function raised, or returned what the spec does not allow."""

    def __init__(self, failure: Failure, error: BaseException) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.error = error


@dataclasses.dataclass(slots=True)  # not frozen: a tiny batch would pay a microsecond for that
class Job:
    """What to make: `count` batches from `batch` on, or rows `row_start` to `row_stop` of one."""

    run: int
    epoch: int
    batch: int
    count: int
    row_start: int
    row_stop: int | None  # None: the end of the batch
    # Above 0 it has brought down a worker: rows are made one by one, so that the board names the last, and nothing else
    # is made at the same time.
    attempt: int = 0
    after: Start = 0  # where the plan begins: batches are counted from there
    feed: int = 0  # where in the arena the table of its stream lies; 0: the items are the source's
    batch_rows: tuple[int, ...] = ()  # rows of each batch of a chunk, where they vary

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """Return where each batch begins and ends among the rows, of which there are so many."""
        if self.count == 1:
            return [(0, rows)]
        if self.batch_rows:
            return bounds_of(self.batch_rows)
        size = rows // self.count  # a chunk is of full batches only
        return [(start, start + size) for start in range(0, rows, size)]


class Opened(NamedTuple):
    """A job and its rows."""

    job: Job
    positions: npt.NDArray[np.int64]  # in the plan's order
    indices: list[int]  # source index of each
    # Gives the item of a source index also when later jobs were opened; None: the source itself does.
    read: Callable[[int], Any] | None = None


class Filled(NamedTuple):
    """What was made."""

    rows: int
    row_failures: tuple[RowFailure, ...] = ()
    oversize: VaryingLayout | None = None  # it did not fit the slot; write it elsewhere
    items: int = 0  # that it was made of


class Probe(NamedTuple):
    """What the first call of the function told, and how far others of the first batch differ from it."""

    spec: ElementSpec  # of what the first one returned
    seen: ElementSpec  # the same, with None for the axes that others showed to vary; where none did, for all that may
    nbytes: int  # of what one returned: the most that was seen in the first batch
    rows: int  # of the batch it was called for; 1 for a sample
    elapsed_ns: int  # of the first call
    batch_rows: int  # of the batch that it is part of


class Exclusions:
    """Knows what each excluded sample is counted as, by epoch and source index (of a batch's call: its first item).

    Args:
        worker: this worker's number, None in the caller's process.
        timeout_s: seconds that a sample may take.
    """

    def __init__(self, worker: int | None, timeout_s: float | None) -> None:
        self._worker, self._timeout_s = worker, timeout_s or 0.0
        self._failures: dict[tuple[int, int], Failure] = {}

    def add(self, epoch: int, index: int, ran_s: float, exit_code: int) -> None:
        """Count a sample as failed: it hung a worker for `ran_s`, or (0) ended it with this exit code."""
        if ran_s:
            failure = describe_timeout(
                index=index, epoch=epoch, worker=self._worker, ran_s=ran_s, timeout_s=self._timeout_s, stacks=""
            )
        else:
            text = f"the sample crashed its worker again and again: {how_it_ended(exit_code)}"
            failure = Failure("loaderpool.WorkerLostError", text, epoch, self._worker, index=index, node=process.node())
        self._failures[epoch, index] = failure

    def find(self, epoch: int, indices: list[int]) -> Failure | None:
        """Return the failure of the call for these items, None where it may run."""
        failure = self._failures.get((epoch, indices[0])) if self._failures else None
        if failure is None or len(indices) == 1:
            return failure
        return failure._replace(index=None, indices=tuple(indices[:1000]))
