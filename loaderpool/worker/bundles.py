"""The items of a stream on their way to workers: each batch's in a bundle in the arena, found by the table of its feed.

    bundle   [sizes of the parts, 8 bytes each, if there are large arrays] pickle | array | array ...
    entry    [batch + 1 | offset | nbytes | buffers | first position]

A large array goes from its own memory into the bundle, and from there into memory of the worker's: two copies in all.
The trainer writes the table. A batch's entry is that of its number modulo ENTRIES.

FEED-1: the number of an entry's batch is stored last, and taken away before its bytes are used for anything else. So a
worker that finds the number before and after it has copied the bytes has copied the right ones. Only a worker whose run
was abandoned can find another.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from loaderpool.errors import UnpicklableError
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.pickling import out_of_band, receive, send

# Arrays of fewer bytes go into the pickle, and are copied once more there and once more out of it. Smaller: the calls
# for each of them cost more than these copies. Larger: copies that cost more.
_LARGE_BYTES = 1 << 15
# Batches that may be read ahead. Fewer: chunks of tiny batches leave some of very many workers idle.
ENTRIES = 4096
_FIELDS = 8  # a cache line
FEED_TABLE_BYTES = ENTRIES * _FIELDS * 8


class Bundle(NamedTuple):
    """The items of one batch, as they lie in the arena."""

    offset: int
    nbytes: int
    buffers: int  # large arrays after the pickle; if any, the sizes of all parts stand before it
    first: int  # position of the first item


class FeedTable:
    """Reads and writes the table.

    Args:
        shared: the arena's mapping.
        offset: where in it the table lies.
    """

    def __init__(self, shared: Any, offset: int) -> None:
        self._shared = shared
        self._numbers = memoryview(shared)[offset : offset + FEED_TABLE_BYTES].cast("Q")

    def write(self, batch: int, bundle: Bundle) -> None:
        """Enter a batch whose bytes are in their place."""
        numbers, at = self._numbers, batch % ENTRIES * _FIELDS
        numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4] = bundle
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
        return Bundle(*numbers[at + 1 : at + 5])

    def items(self, batch: int, loader: int) -> tuple[int, list[Any]] | None:
        """Return the position of a batch's first item, and the items; None: it was taken out.

        Arrays in them lie in memory that is the function's to write to and to keep. Classes are the loader's.
        """
        bundle = self.read(batch)
        parts = [] if bundle is None else _copied(self._shared, bundle)
        if bundle is None or not parts or self.read(batch) != bundle:  # FEED-1
            return None
        return bundle.first, receive(parts[0], [memoryview(copy) for copy in parts[1:]], own=loader)

    def release(self) -> None:
        """Look at the arena no more."""
        self._numbers.release()


def _copied(shared: Any, bundle: Bundle) -> list[Any]:
    """Return copies of a bundle's pickle and of its arrays; none: what lies here is another bundle's by now."""
    at, end = bundle.offset, bundle.offset + bundle.nbytes
    if not bundle.buffers:
        return [shared[at:end]]
    sizes = np.frombuffer(shared[at : at + 8 * (1 + bundle.buffers)], np.uint64).tolist()
    ends = list(itertools.accumulate(sizes, initial=at + 8 * len(sizes)))
    if ends[-1] > end:
        return []
    with memoryview(shared) as view:
        arrays = [bytearray(view[start:stop]) for start, stop in itertools.pairwise(ends[1:])]
    return [shared[ends[0] : ends[1]], *arrays]


# ---- items into bundles ----


class Frame(NamedTuple):
    """The items of one batch, pickled; of arrays only views, so to be written before the next one is read."""

    first: int  # position of the first one
    rows: int
    buffers: int  # large arrays
    parts: Sequence[bytes | memoryview]  # what a bundle is made of, one after the other

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))

    def write_into(self, view: memoryview) -> None:
        """Fill `uint8[nbytes]`, wherever it lies."""
        at = 0
        for part in self.parts:
            view[at : at + len(part)] = part
            at += len(part)


def frames(batches: Iterator[tuple[int, list[Any]]]) -> Generator[Frame, None, None]:
    """A frame for each batch of `sources.stream.read_batches`; UnpicklableError: an item cannot travel."""
    for first, items in batches:
        buffers: list[memoryview] = []
        try:
            pickled = send(items, out_of_band(buffers.append, _LARGE_BYTES))
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise UnpicklableError(
                f"an item in the stream's batch from position {first} on cannot be pickled and sent to the workers: "
                f"{type(error).__name__}: {error}"
            ) from error
        parts: list[bytes | memoryview] = [pickled, *buffers]
        if buffers:
            parts.insert(0, array.array("Q", map(len, parts)).tobytes())
        yield Frame(first, len(items), len(buffers), parts)
        del items, buffers, parts  # or two batches would be held while the next one is read
