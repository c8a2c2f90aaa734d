"""What hooks have changed since payloads were made, kept for workers that load these themselves.

The trainer gives a change's place in the arena back when a later one has made it needless, perhaps while such a worker
is still starting: so it gets the changes in a memory file, which stays what it is for as long as anybody has it.
"""

from __future__ import annotations

import mmap
import os
import pickle
from typing import NamedTuple

from loaderpool.system import machine


class Change(NamedTuple):
    """Changed attributes of a loader's source, as they travelled."""

    loader: int
    pickled: bytes
    buffers: list[bytearray]  # of its arrays, which lie in just these once it is applied


class Changes:
    """Those that matter, oldest first.

    Runs in: the supervisor. Ownership: of the memory file, until the next change.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Change, frozenset[str]]] = []
        self._file: int | None = None

    def keep(self, change: Change, names: frozenset[str]) -> None:
        """Keep a change of the attributes with these names; earlier ones of no others are dropped."""
        self._drop_file()
        self._kept = [(each, older) for each, older in self._kept if each.loader != change.loader or not older <= names]
        self._kept.append((change, names))

    def forget(self, loader: int) -> None:
        """The loader is unloaded."""
        self._drop_file()
        self._kept = [(change, names) for change, names in self._kept if change.loader != loader]

    def file(self) -> int | None:
        """A memory file that holds them, for `read_changes`; None: there are none.

        Raises:
            OSError: no descriptor, or no memory, is left.
        """
        if self._file is None and self._kept:
            descriptor = machine.create_memory_file("changes")
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    pickle.dump([tuple(change) for change, _ in self._kept], file, protocol=5)
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
    """What a memory file of `Changes` holds; closes the descriptor. Runs in: a worker."""
    try:
        # Not read(): all workers' descriptors share one position in the file.
        with mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ) as view:
            return [Change(*fields) for fields in pickle.loads(view)]
    finally:
        os.close(descriptor)
