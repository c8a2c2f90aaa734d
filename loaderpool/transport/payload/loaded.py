"""Payloads: read out of the arena once by the supervisor, shared with all workers by fork.

Or, where it must not fork (`fork_check`), read by each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loaderpool.memory.arena import Arena, map_private
from loaderpool.transport.payload.changes import Change, FiledChanges
from loaderpool.transport.payload.descriptors import ReceivedDescriptors
from loaderpool.transport.payload.placement import AboutShipment
from loaderpool.transport.payload.unship import unship
from loaderpool.transport.pickling import Importing, get_object, unwatched

# Part 0 is what was copied into the arena, the others are data files; then offset in it, and length.
_Place = tuple[int, int, int]


class Payloads:
    """The loaders' payloads by number. `loaded` is what workers inherit."""

    def __init__(
        self,
        arena: Arena,
        received: ReceivedDescriptors | None = None,
        importing: Importing = unwatched,
    ) -> None:
        self._arena, self._importing = arena, importing
        self.received = received or ReceivedDescriptors(None)
        self.loaded: dict[int, dict[str, Any]] = {}
        self.places: dict[int, tuple[int, int]] = {}  # of each one's shipment, for a process that has to load it itself
        self.changes = FiledChanges()

    def load(self, loader: int, offset: int, nbytes: int) -> None:
        """Unpickle a payload; whatever the user's modules raise on import is raised.

        Its arrays lie on the arena's own pages, of which reads are shared and writes are not: the trainer keeps their
        extent until the loader is unloaded.
        """
        pickled, buffers, files, _ = self.read(loader, offset, nbytes)
        payload = unship(pickled, buffers, self._importing)
        if payload.get("needs_numpy_random"):
            import numpy.random  # noqa: F401  # 12 ms: once here, instead of in each worker
        if payload.get("cache") is not None:
            # Most loaders have none, and their start is shorter for it.
            from loaderpool.cache.shared import SharedCache, counters_in

            plan = payload["cache"]
            if plan.counters_at:
                payload["cache"] = SharedCache(plan, -1, counters_in(self._arena, plan.counters_at))
            else:
                payload["cache"] = SharedCache(plan, self.cache_file(loader, files))
        self.loaded[loader] = payload
        self.places[loader] = offset, nbytes

    def read(self, loader: int, offset: int, nbytes: int) -> tuple[bytes, list[memoryview], int, AboutShipment]:
        """Return a payload as it travelled: its pickle, its arrays' bytes, how many data files hold some, about it.

        The trainer keeps the arrays' extent until the loader is unloaded. Blocks: until the data files are there.

        Raises:
            OSError: this process has no descriptors left, or they do not come.
        """
        pickled, (start, length), places, sizes, about = self._read(offset, nbytes)
        # One mapping, without a descriptor of its own, for all: a source may be thousands of arrays.
        parts = [(self._arena.descriptor, start, length)]
        files = self.received.of(loader, len(sizes))[: len(sizes)]
        parts += ((file, 0, size) for file, size in zip(files, sizes, strict=True))
        views = [self._view(*part) if part[2] else memoryview(b"") for part in parts]
        return pickled, [views[part][at : at + size] for part, at, size in places], len(sizes), about

    def _view(self, descriptor: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a file, so that writes to it stay this process's own."""
        if descriptor < 0:  # Windows has none of the arena's
            return memoryview(bytearray(self._arena.map[start : start + nbytes]))
        return memoryview(map_private(descriptor, start, nbytes)).cast("B")

    def update(self, loader: int, offset: int, nbytes: int) -> None:
        """Set changed attributes on the loader's source object (what a hook changed in the trainer).

        All is copied out of the arena, so that the trainer may give its extents back at once: an epoch's changes would
        else stay there for as long as the loader lives.
        """
        change = self.read_change(loader, offset, nbytes)
        self.apply(change)
        self.changes.keep(change)

    def read_change(self, loader: int, offset: int, nbytes: int) -> Change:
        """Copy changed attributes out of the arena, as they travelled."""
        pickled, (start, _), places, _, about = self._read(offset, nbytes)
        view = memoryview(self._arena.map)
        buffers = [bytearray(view[start + at : start + at + size]) for _, at, size in places]
        return Change(loader, pickled, buffers, frozenset(about.names))

    def apply(self, change: Change) -> None:
        """Make a change."""
        changes = unship(change.pickled, [memoryview(buffer) for buffer in change.buffers], self._importing)
        self.loaded[change.loader]["source"].update(changes)

    def cache_file(self, loader: int, files: int) -> int:
        """Return the memory file of a loader's cache: it comes behind those of the arrays.

        Args:
            loader: whose cache it is.
            files: how many data files hold arrays.
        """
        return self.received.of(loader, files + 1)[files]

    def unload(self, loader: int) -> None:
        """Forget a payload."""
        payload = self.loaded.pop(loader, {})
        if payload.get("cache") is not None:
            payload["cache"].close()
        self.places.pop(loader, None)
        self.received.drop(loader)
        self.changes.forget(loader)

    def _read(
        self, offset: int, nbytes: int
    ) -> tuple[bytes, tuple[int, int], Sequence[_Place], Sequence[int], AboutShipment]:
        """Read a shipment's table: its pickle, where its arrays are, places of all, files' sizes, about it."""
        (start, length), arrays, places, sizes, about = get_object(self._arena, offset, nbytes)
        return self._arena.map[start : start + length], arrays, places, sizes, about
