"""The file without a name in which all slots are: mapped once by the main process, the supervisor and its workers.

A supervisor has one of its own, so that what its death leaves half done is in no slot of the next one. It is sparse:
its size is address space, and pages are taken with a slot's first batch. It goes with the last array that looks at it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderpool.memory.arena import SparseFile, create_file
from loaderpool.system import machine

_BYTE = np.dtype(np.uint8)


class SlotFile(SparseFile):
    """The file and its mapping."""

    @staticmethod
    def create() -> SlotFile:
        """Return a new one. Raises what `create_file` raises."""
        return create_file("batches", SlotFile)

    def slot(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`, built on the mapping itself.

        NumPy collapses `.base` of views down to the first array that is not built on another array: this one. So it
        lives exactly as long as any view made from it (docs/internals/memory.md, "Anchors").
        """
        # A dtype, not its type, and no argument by name: that is 5 us, not 16, after a wait that left no cache warm.
        slot: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self.map, offset)
        return slot

    def take_pages(self, offset: int, nbytes: int) -> None:
        """Take the pages of a slot, so that no write to it can fail.

        Raises:
            OSError: there is no memory.
        """
        machine.reserve(self.descriptor, offset, nbytes)
