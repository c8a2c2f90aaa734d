"""A shipment in shared memory: its pickle, and the places of its arrays.

Arrays are already in files, or are adopted, or are copied into the arena. A later shipment of the
same objects refers to the unchanged arrays of an earlier one. Called in the main process, with the
pool's lock held.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from loaderpool.memory.adoption import DataFile, address_of, is_in_passing, place_of
from loaderpool.memory.arena import Arena, Extent
from loaderpool.memory.layout import aligned
from loaderpool.system.inheritance import bequeath
from loaderpool.system.interrupts import checkpoint
from loaderpool.transport.payload.ship import Shipment
from loaderpool.transport.payload.structure import Difference, Pairs, compare, name_of_array
from loaderpool.transport.pickling import send

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan

# Files of one shipment. Larger: one message to the supervisor could not hold them (253
# descriptors). Each is an open descriptor in both processes.
_MOST_FILES = 64
# bytes that are compared at once; the comparison needs as much memory again
_TOGETHER_BYTES = 1 << 20


class CopiedArrays:
    """Copies of arrays in an extent of the arena.

    The extent is freed with the last shipment that refers to it.

    Args:
        arena: the arena.
        nbytes: size of all copies.

    Raises:
        MemoryLimitError: too little memory is free.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.extent = arena.take(nbytes, "the arrays of the function and the source")
        self._holders = 0

    def hold(self) -> None:
        """Count one more shipment that refers to these copies. Pairs with `drop`."""
        self._holders += 1

    def drop(self) -> None:
        """Remove one shipment from the count. The last one frees the memory."""
        self._holders -= 1
        if not self._holders:
            self._arena.give_back(self.extent)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part of the copies."""
        start = self.extent.offset + offset
        return memoryview(self._arena.map)[start : start + nbytes]


@dataclass(eq=False, repr=False)
class Placement:
    """Places of the arrays of one shipment. Ownership: holds the files, which must outlive the
    loader.
    """

    files: list[DataFile] = field(default_factory=list)
    # place of each buffer in a file: index in `files`, offset
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    # place of each buffer in copies: the copies, offset
    copies: dict[int, tuple[CopiedArrays, int]] = field(default_factory=dict)
    shared_bytes: int = 0  # bytes of arrays in files
    copied_because: tuple[str, ...] = ()  # reasons for copying, one line each

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the files, in order."""
        return [file.descriptor for file in self.files]

    def add(self, number: int, file: DataFile, offset: int, nbytes: int) -> None:
        """Note that a buffer is in a file."""
        if file not in self.files:
            self.files.append(file)
        self.places[number] = self.files.index(file), offset
        self.shared_bytes += nbytes


def place(
    shipment: Shipment, hands_over_files: bool = True, earlier: Sent | None = None
) -> Placement:
    """Find or create files for the shipment's large arrays. Arrays are adopted in place if
    possible.

    If the pool cannot send files to its workers, all arrays are copied. If there is an earlier
    shipment, its arrays stay in place, and no other arrays are adopted.
    """
    found = Placement()
    if not shipment.buffers:
        return found
    if earlier is not None:
        _place_again(shipment, earlier, found)
    reasons: collections.Counter[str] = collections.Counter()
    for number, buffer in enumerate(shipment.buffers):
        checkpoint()
        if number in found.places or number in found.copies:
            continue
        try:
            if not hands_over_files:
                raise OSError("the workers are spawned")
            if len(found.files) == _MOST_FILES:
                raise OSError(f"the loader shares {_MOST_FILES} other arrays")
            file, offset = place_of(buffer, adopts=earlier is None)
        except OSError as error:
            # Files may be out of memory or descriptors while the arena has room.
            if not is_in_passing(buffer):
                reasons[str(error)] += buffer.nbytes
            continue
        found.add(number, file, offset, buffer.nbytes)
    lines = tuple(f"{nbytes:,} bytes: {reason}" for reason, nbytes in reasons.most_common())
    found.copied_because = lines or (() if earlier is None else earlier.placement.copied_because)
    return found


def _place_again(shipment: Shipment, earlier: Sent, found: Placement) -> None:
    """Find the arrays that are unchanged since an earlier shipment."""
    used: collections.Counter[CopiedArrays] = collections.Counter()
    for number, buffer in enumerate(shipment.buffers):
        if not earlier.holds(number, buffer):
            continue
        home, offset, nbytes = earlier.homes[number]
        if isinstance(home, CopiedArrays):
            found.copies[number] = home, offset
            used[home] += nbytes
        else:
            found.add(number, home, offset, nbytes)
    for copied, nbytes in used.items():
        # Most of these copies are outdated, so they are not kept for the rest.
        if 2 * nbytes < copied.extent.nbytes:
            found.copies = {
                number: at for number, at in found.copies.items() if at[0] is not copied
            }


