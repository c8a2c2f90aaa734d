"""The file without a name in which all slots are: mapped once by the main process, the supervisor and its workers.

A supervisor has one of its own, so that what its death leaves half done is in no slot of the next one. It is sparse:
its size is address space, and pages are taken with a slot's first batch. It goes with the last array that looks at it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from loaderpool.errors import MemoryLimitError
from loaderpool.memory import arena as arenas
from loaderpool.memory.arena import PAGE_BYTES
from loaderpool.system import machine

_BYTES = 1 << 40
_LEAST_BYTES = 1 << 30
_BYTE = np.dtype(np.uint8)


class SlotFile:
    """The file and its mapping.

    Ownership: of the descriptor, until `close_descriptor`.

    Args:
        descriptor: of the file.
        mapping: of all of it; None: it is made.
    """

    def __init__(self, descriptor: int, mapping: mmap.mmap | None = None) -> None:
        self.descriptor = descriptor
        self.map = mapping or arenas._map_unlocked(descriptor, os.fstat(descriptor).st_size)
        self.nbytes = len(self.map)

    @staticmethod
    def create() -> SlotFile:
        """Return a new one, as large in address space as the process' limits allow.

        Raises:
            MemoryLimitError: not even the smallest fits (`ulimit -v`, `ulimit -f`).
        """
        descriptor, nbytes = machine.create_memory_file("batches"), _BYTES
        while True:
            try:
                os.ftruncate(descriptor, nbytes)
                return SlotFile(descriptor)
            except OSError as error:
                nbytes //= 4
                is_limit = error.errno in (errno.ENOMEM, errno.EFBIG)
                if not is_limit or nbytes < _LEAST_BYTES:
                    os.close(descriptor)
                    if not is_limit:  # too many open files, say
                        raise
                    raise MemoryLimitError(
                        f"Could not reserve {_LEAST_BYTES >> 30} GiB of address space for batches ({error.strerror}), "
                        "which is reserved but not used. Raise ulimit -v and ulimit -f."
                    ) from error

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`, built on the mapping itself.

        All views of it, and views of views, have this array as their base. So it dies with the last of them.
        """
        slot: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self.map, offset)
        return slot

    def take_pages(self, offset: int, nbytes: int) -> None:
        """Take the pages of a slot, so that no write to it can fail.

        Raises:
            OSError: there is no memory.
        """
        machine.reserve(self.descriptor, offset, nbytes)

    def return_pages(self, offset: int, nbytes: int) -> None:
        """Give pages back to the machine."""
        machine.return_pages(self.descriptor, offset, nbytes)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Give pages back to the machine, by the mapping alone."""
        if nbytes > 0 and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_REMOVE, offset, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
