"""Payloads in the supervisor: read out of the arena once, shared with all workers by fork."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.shipping import Shipment, unship

__all__ = ["Payloads", "put_shipment"]


class Payloads:
    """The loaders' payloads by number. `loaded` is what workers inherit."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.loaded: dict[int, dict[str, Any]] = {}

    def load(self, loader: int, offset: int, nbytes: int) -> None:
        """Unpickle a payload; whatever the user's modules raise on import is raised."""
        self.loaded[loader] = self._unship(offset, nbytes)

    def update(self, loader: int, offset: int, nbytes: int) -> None:
        """Set changed attributes on the loader's source object (what a hook changed in the trainer)."""
        changes = self._unship(offset, nbytes)
        target = self.loaded[loader]["source"].target
        for name, value in changes["set"].items():
            target.__dict__[name] = value
        for name in changes["deleted"]:
            target.__dict__.pop(name, None)

    def unload(self, loader: int) -> None:
        """Forget a payload."""
        self.loaded.pop(loader, None)

    def _unship(self, offset: int, nbytes: int) -> dict[str, Any]:
        (start, length), buffers = pickle.loads(self._arena.map[offset : offset + nbytes])
        return unship(self._arena.map[start : start + length], [self._private(at, size) for at, size in buffers])

    def _private(self, offset: int, nbytes: int) -> memoryview:
        """A buffer of the arena as memory that reads are shared of and writes are not: what a captured array is."""
        view = mmap.mmap(
            self._arena.descriptor,
            nbytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset,
        )
        return memoryview(view)


def put_shipment(arena: Arena, shipment: Shipment) -> tuple[list[Any], int, int]:
    """Copy a shipment into the arena; returns all its extents, and offset and length of its table.

    Runs in: the trainer. Ownership: the extents are given back when the loader is unloaded.
    """
    extents = []
    places = []
    try:
        pickled = arena.put(shipment.pickled)
        extents.append(pickled)
        for buffer in shipment.buffers:
            flat = buffer.cast("B")
            extent = arena.take(max(1, flat.nbytes), "the arrays that function and source hold")
            extents.append(extent)
            arena.map[extent.offset : extent.offset + flat.nbytes] = flat
            places.append((extent.offset, flat.nbytes))
        table, nbytes = arena.put_object(((pickled.offset, len(shipment.pickled)), places))
    except BaseException:
        for extent in extents:
            arena.give_back(extent)
        raise
    extents.append(table)
    return extents, table.offset, nbytes
