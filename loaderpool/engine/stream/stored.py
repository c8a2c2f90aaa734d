"""`StoredItems`: items of a stream's batches in the arena, until no worker needs them any more."""

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
