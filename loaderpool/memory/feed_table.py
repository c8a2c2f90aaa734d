"""The table of a feed: where in the arena the items of each batch of a stream lie, written by the trainer.

    entry   [batch + 1 | offset | nbytes | buffers | first position | rows]

A batch's entry is that of its number modulo ENTRIES.

FEED-1: the number of an entry's batch is stored last, and taken away before its bytes are used for anything else. So a
worker that finds the number before and after it has copied the bytes has copied the right ones. Only a worker whose run
was abandoned can find another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Batches that may be read ahead. Fewer: chunks of tiny batches leave some of very many workers idle.
ENTRIES = 4096
_FIELDS = 8  # a cache line
FEED_TABLE_BYTES = ENTRIES * _FIELDS * 8


class Bundle(NamedTuple):
    """The items of one batch, as they lie in the arena."""

    offset: int
    nbytes: int
    buffers: int  # large arrays behind the pickle; if any, the sizes of all parts stand before it
    first: int  # position of the first item
    rows: int


class FeedTable:
    """Reads and writes the table.

    Args:
        shared: the arena's mapping.
        offset: where in it the table lies.
    """

    def __init__(self, shared: Any, offset: int) -> None:
        self._numbers = memoryview(shared)[offset : offset + FEED_TABLE_BYTES].cast("Q")

    def write(self, batch: int, bundle: Bundle) -> None:
        """Enter a batch whose bytes are in their place."""
        numbers, at = self._numbers, batch % ENTRIES * _FIELDS
        numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4], numbers[at + 5] = bundle
        # SYNC: stored last; pairs with FeedTable.read. Workers are told of the batch through a pipe after this.
        numbers[at] = batch + 1

    def clear(self, batch: int) -> None:
        """Take a batch out, before its bytes are used for anything else."""
        self._numbers[batch % ENTRIES * _FIELDS] = 0

    def read(self, batch: int) -> Bundle | None:
        """Return where a batch lies; None: it was taken out."""
        numbers, at = self._numbers, batch % ENTRIES * _FIELDS
        if numbers[at] != batch + 1:
            return None
        return Bundle(*numbers[at + 1 : at + 6])

    def release(self) -> None:
        """Look at the arena no more."""
        self._numbers.release()
