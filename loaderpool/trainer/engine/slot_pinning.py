"""Whether, and when, the slots of a loader are pinned for the GPU (`Limits.pin`).

Most often no framework has begun to use the GPU when the slots are made. So it is looked again behind the next batch,
behind two more, four, and so on: soon after the start, and then so seldom that it costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Literal

from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import Extent
from loaderpool.memory.pinning import pinned_bytes
from loaderpool.system import capacity
from loaderpool.system.cuda_driver import CudaError, NoContextError

# Batches from one look to the next, at most. Fewer: a look takes up to 0.1 ms, which tiny batches would feel. More: a
# GPU that comes into use late is noticed later.
_MOST_BETWEEN_LOOKS = 4096
_NEVER = 1 << 62


class SlotPinning:
    """Which slots of one loader are pinned. The caller holds the session's lock.

    Args:
        arena: where the slots are.
        wanted: `Limits.pin`.

    Attributes:
        look_at: once consumers have taken so many batches of the session, `cover` is to be called.
        why_not: why slots that should be pinned are not; None: they are, or need not be.
    """

    def __init__(self, arena: Arena, wanted: bool | Literal["auto"]) -> None:
        self._arena, self._wanted = arena, wanted
        self._between_looks = 1
        self._is_over = wanted is False  # no other attempt is made
        self.look_at = _NEVER
        self.why_not: str | None = None

    def note_new(self) -> None:
        """There are slots that `cover` has not seen: it is called before the next batch is handed out."""
        if not self._is_over:
            self.look_at = 0

    def pinned_bytes(self, extents: Iterable[Extent]) -> int:
        """How many bytes of these are pinned."""
        return sum(extent.nbytes for extent in extents if self._arena.pinned.holds(extent.offset))

    def cover(self, extents: Iterable[Extent], deliveries: int) -> None:
        """Pin those slots that are not, if that can be.

        Args:
            extents: of all slots that stay.
            deliveries: batches of the session that consumers have taken.
        """
        if self._is_over:
            return
        missing = [extent for extent in extents if not self._arena.pinned.holds(extent.offset)]
        try:
            self.why_not = self._why_not_now() or self._why_too_much(missing)
            if self.why_not is None:
                for extent in missing:
                    self._arena.pin(extent)
        except NoContextError as error:
            self.why_not = str(error)
        except CudaError as error:
            self.why_not = f"the CUDA driver refused to pin slots: {error}"
            self._is_over = True
        if self._is_over or self.why_not is None:
            self.look_at = _NEVER
        else:
            self.look_at = deliveries + self._between_looks
            self._between_looks = min(2 * self._between_looks, _MOST_BETWEEN_LOOKS)

    def _why_not_now(self) -> str | None:
        """Why "auto" does nothing: only TensorFlow is known to keep a batch until the device has read it."""
        if self._wanted is True:
            return None
        if "tensorflow" not in sys.modules:
            return 'pin="auto" is for TensorFlow, which this process has not imported'
        is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return "PyTorch uses the GPU, and keeps no batch until a copy with non_blocking=True is done"
        return None

    def _why_too_much(self, extents: list[Extent]) -> str | None:
        """Why "auto" leaves these as they are: what is pinned is never paged out, whatever else needs the memory."""
        wanted = sum(extent.nbytes for extent in extents)
        if self._wanted is True or not wanted:
            return None
        pinned, free = pinned_bytes(), capacity.available_memory_bytes()
        if wanted + pinned <= free:  # the slots have their memory already: so this is half of what there was
            return None
        return (
            f"{wanted:,} bytes of slots, beside {pinned:,} that are pinned, are more than half of the memory: "
            f"{free:,} bytes are left. Set a smaller Limits.memory, or pin=True"
        )
