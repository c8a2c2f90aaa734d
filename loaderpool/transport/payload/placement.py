"""Where a shipment's arrays go: into files in which they stand already or are adopted, or by a copy into the arena.

Runs in: the trainer.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from loaderpool.memory.adoption import DataFile, is_in_passing, place_of, why_copied
from loaderpool.memory.arena import Arena
from loaderpool.memory.extents import Extent
from loaderpool.memory.layout import aligned
from loaderpool.system.interrupts import checkpoint
from loaderpool.transport.pickling import put_object

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan
    from loaderpool.transport.payload.ship import Shipment

# Files of one shipment. More would not fit one message to the supervisor (253 descriptors), and each is a descriptor
# here and there.
_MOST_FILES = 64


@dataclasses.dataclass
class Placement:
    """Where the arrays of one shipment lie. Ownership: holds the files, which must outlive the loader."""

    files: list[DataFile] = dataclasses.field(default_factory=list)
    places: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)  # by buffer: number of file, offset
    shared_bytes: int = 0  # of arrays that stand in files
    copied_bytes: int = 0  # of arrays that are copied
    copied_because: tuple[str, ...] = ()  # why, a line for each reason

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the files, in their order."""
        return [file.descriptor for file in self.files]


def place(shipment: Shipment, hands_over_files: bool = True) -> Placement:
    """Find or make the files for the shipment's large arrays, which are adopted in place where that can be.

    Args:
        shipment: what.
        hands_over_files: whether the workers can have files; else all is copied.
    """
    found = Placement()
    reasons: collections.Counter[str] = collections.Counter()
    for number, buffer in enumerate(shipment.buffers):
        file, reason = None, ""
        checkpoint()
        try:
            if not hands_over_files:
                reason = "the workers were spawned"
            elif len(found.files) < _MOST_FILES:
                file = place_of(buffer)
            else:
                reason = f"the loader has {_MOST_FILES} others"
        except OSError as error:  # no memory for files, or no descriptors: there may be some in the arena
            reason = str(error)
        if file is not None:
            if file[0] not in found.files:
                found.files.append(file[0])
            found.places[number] = found.files.index(file[0]), file[1]
            found.shared_bytes += buffer.nbytes
        elif not is_in_passing(buffer):
            found.copied_bytes += buffer.nbytes
            reasons[reason or why_copied(buffer) or "it was written to meanwhile"] += buffer.nbytes
    found.copied_because = tuple(f"{nbytes:,} bytes: {reason}" for reason, nbytes in reasons.most_common())
    return found


def put_shipment(
    arena: Arena, shipment: Shipment, placement: Placement | None = None, cache: CachePlan | None = None
) -> tuple[list[Extent], int, int]:
    """Copy a shipment into the arena; returns all its extents, and offset and length of its table (see `Payloads`).

    Ownership: the extents are given back when the loader is unloaded; those of an update when the
    supervisor has read it.

    Args:
        arena: where to.
        shipment: what.
        placement: which of its arrays stand in data files, and are not copied. None: all are copied.
        cache: the loader's, for who does not unpickle the shipment.
    """
    placement = placement or Placement()
    places: list[tuple[int, int, int]] = []  # part (0: what is copied, then the files), offset in it, length
    copies = []
    end = 0
    for number, buffer in enumerate(shipment.buffers):
        found = placement.places.get(number)
        if found is not None:
            places.append((1 + found[0], found[1], buffer.nbytes))
            continue
        places.append((0, end, buffer.nbytes))
        copies.append((end, buffer.cast("B")))
        end += aligned(buffer.nbytes)
    extents = []
    try:
        pickled = arena.put(shipment.pickled)
        extents.append(pickled)
        arrays = (0, 0)
        if copies:
            extent = arena.take(end, "the arrays that function and source hold")
            extents.append(extent)
            arrays = (extent.offset, end)
            for at, flat in copies:
                checkpoint()
                arena.map[extent.offset + at : extent.offset + at + flat.nbytes] = flat
        sizes = [file.nbytes for file in placement.files]
        where = pickled.offset, len(shipment.pickled)
        table, nbytes = put_object(arena, (where, arrays, places, sizes, cache))
    except BaseException:
        for extent in extents:
            arena.give_back(extent)
        raise
    extents.append(table)
    return extents, table.offset, nbytes