class Sent:
    """A shipment in shared memory. `give_back` frees it.

    Attributes:
        offset, nbytes: place of its table in the arena (see `Payloads`).
        placement: places of its arrays, or of some of them.
        homes: for each buffer: file or copies that contain it, offset, size.

    Args:
        arena: memory for the pickle, and for arrays that are not in `placement`.
        shipment: the pickled payload.
        placement: existing places of arrays. Arrays that it lacks are copied into the arena.
        cache: the loader's cache, for a process that does not unpickle the payload.

    Raises:
        MemoryLimitError: too little memory is free.
    """

    def __init__(
        self,
        arena: Arena,
        shipment: Shipment,
        placement: Placement | None = None,
        cache: CachePlan | None = None,
    ) -> None:
        self._arena, self.placement = arena, placement or Placement()
        self._keys, self._known = shipment.keys, hash(shipment.pickled)
        self._pairs: tuple[Pairs, Pairs] = _paired(shipment.buffers), _paired(shipment.keys)
        self._extents: list[Extent] = []
        self._copies: list[CopiedArrays] = []
        self.homes: list[tuple[CopiedArrays | DataFile, int, int]] = []
        try:
            self._extents.append(arena.put(shipment.pickled))
            self._pickled = self._extents[0].offset, len(shipment.pickled)
            self._copy(shipment)
            sizes = [file.nbytes for file in self.placement.files]
            ranges = [copied.extent for copied in self._copies]
            parts = [*self._copies, *self.placement.files]
            places = [(parts.index(home), offset, nbytes) for home, offset, nbytes in self.homes]
            table = send(
                (
                    self._pickled,
                    [*map(tuple, ranges)],
                    places,
                    sizes,
                    cache,
                    shipment.generators,
                    bequeath(),
                )
            )
            self._extents.append(arena.put(table))
        except BaseException:
            self.give_back()
            raise
        self.offset, self.nbytes = self._extents[-1].offset, len(table)

    def _copy(self, shipment: Shipment) -> None:
        """Copy the arrays that have no place, and set `homes`."""
        found = self.placement
        for copied in dict.fromkeys(copied for copied, _ in found.copies.values()):
            copied.hold()
            self._copies.append(copied)
        placed = {*found.places, *found.copies}
        new = [number for number in range(len(shipment.buffers)) if number not in placed]
        if new:
            copied = CopiedArrays(
                self._arena, sum(aligned(shipment.buffers[number].nbytes) for number in new)
            )
            copied.hold()
            self._copies.append(copied)
            at = 0
            for number in new:
                checkpoint()
                flat = shipment.buffers[number].cast("B")
                copied.view(at, flat.nbytes)[:] = flat
                found.copies[number] = copied, at
                at += aligned(flat.nbytes)
        for number, buffer in enumerate(shipment.buffers):
            home: CopiedArrays | DataFile
            if number in found.places:
                file, offset = found.places[number]
                home = found.files[file]
            else:
                home, offset = found.copies[number]
            self.homes.append((home, offset, buffer.nbytes))

    def holds(self, number: int, buffer: memoryview) -> bool:
        """Return True if an array has the same bytes as the array of this number."""
        if number >= len(self.homes):
            return False
        home, offset, nbytes = self.homes[number]
        if nbytes != buffer.nbytes:
            return False
        if isinstance(home, CopiedArrays):
            return _are_equal(home.view(offset, nbytes), buffer)
        return home.is_equal(address_of(buffer), nbytes, offset)

    def difference(self, shipment: Shipment) -> Difference | None:
        """Return the difference to another shipment of the same payload.

        None if both have the same meaning.
        """
        difference, (arrays, generators) = None, self._pairs
        if hash(shipment.pickled) != self._known:
            start, nbytes = self._pickled
            difference, arrays, generators = compare(
                self._arena.map[start : start + nbytes], shipment.pickled
            )
            if difference is None:
                self._pairs = arrays, generators
                self._known = hash(shipment.pickled)  # the next pickle probably has this hash, too
            elif not difference.is_kept:
                return difference
        if any(self._keys[before] != shipment.keys[now] for before, now in generators):
            return Difference("")
        changed = (now for before, now in arrays if not self.holds(before, shipment.buffers[now]))
        return next(
            (Difference(name_of_array(shipment.pickled, number)) for number in changed), difference
        )

    def give_back(self) -> None:
        """Free all memory, and close the files."""
        for extent in self._extents:
            self._arena.give_back(extent)
        for copied in self._copies:
            copied.drop()
        self._extents, self._copies = [], []
        self.homes = []
        self.placement.files.clear()


def _paired(items: Sequence[object]) -> Pairs:
    return [(at, at) for at in range(len(items))]


def _are_equal(one: memoryview, other: memoryview) -> bool:
    first, second = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    pieces = range(0, first.nbytes, _TOGETHER_BYTES)
    return all(
        np.array_equal(first[at : at + _TOGETHER_BYTES], second[at : at + _TOGETHER_BYTES])
        for at in pieces
    )
