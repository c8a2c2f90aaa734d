"""`IndexedItems`: items of a source that is read by index, in the order of the loader's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import CapturedGenerators
from loaderpool.plan.order import kept
from loaderpool.sources.indexing import Keys
from loaderpool.transport.messages import Ticket
from loaderpool.worker.item_reader import ItemReader
from loaderpool.worker.tickets import Opened

if TYPE_CHECKING:
    from loaderpool.plan.order import Order
    from loaderpool.plan.taken import Start

_Positions = npt.NDArray[np.int64]
# Positions and indices of consecutive batches, the number of rows of each batch if they differ, and
# the keys of the rows, as in `Opened.keys`.
_Block = tuple[_Positions, list[int], tuple[int, ...], Keys]
# Rows that are looked up at once in the main process, because a look-up for each tiny batch would
# be slow. Smaller: more look-ups. Larger: the first batch of a shuffled epoch waits longer for
# them.
_ROWS = 1024
_PASSES = 4  # concurrent iterations over one loader whose latest rows are kept


class IndexedItems:
    """Items of a source with an index.

    Args:
        reader: Reads an item.
        looks_ahead: Positions and indices of several batches are computed at once.
    """

    def __init__(self, reader: ItemReader, looks_ahead: bool) -> None:
        self._reader, self._looks_ahead = reader, looks_ahead
        self._order: Order | None = None  # order of the rows in `_latest`
        self._latest: dict[tuple[int, int, Start], _Block] = {}

    def first_batches(self, plan: Plan) -> int:
        """Return the number of all batches of an epoch."""
        return plan.batches_per_epoch

    def open(self, ticket: Ticket, plan: Plan) -> Opened:
        """Return the rows of a ticket."""
        plan, epoch = plan.after(ticket.rest), ticket.epoch
        if self._looks_ahead and ticket.stop < 0:
            return self._reader.open(ticket, *self._looked_up(ticket, plan))
        positions = plan.positions(epoch, ticket.batch, ticket.batches)
        batch_rows: tuple[int, ...] = ()
        if plan.rows_vary:
            batch_rows = plan.batch_rows(epoch, ticket.batch, ticket.batches)
        if ticket.batches == 1 and ticket.stop >= 0:
            positions = positions[ticket.start : ticket.stop]
        indices = plan.order.take(epoch, positions)
        keys = self._reader.keys_of(epoch, indices)
        return self._reader.open(ticket, positions, indices.tolist(), batch_rows, keys)

    def _looked_up(self, ticket: Ticket, plan: Plan) -> _Block:
        """Return the rows of a whole batch. Those of several batches are computed at once."""
        if plan.order is not self._order:  # a new order was drawn, perhaps for the same epoch
            self._order = plan.order
            self._latest.clear()
        most_rows, batch = plan.most_rows, ticket.batch
        at_once = max(1, _ROWS // most_rows)
        if plan.mix is not None and batch < at_once:
            # A mix makes a block of its items for each shuffled row, so the first batch of an
            # epoch would wait for many blocks.
            at_once = 1 << max(0, batch.bit_length() - 1)
        at = batch % at_once
        first = batch - at
        key = ticket.epoch, first, ticket.rest
        positions, indices, batch_rows, keys = self._latest.get(key) or kept(
            self._latest, key, lambda: self._block(plan, ticket.epoch, first, at_once), _PASSES
        )
        rows = batch_rows[at : at + 1]
        start = sum(batch_rows[:at]) if rows else at * most_rows
        stop = start + (rows[0] if rows else most_rows)
        return positions[start:stop], indices[start:stop], rows, keys[start:stop]

    def _block(self, plan: Plan, epoch: int, batch: int, most: int) -> _Block:
        """Return the rows of at most `most` batches, from `batch` on."""
        count = min(most, plan.batches_per_epoch - batch)
        positions = plan.positions(epoch, batch, count)
        batch_rows = plan.batch_rows(epoch, batch, count) if plan.rows_vary else ()
        indices = plan.order.take(epoch, positions)
        return positions, indices.tolist(), batch_rows, self._reader.keys_of(epoch, indices)

    def put(self, positions: Sequence[int], items: Sequence[object]) -> None:
        """Do nothing, because each worker reads items itself."""

    def seed(self, captured: CapturedGenerators | None) -> None:
        """Do nothing, because each sample is seeded by itself."""

    def add_generators(self, captured: CapturedGenerators | None) -> None:
        """Do nothing."""

    def check_after_each(self, check: Callable[[], None]) -> None:
        """Do nothing: `Calls` checks after each call."""

    def forget(self, epoch: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
