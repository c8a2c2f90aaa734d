"""Items of a stream's batches in the arena, until no worker needs them any more.

`StoredItems` has the memory. `HeldBatches` decides how long each batch needs it.
"""

from __future__ import annotations

from loaderpool.memory.arena import Arena, Extent, ExtentPool
from loaderpool.worker.bundles import FEED_TABLE_BYTES, Bundle, FeedTable

_EMPTY_TABLE = bytes(FEED_TABLE_BYTES)


class StoredItems:
    """A feed's table in the arena, and the extents that it refers to. Not thread-safe.

    Attributes:
        offset: Offset of the table in the arena.
        nbytes: Size of all extents with items.

    Args:
        arena: Arena of the pool.
        rooms: Provides the extents.

    Raises:
        MemoryLimitError: There is too little shared memory for the table.
    """

    def __init__(self, arena: Arena, rooms: ExtentPool) -> None:
        self._shared, self._rooms = arena.map, rooms
        self._extent = rooms.take(FEED_TABLE_BYTES)
        self.offset = self._extent.offset
        self._shared[self.offset : self.offset + FEED_TABLE_BYTES] = _EMPTY_TABLE
        self._table = FeedTable(self._shared, self.offset)
        self._by_batch: dict[int, Extent] = {}
        self.nbytes = 0
        self._is_freed = False

    def __len__(self) -> int:
        return len(self._by_batch)

    def enter(self, batch: int, extent: Extent, bundle: Bundle) -> None:
        """Publish the items of a batch, whose bytes are in an extent that this object owns now."""
        self._by_batch[batch] = extent
        self.nbytes += extent.nbytes
        self._table.write(batch, bundle)

    def drop(self, batch: int) -> None:
        """Release the items of a batch. Does nothing if `free` has released them."""
        extent = self._by_batch.pop(batch, None)
        if extent is not None:
            self._table.clear(batch)
            self.nbytes -= extent.nbytes
            self._rooms.give(extent)

    def free(self) -> None:
        """Release all memory, because no worker reads it any more. Idempotent."""
        if self._is_freed:
            return
        self._is_freed = True
        self._table.release()
        for extent in [self._extent, *self._by_batch.values()]:
            self._rooms.give(extent)
        self._by_batch.clear()


class HeldBatches:
    """Batches of a feed. The items of those from `_first` up to `made` are stored (FEED-2).

    Called under the pool's lock.

    Attributes:
        items: The stored items.
        made: Number of batches whose items are, or were, stored.
        latest_rows: Rows of the latest of these batches.
        latest_bytes: Size of its extent; 0: there is no batch yet.

    Args:
        items: Memory for the items, which is empty.
        most_rows: `latest_rows` as long as there is no batch.
    """

    def __init__(self, items: StoredItems, most_rows: int) -> None:
        self.items = items
        self.made = self.latest_bytes = 0
        self.latest_rows = most_rows
        self._first = 0  # first batch that may have to be made, or made again
        # taken batches from `_first` on: they are held, or will be
        self._taken: set[int] = set()

    @property
    def waiting(self) -> int:
        """Number of held batches that the consumer has not taken."""
        return len(self.items) - len(self._taken)

    def enter(self, extent: Extent, bundle: Bundle, rows: int) -> None:
        """Publish the next batch, whose bytes are in an extent that this object owns now."""
        self.latest_bytes = extent.nbytes
        self.items.enter(self.made, extent, bundle)
        self.latest_rows = rows
        self.made += 1

    def take(self, batches: range, before: int) -> None:
        """Note taken batches, and release items as `Feed.take` says."""
        self._taken.update(batches)
        while self._first < min(before, self.made):
            self._taken.discard(self._first)
            self.items.drop(self._first)
            self._first += 1
