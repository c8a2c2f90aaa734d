"""`SampleFile`: samples of items in a memory file, which the workers of a supervisor share.

If `fn` returns several samples for an item, several workers need these samples at about the same
time. The first worker calls `fn`, and writes all samples of the item into the file. The others read
the samples that they need.

    [ place 0: head | samples ][ place 1: head | samples ] ...

Each place is a range of a sparse file, and has the samples of one item. `ItemSamples` chooses the
place of each item. A new item overwrites an earlier one in its place, so the file has few items.

A process that makes the samples of an item holds the lock of its place, a record lock of the
kernel. The kernel releases the lock if the process dies. Readers need no lock: they read the head
again after the sample, and a writer clears the head before it changes anything else (SAMPLES-1).
"""

from __future__ import annotations

import functools
import itertools
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import Undoing

try:
    import fcntl
except ImportError:  # Windows, where each process keeps its own samples
    fcntl = None  # type: ignore[assignment]

# Size of a place. It is a range of a sparse file, and takes no memory until it is written. Smaller:
# large samples do not fit. Larger: fewer places.
_PLACE_BYTES = 1 << 36
# A process stores 1/64 of the free memory before it checks the free memory again. A check takes
# half a millisecond. Smaller: fewer processes may do this at the same time. Larger: more checks.
_PORTIONS = 64
# Time of the write, number of the run, 1 + epoch, source index, 1 if `fn` failed for the item.
_HEAD = struct.Struct("<5Q")
_NUMBER = struct.Struct("<Q")


class StoredSample(NamedTuple):
    """Bytes of a sample, or of the failure report of its item."""

    content: bytes
    has_failed: bool


class Pass(NamedTuple):
    """An epoch of one run: another run reads its items again, because files may have changed."""

    epoch: int
    run: int  # number of the run; 0: the probe


class SampleFile:
    """Samples of items in a memory file, by place, pass and source index.

    A record lock belongs to a process, so processes can share one open file.

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

    def has(self, place: int, at: Pass, item: int) -> bool:
        """Return True if the samples of an item are stored. Raises OSError like `read`."""
        return self._head(place, at, item) is not None

    def read(self, place: int, at: Pass, item: int, number: int) -> StoredSample | None:
        """Return one sample of an item, or None if they are not stored.

        Raises:
            OSError: the descriptor was closed.
        """
        head = self._head(place, at, item)
        if head is None:
            return None
        has_failed = bool(_HEAD.unpack_from(head)[4])
        first, end = (
            _NUMBER.unpack_from(
                head, _HEAD.size + _NUMBER.size * (number * (not has_failed) + bound)
            )
            for bound in (0, 1)
        )
        content = os.pread(self._file, end[0] - first[0], place * _PLACE_BYTES + first[0])
        # SYNC: read after the sample; pairs with SampleFile.write.
        return StoredSample(content, has_failed) if self._read_head(place) == head else None

    def write(
        self, place: int, at: Pass, item: int, parts: Sequence[bytes], has_failed: bool = False
    ) -> None:
        """Store the samples of an item, or its failure report.

        The caller holds the lock of the place. If too little memory is free, nothing is stored.

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
        for part, begin in zip(parts, ends, strict=False):
            if os.pwrite(self._file, part, start + begin) < len(part):
                return
        ends += ends[-1:] * (self._samples + 1 - len(ends))
        stamp = clock.monotonic_ns()
        head = _HEAD.pack(stamp, at.run, at.epoch + 1, item, has_failed)
        head += struct.pack(f"<{len(ends)}Q", *ends)
        # SYNC: stored last; pairs with SampleFile.read.
        os.pwrite(self._file, head, start)

    def claim(self, place: int, at: Pass, item: int) -> None:
        """Assign the samples that the probe has stored to this pass.

        The caller holds the lock of the place.

        Raises:
            OSError: the descriptor was closed.
        """
        head = self._head(place, at._replace(run=0), item)
        if head is not None:
            stamp, *numbers = _HEAD.unpack_from(head)
            os.pwrite(self._file, _HEAD.pack(stamp, at.run, *numbers[1:]), place * _PLACE_BYTES)

    def _has_room(self, nbytes: int) -> bool:
        if self._spare_bytes < nbytes:
            self._spare_bytes = (capacity.available_memory_bytes() - HEADROOM_BYTES) // _PORTIONS
        self._spare_bytes -= nbytes
        return self._spare_bytes >= 0

    def lock(self, place: int, waits: bool) -> bool:
        """Acquire the lock of a place. Return False if another process has it.

        Call `unlock` after a call that returns True.

        Blocks: if `waits`, until the lock is free.

        Raises:
            OSError: the descriptor was closed, or the wait would be a deadlock (EDEADLK). The
                kernel also refuses waits if different threads of two processes wait for each other.
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
        """Free the memory of all samples. Called when no process needs them any more."""
        os.ftruncate(self._file, 0)

    def _head(self, place: int, at: Pass, item: int) -> bytes | None:
        head, wanted = self._read_head(place), (at.run, at.epoch + 1, item)
        if len(head) < self._head_bytes or _HEAD.unpack_from(head)[1:4] != wanted:
            return None
        return head

    def _read_head(self, place: int) -> bytes:
        return os.pread(self._file, self._head_bytes, place * _PLACE_BYTES)
