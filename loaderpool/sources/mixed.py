"""`Mix`: the source that `mix` returns. A loader takes it apart into an order and the records."""

from __future__ import annotations

from typing import Any, SupportsIndex

from loaderpool.checks import whole_number
from loaderpool.plan.shares import MixOrder
from loaderpool.sources.indexing import Indexed, MixRecords, position_of


class Mix:
    """Items of several sources in a seeded order, as returned by `mix`.

    As a plain sequence, it has the items of epoch 0.

    Attributes:
        order: Record at each index of an epoch.
        records: All records.
    """

    def __init__(
        self, sources: list[Indexed], weights: list[int], seed: int, size: int, goes_on: bool
    ) -> None:
        orders = [each.order if isinstance(each, Mix) else len(each) for each in sources]
        self.order: MixOrder = MixOrder(weights, seed, size, goes_on, orders)
        parts = [each.records if isinstance(each, Mix) else each for each in sources]
        self.records: MixRecords = MixRecords(parts)

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the sources with their numbers, for messages (`walk.parts_of`)."""
        return self.records.user_parts()

    def __len__(self) -> int:
        return self.order.size

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.records[self.order.record(0, position_of(index, self.order.size))]

    def origin(self, index: SupportsIndex, epoch: int = 0) -> tuple[int, int]:
        """Return the number of the source of the item at `index`, and the index in that source."""
        epoch = whole_number("epoch", epoch, at_least=0)
        return self.order.origin(epoch, position_of(index, len(self)))

    def __repr__(self) -> str:
        return f"<mix of {len(self.records.sources)} sources: {len(self)} items>"
