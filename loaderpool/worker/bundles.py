"""Bundles: the items of a stream's batch in the arena, on their way to the workers.

A table, one for each feed, has the place of each bundle:

    bundle   [sizes of the parts, 8 bytes each, if any is large] pickle | array | array ...
    entry    [batch + 1 | offset | nbytes | buffers | first position]

A large array is copied twice: from its own memory into the bundle, and from there into the worker's
memory. The main process writes the table. The entry of a batch is at its number modulo ENTRIES.

FEED-1: The batch's number is stored last in its entry, and cleared before the bundle's bytes are
reused. So a worker that finds the number both before and after it has copied the bytes has a valid
copy. Only a worker whose run was abandoned can find another number.
"""

from __future__ import annotations

import array
import itertools
import mmap
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.errors import UnpicklableError
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.pickling import out_of_band, receive, send

# Arrays of fewer bytes go into the pickle. This costs one more copy into it and one out of it.
# Smaller: the calls for each array cost more than these copies. Larger: the copies cost more.
_LARGE_BYTES = 1 << 15
# Batches that may be read ahead. Smaller: with chunks of tiny batches and hundreds of workers, some
# workers are idle. Larger: more shared memory for each table.
ENTRIES = 4096
_FIELDS = 8  # an entry fills a cache line
FEED_TABLE_BYTES = ENTRIES * _FIELDS * 8

HandedOver = tuple[list[int], list[object]]
"""Positions and items that another worker has read for a ticket."""


class Bundle(NamedTuple):
    """Place of a batch's items in the arena."""

    offset: int
    nbytes: int
    # large arrays after the pickle; if there are any, the sizes of all parts precede it
    buffers: int
    first: int  # position of the first item


class FeedTable:
    """Reads and writes the table of a feed.

    Args:
        shared: the arena's mapping.
        offset: first byte of the table in it.
    """

    def __init__(self, shared: mmap.mmap, offset: int) -> None:
        self._shared = shared
        self._numbers = memoryview(shared)[offset : offset + FEED_TABLE_BYTES].cast("Q")

    def write(self, batch: int, bundle: Bundle) -> None:
        """Add a batch whose bytes are in place. Called by the main process; pairs with `read`."""
        numbers, at = self._numbers, batch % ENTRIES * _FIELDS
        numbers[at + 1], numbers[at + 2], numbers[at + 3], numbers[at + 4] = bundle
        # SYNC: stored last; pairs with FeedTable.read. A message to the workers follows it.
        numbers[at] = batch + 1

    def clear(self, batch: int) -> None:
        """Remove a batch. Called by the main process before it reuses the bundle's bytes."""
        self._numbers[batch % ENTRIES * _FIELDS] = 0

    def read(self, batch: int) -> Bundle | None:
        """Return the place of a batch, or None if it was removed."""
        numbers, at = self._numbers, batch % ENTRIES * _FIELDS
        if numbers[at] != batch + 1:
            return None
        return Bundle(*numbers[at + 1 : at + 5])

    def content(self, batch: int) -> tuple[npt.NDArray[np.uint8], Bundle] | None:
        """Return a copy of a batch's bundle as `uint8[nbytes]`, and its place here.

        None if it was removed. Called by the dispatcher of a cluster, to send it to a node.
        """
        bundle = self.read(batch)
        if bundle is None:
            return None
        copied = self._shared[bundle.offset : bundle.offset + bundle.nbytes]
        if self.read(batch) != bundle:  # FEED-1
            return None
        return np.frombuffer(copied, np.uint8), bundle

    def items(self, batch: int, loader: int) -> tuple[int, list[object]] | None:
        """Return the position of a batch's first item, and the items, or None if it was removed.

        Called by workers. Arrays in the items are copies, which the function may change and keep.
        Classes that are pickled by value are those of `loader`.
        """
        bundle = self.read(batch)
        if bundle is None:
            return None
        pickled, arrays = _copied(self._shared, bundle)
        if not pickled or self.read(batch) != bundle:  # FEED-1
            return None
        return bundle.first, receive(pickled, arrays, own=loader)

    def release(self) -> None:
        """Release the view of the arena."""
        self._numbers.release()


def unpacked(shared: memoryview, bundle: Bundle, loader: int) -> HandedOver:
    """Return the positions and items that `HandingOver` has packed. Arrays are copies.

    Classes that are pickled by value are those of `loader`.
    """
    pickled, arrays = _copied(shared, bundle)
    content: HandedOver = receive(pickled, arrays, own=loader)
    return content


def _copied(shared: mmap.mmap | memoryview, bundle: Bundle) -> tuple[bytes, list[memoryview]]:
    """Return copies of a bundle's pickle and of its arrays.

    If another bundle has overwritten it, the sizes may be wrong, and the copies too short.
    """
    at, end = bundle.offset, bundle.offset + bundle.nbytes
    if not bundle.buffers:
        return bytes(shared[at:end]), []
    sizes = np.frombuffer(bytes(shared[at : at + 8 * (1 + bundle.buffers)]), np.uint64).tolist()
    ends = list(itertools.accumulate(sizes, initial=at + 8 * len(sizes)))
    if ends[-1] > end:
        return b"", []
    with memoryview(shared) as view:
        arrays = [
            memoryview(bytearray(view[start:stop])) for start, stop in itertools.pairwise(ends[1:])
        ]
    return bytes(shared[ends[0] : ends[1]]), arrays


# ---- items into bundles ----


class Frame(NamedTuple):
    """The pickled items of one batch. Arrays are views, so write them before the next batch is
    read.
    """

    first: int  # position of the first item
    rows: int
    buffers: int  # number of large arrays
    parts: Sequence[bytes | memoryview]  # parts of the bundle, in order

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))

    def write_into(self, view: memoryview) -> None:
        """Fill `uint8[nbytes]` with all parts."""
        at = 0
        for part in self.parts:
            view[at : at + len(part)] = part
            at += len(part)


def frames(batches: Iterator[tuple[int, list[object]]]) -> Generator[Frame, None, None]:
    """Yield a frame for each batch of `sources.stream.read_batches`.

    Raises:
        UnpicklableError: an item cannot be pickled.
    """
    for first, items in batches:
        try:
            frame = packed(items, first, len(items))
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise UnpicklableError(
                f"an item in the stream's batch from position {first} on cannot be pickled and "
                f"sent to the workers: {type(error).__name__}: {error}"
            ) from error
        yield frame
        # Otherwise two batches would be held while the next one is read.
        del items, frame


def packed(content: object, first: int, rows: int) -> Frame:
    """Return pickled items as a frame. Raises the errors of pickle."""
    buffers: list[memoryview] = []
    pickled = send(content, out_of_band(buffers.append, _LARGE_BYTES))
    parts: list[bytes | memoryview] = [pickled, *buffers]
    if buffers:
        parts.insert(0, array.array("Q", map(len, parts)).tobytes())
    return Frame(first, rows, len(buffers), parts)
