"""Ranges of a mapping that are pinned (page-locked) for the GPU, and that keep their pages for as long.

The driver looks the pages of a range up once. Were they given back, mapped over or unmapped while it is registered,
the device would go on reading the old ones: wrong batches, and no error (PIN-1). So the arena asks here before it does
any of that, and where the driver does not let go of a range, its pages stay where they are for good.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from loaderpool.system.cuda_driver import CudaContext, CudaError, NoContextError, find_context
from loaderpool.system.interrupts import InterruptsHeld

# Of one call. Drivers from 580 on refuse 512 GiB and more; smaller pieces only are more calls.
_PIECE_BYTES = 64 << 30


class PinnedRanges:
    """The registered ranges of one mapping. The caller sees to it that no two threads are in here.

    The context is held for as long as there are any. Nothing is done in a forked child, where nothing is registered.

    Args:
        address: where the mapping begins.
    """

    def __init__(self, address: int) -> None:
        self._address, self._owner_pid = address, os.getpid()
        self._ranges: dict[int, int] = {}  # by offset their bytes
        self._context: CudaContext | None = None
        _all.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(list(self._ranges.values()))  # a copy in one step: other threads add and remove

    def holds(self, offset: int) -> bool:
        """Whether a range that begins there was registered by `pin`."""
        return offset in self._ranges

    def pin(self, offset: int, nbytes: int) -> None:
        """Register a range; all of it or nothing.

        Args:
            offset: from the mapping's start.
            nbytes: of which none is registered.

        Raises:
            NoContextError: this process does not use a GPU (yet).
            CudaError: the driver refused.
        """
        if os.getpid() != self._owner_pid:
            raise NoContextError("a forked child cannot use its parent's GPU")
        with InterruptsHeld():
            if self._context is None:
                self._context = find_context()
            try:
                for at in range(offset, offset + nbytes, _PIECE_BYTES):
                    piece = min(_PIECE_BYTES, offset + nbytes - at)
                    self._context.register(self._address + at, piece)
                    self._ranges[at] = piece
            except CudaError:
                self.unpin(offset, nbytes)
                raise
            finally:
                self._let_go()

    def unpin(self, offset: int, nbytes: int) -> bool:
        """Whether no part of a range is registered any more, so that its pages may go.

        Raises:
            ValueError: a registered range is in it in part only: who asks does not know what is there.
        """
        end = offset + nbytes
        found = [(at, at + size) for at, size in self._ranges.items() if at < end and at + size > offset]
        if any(at < offset or until > end for at, until in found):
            raise ValueError(f"bytes {offset} to {end} are a part of what is registered with the GPU's driver: {found}")
        return not found or self._unregister([at for at, _ in found])

    def unpin_all(self) -> bool:
        """Whether nothing is registered any more, so that the mapping may go."""
        return not self._ranges or self._unregister(list(self._ranges))

    def _unregister(self, offsets: list[int]) -> bool:
        if os.getpid() != self._owner_pid:
            return False
        with InterruptsHeld():
            for at in offsets:
                try:
                    assert self._context is not None
                    self._context.unregister(self._address + at)
                except CudaError as error:
                    if not error.is_unregistered:
                        continue
                del self._ranges[at]
            self._let_go()
        return not any(at in self._ranges for at in offsets)

    def _let_go(self) -> None:
        """Let go of the context that nothing is registered in."""
        if self._context is not None and not self._ranges:
            self._context.release()
            self._context = None


_all: weakref.WeakSet[PinnedRanges] = weakref.WeakSet()


def pinned_bytes() -> int:
    """Return the bytes that are registered in this process."""
    return sum(ranges.nbytes for ranges in list(_all))


class PinnableMap(mmap.mmap):
    """A mapping that is not unmapped before nothing of it is registered."""

    pinned: PinnedRanges | None = None

    def __del__(
        self,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
        getpid: Callable[[], int] = os.getpid,
        keep: Callable[[Any], object] = ctypes.pythonapi.Py_IncRef,
        as_object: Callable[[Any], Any] = ctypes.py_object,
    ) -> None:
        """Runs in: any thread. At the interpreter's end, registrations and mapping end with the process."""
        pinned = self.pinned
        if pinned is None or not pinned._ranges or pinned._owner_pid != getpid():
            return
        if not is_finalizing():
            with InterruptsHeld(then="send"):
                if pinned.unpin_all():
                    return
        keep(as_object(self))
