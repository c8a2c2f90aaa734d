"""What hooks have changed since payloads were made, kept for processes that load these themselves.

The trainer keeps it for another supervisor, the supervisor for workers that are not forked. It gives a change's
place in the arena back when a later one has made it needless, perhaps while such a worker is starting: so that one gets
the changes in a memory file, which stays what it is for as long as it is open anywhere.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from loaderpool.system import machine

Kept = TypeVar("Kept")


class LatestChanges(Generic[Kept]):
    """Changes of attributes, oldest first; one leaves when later ones have changed all its attributes."""

    def __init__(self) -> None:
        self._kept: list[tuple[Kept, frozenset[Hashable]]] = []

    def __iter__(self) -> Iterator[Kept]:
        return (change for change, _ in self._kept)

    def keep(self, change: Kept, names: frozenset[Hashable]) -> list[Kept]:
        """Add a change of the attributes with these names; returns those that it makes needless."""
        kept, needless, later = [(change, names)], [], names
        for older, changed in reversed(self._kept):
            if changed <= later:
                needless.append(older)
            else:
                kept.append((older, changed))
                later |= changed
        self._kept = kept[::-1]
        return needless

    def drop(self, dropped: Callable[[Kept], bool]) -> None:
        """Forget those of which this is true."""
        self._kept = [each for each in self._kept if not dropped(each[0])]


class Change(NamedTuple):
    """Changed attributes of a loader's source, as they travelled."""

    loader: int
    pickled: bytes
    buffers: list[bytearray]  # of its arrays, which lie in just these once it is applied
    names: frozenset[str]  # of the attributes


class SourceChanges:
    """The changes of loaders' sources that matter, oldest first."""

    def __init__(self) -> None:
        self._kept: LatestChanges[Change] = LatestChanges()

    def __iter__(self) -> Iterator[Change]:
        return iter(self._kept)

    def keep(self, change: Change) -> None:
        """Keep a change of attributes of the loader's source."""
        self._kept.keep(change, frozenset((change.loader, name) for name in change.names))

    def forget(self, loader: int) -> None:
        """Forget the changes of a loader that is unloaded."""
        self._kept.drop(lambda change: change.loader == loader)


class FiledChanges(SourceChanges):
    """Such changes, and a memory file with them for workers that start.

    Runs in: the supervisor. Ownership: of the memory file, until the next change.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: int | None = None

    def keep(self, change: Change) -> None:
        self._drop_file()
        super().keep(change)

    def forget(self, loader: int) -> None:
        self._drop_file()
        super().forget(loader)

    def file(self) -> int | None:
        """Return a memory file that holds them, for `read_changes`; None: there are none.

        Raises:
            OSError: no descriptor, or no memory, is left.
        """
        changes = [tuple(change) for change in self]
        if self._file is None and changes:
            descriptor = machine.create_memory_file("changes")
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    pickle.dump(changes, file, protocol=5)
            except BaseException:
                os.close(descriptor)
                raise
            self._file = descriptor
        return self._file

    def _drop_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_changes(descriptor: int) -> list[Change]:
    """Return what a memory file of `FiledChanges` holds; closes the descriptor. Runs in: a worker."""
    try:
        # Not read(): all workers' descriptors share one position in the file.
        with mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ) as view:
            return [Change(*fields) for fields in pickle.loads(view)]
    finally:
        os.close(descriptor)
