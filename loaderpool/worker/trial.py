"""Trials: one call of the function alone, to find out whether it is what ends workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.memory.batch_form import BatchForm, UnitKind
from loaderpool.plan.base import BasePlan, bounds_of
from loaderpool.worker.calls import Calls
from loaderpool.worker.exclusions import Exclusions
from loaderpool.worker.forked_children import end_stray
from loaderpool.worker.items import WorkItems, rows_in_chunk
from loaderpool.worker.jobs import Abandoned, Job
from loaderpool.worker.progress import Progress


class Trial:
    """Runs the calls that a ticket has, one of them at a time, and drops what comes of it.

    Args:
        calls: the function.
        plan: says which item is when.
        items: says which positions a job has.
        unit: what one call of the function makes.
        progress: where each sample is noted.
        exclusions: what is not run.
    """

    def __init__(
        self, calls: Calls, plan: BasePlan, items: WorkItems, unit: UnitKind, progress: Progress, exclusions: Exclusions
    ) -> None:
        self._calls, self._plan, self._items, self._unit = calls, plan, items, unit
        self._progress, self._exclusions = progress, exclusions

    def run(self, job: Job, which: int, begin_with: int | None, form: BatchForm | None) -> int:
        """Call the function once.

        Args:
            job: what the ticket is about.
            which: which of its calls, counted from 0.
            begin_with: a source index whose call counts as the first.
            form: of the batches, for a function that writes into `out`.

        Returns:
            How many calls the job has.

        Raises:
            Abandoned: the job's run was abandoned.
        """
        calls = self._calls_of(job)
        if which >= len(calls):  # the generator has ended before
            return len(calls)
        calls.sort(key=lambda positions: begin_with not in self._plan.indices(job.epoch, positions))
        positions = calls[which]
        indices = self._plan.indices(job.epoch, positions)
        if self._exclusions.find(job.epoch, indices) is None:
            self._progress.note(job, indices[0])
            try:
                self._calls.watched(lambda _: self.call(job.epoch, positions.tolist(), indices, form))
            except Abandoned:
                raise
            except self._progress.catches as error:  # an exception kills no worker
                end_stray(error)
            end_stray()
        return len(calls)

    def _calls_of(self, job: Job) -> list[npt.NDArray[np.int64]]:
        """Return the positions of each call."""
        positions = self._items.positions(job)
        rows = rows_in_chunk(self._plan, job)
        if rows:
            batches = [positions[start:stop] for start, stop in bounds_of(rows)]
        else:
            batches = np.split(positions, job.count)
        if self._unit == "batch":
            return batches
        return [positions[row : row + 1] for positions in batches for row in range(len(positions))]

    def call(self, epoch: int, positions: list[int], indices: list[int], form: BatchForm | None) -> Any:
        """Return what one call gives, as the function returned it; raises whatever it raises.

        Args:
            epoch: keys the random streams, with the positions.
            positions: one, or all of a batch where a call makes a batch.
            indices: source index of each.
            form: of the batches, for a function that writes into `out`.
        """
        if self._unit == "batch":
            return self._calls.unit(epoch, positions, indices)
        arrays = None
        if self._calls.takes_out and form is not None and form.fixed is not None:
            fixed = form.fixed
            arrays = [np.empty((1, *shape), dtype) for shape, dtype in zip(fixed.row_shapes, fixed.dtypes, strict=True)]
        results: list[Any] = []
        self._calls.samples(epoch, positions, indices, results, arrays)
        return results[0]
