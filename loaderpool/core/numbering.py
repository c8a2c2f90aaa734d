"""Batch numbers of a run: all epochs of a loader, one after the other. Pure."""

from __future__ import annotations

from loaderpool.plan.base import BasePlan, Start


class Numbering:
    """Where each batch number is in a plan. The rest of an epoch has that epoch's last numbers.

    Args:
        plan: of whole epochs.
        epoch: of which `rest` is where it begins.
        rest: as `BasePlan.after` has it; falsy: all epochs are whole.
    """

    def __init__(self, plan: BasePlan, epoch: int = 0, rest: Start = 0) -> None:
        self._plan, self._epoch, self._rest = plan, epoch, rest
        self._rest_plan = plan.after(rest) if rest else plan
        self.batches_per_epoch, self.lanes = plan.batches_per_epoch, plan.lanes
        self.batch_size = plan.most_rows
        self._missing = self.batches_per_epoch - self._rest_plan.batches_per_epoch

    @property
    def first(self) -> int:
        """The number of the first batch of `epoch`."""
        return self._epoch * self.batches_per_epoch + self._missing

    def locate(self, number: int) -> tuple[int, int, Start]:
        """Return the epoch of batch `number`, which batch of it that is, and where it begins (0: it is whole)."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._rest and epoch == self._epoch:
            return epoch, batch - self._missing, self._rest
        return epoch, batch, 0

    def alike(self, number: int) -> int:
        """Return how many batches from `number` on may share a slot: the last one of an epoch may be shorter."""
        _, batch, rest = self.locate(number)
        return max(1, (self._rest_plan if rest else self._plan).full_batches - batch)

    def total_rows(self, number: int, count: int) -> int:
        """Return the rows of `count` batches from `number` on, all of one epoch."""
        epoch, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        if plan.rows_vary:
            return sum(plan.rows(epoch, each) for each in range(batch, batch + count))
        return (count - 1) * plan.most_rows + (plan.most_rows if batch + count <= plan.full_batches else plan.last_rows)
