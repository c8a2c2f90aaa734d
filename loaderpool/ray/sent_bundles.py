"""The items of a stream on their way from the trainer's arena to a host's: with each ticket those of its batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.memory.arena import Arena
from loaderpool.memory.extent_pool import ExtentPool
from loaderpool.memory.extents import Extent
from loaderpool.memory.feed_table import FEED_TABLE_BYTES, Bundle, FeedTable


class SentBundle(NamedTuple):
    """The items of one batch, as they travel."""

    batch: int
    about: Bundle  # its offset is that of the sender's arena
    content: npt.NDArray[np.uint8]


def read_bundles(shared: Any, table: int, batches: Iterable[int]) -> list[SentBundle] | None:
    """Return copies of what the trainer has entered for some batches; None: they are not wanted any more (FEED-1).

    Args:
        shared: the trainer's arena.
        table: where in it the feed's table lies.
        batches: counted from the run's first epoch on.
    """
    feed = FeedTable(shared, table)
    sent = []
    for batch in batches:
        bundle = feed.read(batch)
        if bundle is None:
            return None
        content = np.frombuffer(shared, np.uint8, bundle.nbytes, bundle.offset).copy()
        if feed.read(batch) != bundle:
            return None
        sent.append(SentBundle(batch, bundle, content))
    return sent


class HostedFeed:
    """A feed's table in a host's arena, with the bundles of what is under way there.

    The session's lock is held by the caller.

    Attributes:
        offset: of the table.

    Args:
        arena: the host's.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena, self._rooms = arena, ExtentPool(arena)
        self._extent: Extent | None = self._rooms.take(FEED_TABLE_BYTES)
        self.offset = self._extent.offset
        arena.map[self.offset : self.offset + FEED_TABLE_BYTES] = bytes(FEED_TABLE_BYTES)
        self._table = FeedTable(arena.map, self.offset)
        self._held: dict[int, Extent] = {}  # by batch

    def put(self, bundles: Iterable[SentBundle]) -> None:
        """Enter what has come.

        Raises:
            MemoryLimitError: the node has no room for it.
        """
        for batch, about, content in bundles:
            self.drop([batch])
            extent = self._held[batch] = self._rooms.take(content.nbytes)
            self._arena.map[extent.offset : extent.offset + content.nbytes] = content.data
            self._table.write(batch, about._replace(offset=extent.offset))

    def drop(self, batches: Iterable[int]) -> None:
        """Forget what is not made again."""
        for batch in batches:
            extent = self._held.pop(batch, None)
            if extent is not None:
                self._table.clear(batch)
                self._rooms.give(extent)

    def free(self) -> None:
        """Give all memory back: no worker looks at it any more. Twice is fine."""
        self.drop(list(self._held))
        extent, self._extent = self._extent, None
        if extent is not None:
            self._table.release()
            self._rooms.give(extent)
            self._rooms.close()
