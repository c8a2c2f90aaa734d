"""Sources by index whose items may be others in each epoch."""

from __future__ import annotations

from typing import Any


class VaryingSource:
    """Base of sources whose items are a function of epoch and index.

    `len` is that of each epoch. As a plain sequence, such a source has the items of epoch 0.

    Attributes:
        varies: if any epoch has other items than epoch 0.
        records: number of different items over all epochs.
    """

    __slots__ = ()

    varies: bool
    records: int

    def item(self, epoch: int, index: int) -> Any:
        """Return an item of an epoch. Any process may ask for any of them, in any order."""
        raise NotImplementedError

    def record(self, epoch: int, index: int) -> int:
        """Return the number of that item among all `records`; equal numbers mean the same item."""
        raise NotImplementedError


def varying(source: Any) -> VaryingSource | None:
    """Return a source whose epochs differ; None if they do not."""
    return source if isinstance(source, VaryingSource) and source.varies else None
