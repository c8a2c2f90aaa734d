"""Sources by index whose items may differ between epochs."""

from __future__ import annotations


class VaryingSource:
    """Base of sources whose items are a function of epoch and index.

    `len` is the length of each epoch. As a plain sequence, such a source has the items of epoch 0.

    Attributes:
        varies: True if any epoch has other items than epoch 0.
        records: number of different items over all epochs.
    """

    __slots__ = ()

    varies: bool
    records: int

    def item(self, epoch: int, index: int) -> object:
        """Return an item of an epoch. Any process may read any item, in any order."""
        raise NotImplementedError

    def record(self, epoch: int, index: int) -> int:
        """Return the number of an item among all `records`. Equal numbers mean the same item."""
        raise NotImplementedError


def varying(source: object) -> VaryingSource | None:
    """Return the source if its epochs differ, otherwise None."""
    return source if isinstance(source, VaryingSource) and source.varies else None
