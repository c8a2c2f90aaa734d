"""Payloads: read out of the arena once by the supervisor, shared with all workers by fork.

Or, where it must not fork (`fork_check`), read by each worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.memory.arena import Arena, map_private
from loaderpool.system import process
from loaderpool.transport.payload.fork_check import OpenHandleError
from loaderpool.transport.pickling import Importing, get_object, receive

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan

_PIECE_BYTES = 1 << 30  # of what marshal writes as one, which must be less than twice that


def describe_load_error(error: BaseException, place: str = "the supervisor") -> str:
    """Return what in the payload could not be loaded, the likely cause, and what to do.

    Runs in: the process in which loading it raised `error`, for that one's search path is named; `place` is what it is.
    """
    if isinstance(error, OpenHandleError):
        return (
            f"Importing the function's modules opened something that workers must not inherit: {error}. Open it in "
            "setup=, which runs once in each worker. To read the rows of an HDF5 file, pass "
            "loaderpool.HDF5(path, keys) as the source."
        )
    here = f"os.getcwd() is {_working_directory()!r} and sys.path is {sys.path!r}."
    if isinstance(error, ModuleNotFoundError) and process.node():
        return (
            f"Node {process.node()} does not have the module {error.name!r}, which the function or the source needs. "
            f"Choose one:\n    RayPool(actor_options={{'runtime_env': {{'py_modules': "
            f"[{(error.name or '').partition('.')[0]}]}}}}): send it to the nodes\n    install it on each node"
            f"\n    define the function in the script itself\nOn the node, {here}"
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"The workers cannot import the module {error.name!r}, which the function or the source needs. It was "
            f"probably created at run time, or sys.path or the working directory has changed since its import. Put the "
            f"module in a directory on sys.path, or define the function in the script itself. In the workers, {here}"
        )
    if isinstance(error, AttributeError):
        return (
            f"A function or class is not in its module ({error}). It was probably replaced at run time, or the file "
            f"was changed after its import. Restart the script (in a notebook, the kernel), or pass a lambda or a "
            f"local function, which is sent by value."
        )
    if isinstance(error, ImportError):
        return f"An import in your code failed in {place}, a new interpreter without a GPU: {error}"
    return (
        f"Loading the function and the source in {place} raised {type(error).__name__}. Modules are imported "
        f"again there, without the changes that the script made. The traceback shows the line."
    )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(deleted)"


class Change(NamedTuple):
    """All attributes of a loader's source that hooks have changed in the trainer, as they travelled."""

    pickled: bytes
    buffers: list[bytearray]  # of its arrays, which lie in just these once it is applied


def plain(changes: Mapping[int, Change]) -> dict[int, list[list[bytes | bytearray]]]:
    """Return changes as a worker is told them that is no fork: the pickle and then the buffers, each in pieces."""
    return {loader: [_pieces(change.pickled), *map(_pieces, change.buffers)] for loader, change in changes.items()}


def _pieces(part: bytes | bytearray) -> list[bytes | bytearray]:
    if len(part) <= _PIECE_BYTES:
        return [part]  # without a copy
    return [part[at : at + _PIECE_BYTES] for at in range(0, len(part), _PIECE_BYTES)]


class Payloads:
    """The loaders' payloads by number: `loaded` is what workers inherit. It owns `files`, of each the data files."""

    def __init__(
        self, arena: Arena, files: dict[int, list[int]], importing: Importing = contextlib.nullcontext
    ) -> None:
        self._arena, self.files, self._importing = arena, files, importing
        self.loaded: dict[int, dict[str, Any]] = {}
        self.places: dict[int, tuple[int, int]] = {}  # of each one's shipment, for a process that has to load it itself
        self.changes: dict[int, Change] = {}  # since then, for such a process

    def load(self, loader: int, offset: int, nbytes: int) -> None:
        """Unpickle a payload; whatever the user's modules raise on import is raised.

        Its arrays lie on the arena's own pages, of which reads are shared and writes are not.
        """
        pickled, buffers, cache, files = self.read(loader, offset, nbytes)
        payload: dict[str, Any] = receive(pickled, buffers, self._importing)
        if payload.get("needs_numpy_random"):
            import numpy.random  # noqa: F401  # 12 ms: once here, instead of in each worker
        if cache is not None:
            # Most loaders have none, and their start is shorter for it.
            from loaderpool.cache.store import SharedCache, counters_in

            # Of one in memory the file comes after those of the arrays.
            file = self.files[loader][files] if cache.in_memory else -1
            payload["cache"] = SharedCache(cache, file, counters_in(self._arena, cache))
        self.loaded[loader] = payload
        self.places[loader] = offset, nbytes

    def read(self, loader: int, offset: int, nbytes: int) -> tuple[bytes, list[memoryview], CachePlan | None, int]:
        """Return a payload's pickle, its arrays' bytes, its cache, and how many data files hold some of them."""
        pickled, (start, length), places, sizes, cache = self._table(offset, nbytes)
        # One mapping, without a descriptor of its own, for all: a source may be thousands of arrays.
        parts = [(self._arena.descriptor, start, length)]
        parts += ((self.files[loader][number], 0, size) for number, size in enumerate(sizes))
        views = [self._view(*part) if part[2] else memoryview(b"") for part in parts]
        return pickled, [views[part][at : at + size] for part, at, size in places], cache, len(sizes)

    def _view(self, descriptor: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a file, so that writes to it stay this process's own."""
        if descriptor < 0:  # Windows has none of the arena's
            return memoryview(bytearray(self._arena.map[start : start + nbytes]))
        return memoryview(map_private(descriptor, start, nbytes)).cast("B")

    def update(self, loader: int, offset: int, nbytes: int) -> None:
        """Set changed attributes on the loader's source object; the trainer may give their extents back at once."""
        change = self.read_change(offset, nbytes)
        self.apply(loader, change)
        self.changes[loader] = change

    def read_change(self, offset: int, nbytes: int) -> Change:
        """Copy changed attributes out of the arena, as they travelled."""
        pickled, (start, _), places, _, _ = self._table(offset, nbytes)
        view = memoryview(self._arena.map)
        return Change(pickled, [bytearray(view[start + at : start + at + size]) for _, at, size in places])

    def apply(self, loader: int, change: Change) -> None:
        """Make a change."""
        changes = receive(change.pickled, [memoryview(buffer) for buffer in change.buffers], self._importing)
        self.loaded[loader]["source"].update(changes)

    def unload(self, loader: int) -> None:
        """Forget a payload."""
        payload = self.loaded.pop(loader, {})
        if payload.get("cache") is not None:
            payload["cache"].close()
        self.places.pop(loader, None)
        for file in self.files.pop(loader, ()):
            os.close(file)
        self.changes.pop(loader, None)

    def _table(self, offset: int, nbytes: int) -> tuple[bytes, tuple[int, int], list[Any], list[int], CachePlan | None]:
        """Read a shipment's table: its pickle, where its arrays are, places of all, files' sizes, its cache.

        A place: a part (0: what was copied into the arena, then the data files), an offset in it, and a length.
        """
        (start, length), *others = get_object(self._arena, offset, nbytes)
        return self._arena.map[start : start + length], *others
