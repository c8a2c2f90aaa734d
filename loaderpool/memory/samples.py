"""`SampleFile`: samples of items in a memory file, which the workers of a supervisor share.

If `fn` returns several samples for an item, workers need samples of one item at about the same
time. The first of them calls `fn`, and writes all samples here. The others read theirs.

    [ place 0: head | samples ][ place 1: head | samples ] ...

Each place is a range of a sparse file, and has the samples of one item. The plan decides which item
has which place. So an item replaces one that was needed long before, and the file has few items.

A process that makes an item holds the lock of its place, a record lock of the kernel. The kernel
releases it if the process dies. Readers take no lock: they read the head again after the sample,
and a writer clears the head before it changes anything else (SAMPLES-1).
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import Undoing

# Range of a place: address space of the file, not memory. Larger: fewer places.
_PLACE_BYTES = 1 << 36
# A process stores 1/64 of the free memory before it checks again, which takes half a millisecond.
# Smaller: fewer processes may do this at the same time. Larger: more checks.
_LOOKS = 64
# Stamp of the writer, 1 + epoch, index of the item, 1 if making it has failed.
_HEAD = struct.Struct("<4Q")
_NUMBER = struct.Struct("<Q")


class StoredSample(NamedTuple):
    """Bytes of a sample, or of the report of a failed item."""

    content: bytes
    has_failed: bool


class SampleFile:
    """Samples of items, by place, epoch and index.

    All processes use one open file, because the kernel's locks belong to processes.

    Ownership: owns the descriptor.

    Args:
        descriptor: descriptor of an empty memory file, or of one that another process uses.
        samples: number of samples of each item.
    """

    def __init__(self, descriptor: int, samples: int) -> None:
        self._file, self._samples = descriptor, samples
        self._head_bytes = _HEAD.size + _NUMBER.size * (samples + 1)
        self._spare_bytes = 0  # number of bytes to store before free memory is checked again
        Undoing(self, functools.partial(os.close, descriptor))

    def has(self, place: int, epoch: int, item: int) -> bool:
        """Return True if the samples of an item are stored. Raises OSError."""
        return self._head(place, epoch, item) is not None

    def read(self, place: int, epoch: int, item: int, number: int) -> StoredSample | None:
        """Return one sample of an item, or None if they are not stored.

        Raises:
            OSError: the descriptor was closed.
        """
        head = self._head(place, epoch, item)
        if head is None:
            return None
        has_failed = bool(_HEAD.unpack_from(head)[3])
        first, end = (
            _NUMBER.unpack_from(head, _HEAD.size + _NUMBER.size * (number * (not has_failed) + at))
            for at in (0, 1)
        )
        content = os.pread(self._file, end[0] - first[0], place * _PLACE_BYTES + first[0])
        # SYNC: read after the sample; pairs with SampleFile.write.
        return StoredSample(content, has_failed) if self._read_head(place) == head else None

    def write(
        self, place: int, epoch: int, item: int, parts: Sequence[bytes], has_failed: bool = False
    ) -> None:
        """Store the samples of an item, or one report. The caller has the lock of the place.

        If too little memory is free, nothing is stored.

        Raises:
            OSError: the file cannot be written.
        """
        start = place * _PLACE_BYTES
        # SYNC: cleared before the samples change; pairs with SampleFile.read.
        os.pwrite(self._file, bytes(self._head_bytes), start)
        machine.return_pages(self._file, start, _PLACE_BYTES)
        ends = list(itertools.accumulate(map(len, parts), initial=self._head_bytes))
        if not self._has_room(ends[-1]):
            return
        for part, at in zip(parts, ends, strict=False):
            if os.pwrite(self._file, part, start + at) < len(part):
                return
        ends += ends[-1:] * (self._samples + 1 - len(ends))
        stamp = clock.monotonic_ns()
        head = _HEAD.pack(stamp, epoch + 1, item, has_failed) + struct.pack(f"<{len(ends)}Q", *ends)
        # SYNC: stored last; pairs with SampleFile.read.
        os.pwrite(self._file, head, start)

    def _has_room(self, nbytes: int) -> bool:
        if self._spare_bytes < nbytes:
            self._spare_bytes = (capacity.available_memory_bytes() - HEADROOM_BYTES) // _LOOKS
        self._spare_bytes -= nbytes
        return self._spare_bytes >= 0

    def lock(self, place: int, waits: bool) -> bool:
        """Take the lock of a place. Return False if another process has it.

        `unlock` pairs with a call that returns True.

        Blocks: if `waits`, until the lock is free.

        Raises:
            OSError: the descriptor was closed, or processes wait for each other's threads.
        """
        flags = fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB)
        try:
            fcntl.lockf(self._file, flags, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, place: int) -> None:
        """Release the lock of a place."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def clear(self) -> None:
        """Free the memory of all samples, because no process needs them any more."""
        os.ftruncate(self._file, 0)

    def _head(self, place: int, epoch: int, item: int) -> bytes | None:
        head = self._read_head(place)
        if len(head) < self._head_bytes or _HEAD.unpack_from(head)[1:3] != (epoch + 1, item):
            return None
        return head

    def _read_head(self, place: int) -> bytes:
        return os.pread(self._file, self._head_bytes, place * _PLACE_BYTES)
