"""Which rows single batches have, looked up for many batches at once: a shuffled order costs by the call, not the row.

To look up one position takes 25 us, to look up a thousand takes 40. A ticket of a worker covers many tiny batches; a
batch that is made by itself would pay for each, more than a tiny one takes to make. Nothing but the plan is asked, so
what is looked up and never used has cost nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderpool.plan.base import BasePlan, Start

# Rows that are looked up at once. Fewer: tiny batches pay for it again; more: the first batch waits for them.
_ROWS = 1024
# Passes side by side, each of which goes on where it is. More are right, too, and slow.
_PASSES = 4


_Rows = tuple[npt.NDArray[np.int64], list[int]]  # positions and indices of a batch
_NOTHING: tuple[int, list[_Rows]] = 0, []


class OrderAhead:
    """Gives positions and indices of one batch after the other, as the plan has them.

    Args:
        plan: whose batches all have the same rows, but for the last.
    """

    def __init__(self, plan: BasePlan) -> None:
        self._plan = plan
        # By epoch and start, of consecutive batches: the first one's number, and the rows of each.
        self._ranges: dict[tuple[int, Start], tuple[int, list[_Rows]]] = {}

    def rows_of(self, epoch: int, batch: int, after: Start) -> _Rows:
        """Return the positions of a batch's rows, int64[rows], and the source's index at each.

        Args:
            epoch: which epoch, from 0.
            batch: which batch of this shard, from 0.
            after: the start from which batches are counted.

        Raises:
            IndexError: the epoch has no such batch.
        """
        first, batches = self._ranges.get((epoch, after), _NOTHING)
        if not first <= batch < first + len(batches):
            first, batches = self._look_up(epoch, batch, after)
        return batches[batch - first]

    def _look_up(self, epoch: int, batch: int, after: Start) -> tuple[int, list[_Rows]]:
        plan = self._plan.after(after)
        rows = plan.most_rows
        count = max(1, min(_ROWS // rows, plan.batches_per_epoch - batch))
        positions = plan.positions_of(epoch, batch, count)
        indices = plan.indices(epoch, positions)
        starts = range(0, count * rows, rows)  # the last batch may have fewer rows
        found = batch, [(positions[start : start + rows], indices[start : start + rows]) for start in starts]
        self._ranges.pop((epoch, after), None)
        while len(self._ranges) >= _PASSES:
            del self._ranges[next(iter(self._ranges))]  # the oldest
        self._ranges[epoch, after] = found
        return found
