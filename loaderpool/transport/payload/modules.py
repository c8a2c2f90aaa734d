"""The code of the user's modules as a pool first imported it, for all of its processes that import it later.

A supervisor that takes a dead one's place, a worker that is not forked, a stream's reader and an import inside the
function read module files when they start. Without this, a file that is edited meanwhile would give a pass rows of the
old and of the new code, and one that is half written would end the training.

Runs in: the trainer, which owns a `ModuleStore`, and each process that imports the user's code (`keep`).
"""

from __future__ import annotations

import contextlib
import marshal
import os
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any, NamedTuple

from loaderpool.system import machine, process

# Each frame is `_BEGIN`, its length, its content and `_END`. Frames of another version of Python are passed over.
_BEGIN = f"loaderpool {sys.implementation.cache_tag} ".encode()
_END = b"\nloaderpool\n"
_LENGTH = struct.Struct("<Q")
# Code of some 800 modules. Smaller: a large project is not kept as a whole. Larger: where libraries are installed among
# the user's own modules, more of them is kept in memory, which takes time and serves nobody.
_MOST_BYTES = 8 << 20


class KeptModule(NamedTuple):
    """A module as one process of the pool has imported it."""

    name: str
    path: str
    folders: list[str] | None  # where a package's modules are searched for; None: it is no package
    status: tuple[int, int]  # of the file: when it was written to, in ns, and its bytes
    code: bytes


class ModuleStore:
    """The modules that a pool's processes have imported, of each the first version.

    It is a memory file to which each process appends, so the kernel orders the writes and no lock is shared. A frame
    that a process has not written to its end is passed over. Without memory files it is a buffer of this process.

    Attributes:
        descriptor: Of the file; -1 if there is none.

    Args:
        descriptor: As `create` has made it, here or in another process.
        frames: Content of a store without a file.
    """

    def __init__(self, descriptor: int = -1, frames: bytes = b"") -> None:
        self.descriptor = descriptor
        self._identity = machine.file_identity(descriptor) if descriptor >= 0 else None
        self._buffer = bytearray(frames)
        self._read_to = 0
        self._modules: dict[str, KeptModule] = {}

    @classmethod
    def create(cls) -> ModuleStore:
        """Return a new, empty store in a memory file. Raises OSError if no descriptor is left."""
        return cls(machine.create_log_file("modules"))

    def find(self, name: str) -> KeptModule | None:
        """Return the first version of a module; None: no process has imported it."""
        start = self._read_to
        data = self.frames(start)
        at = end = 0
        while (at := data.find(_BEGIN, at)) >= 0 and len(data) >= at + len(_BEGIN) + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at + len(_BEGIN))
            first = at + len(_BEGIN) + _LENGTH.size
            if data.startswith(_END, first + length):
                module = KeptModule(*marshal.loads(data[first : first + length]))
                self._modules.setdefault(module.name, module)
                at = end = first + length + len(_END)
            else:  # another frame may begin within
                at += 1
        self._read_to = max(self._read_to, start + end)  # another thread may have been faster
        return self._modules.get(name)

    def add(self, module: KeptModule) -> KeptModule:
        """Append a module; returns the first version, which another process may have appended a moment ago."""
        content = marshal.dumps(tuple(module))
        if self._read_to + len(content) > _MOST_BYTES:
            return module
        self.extend(b"".join([_BEGIN, _LENGTH.pack(len(content)), content, _END]))
        return self.find(module.name) or module  # or no memory is left, and it is not kept

    def frames(self, start: int = 0) -> bytes:
        """Return the content from an offset on."""
        if self.descriptor < 0:
            return bytes(self._buffer[start:])
        if self._is_lost():
            return b""
        return os.pread(self.descriptor, max(0, os.fstat(self.descriptor).st_size - start), start)

    def extend(self, frames: bytes) -> None:
        """Append frames of a store."""
        if self.descriptor < 0:
            self._buffer += frames
        elif not self._is_lost():
            with contextlib.suppress(OSError):  # no memory is left
                os.write(self.descriptor, frames)

    def close(self) -> None:
        """Close the file in this process."""
        if self.descriptor >= 0 and not self._is_lost():
            os.close(self.descriptor)
        self._identity = None

    def _is_lost(self) -> bool:
        """Return whether the file is closed: a function may have done it, and have a file of its own there."""
        return self._identity is None or machine.file_identity(self.descriptor) != self._identity


# ---- in the processes that import

note_import: Callable[[str], None] | None = None
"""Gets the name of a module of the user's before it is executed, and "" afterwards; `loaded.ForkCheck` sets it."""


def keep(store: ModuleStore) -> None:
    """Import the user's modules from the store from now on, and add others as they are imported."""
    sys.meta_path.insert(0, _Finder(store))


class _Finder:
    """Has the finders behind it find a module, and replaces the loader if it is one of the user's source files."""

    def __init__(self, store: ModuleStore) -> None:
        self._store = store
        self._searched = set[str]()  # a finder of the user's may ask all finders, as this one does

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if target is not None or name in self._searched or self not in sys.meta_path:
            return None  # `importlib.reload`, which gives a target, shall read the file
        self._searched.add(name)
        try:
            spec = next(self._found(name, path), None)
        finally:
            self._searched.discard(name)
        if spec is None:
            return self._missing(name)
        if type(spec.loader) is SourceFileLoader and not process.is_library_file(
            name, spec.loader.path
        ):
            spec.loader = _KeptLoader(
                name, spec.loader.path, self._store, spec.submodule_search_locations
            )
        return spec

    def _found(self, name: str, path: Any) -> Iterator[ModuleSpec]:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, None)) is not None:
                yield spec

    def _missing(self, name: str) -> ModuleSpec | None:
        """Return the spec of a module whose file is gone; on a node, other machines' files are none of its own."""
        module = None if process.node() else self._store.find(name)
        if module is None:
            return None
        spec = ModuleSpec(
            name, _KeptLoader(name, module.path, self._store, module.folders), origin=module.path
        )
        spec.submodule_search_locations = module.folders
        spec.has_location = True
        return spec


class _KeptLoader(SourceFileLoader):
    """Loads a source file with the code that the store has of it."""

    def __init__(self, name: str, path: str, store: ModuleStore, folders: list[str] | None) -> None:
        super().__init__(name, path)
        self._store, self._folders = store, folders

    def get_code(self, fullname: str) -> Any:
        module = self._store.find(fullname)
        if module is None:
            status = status_of(self.path)  # before it is read
            code = super().get_code(fullname)
            folders = None if self._folders is None else list(self._folders)
            own = KeptModule(fullname, self.path, folders, status, marshal.dumps(code))
            module = self._store.add(own)
            if module == own:
                return code
        if module.path != self.path:  # on a node, another file may have that name
            return super().get_code(fullname)
        return marshal.loads(module.code)

    def exec_module(self, module: ModuleType) -> None:
        note = note_import
        if note is None:
            return super().exec_module(module)
        note(module.__name__)
        try:
            super().exec_module(module)
        finally:
            note("")


# Python leaves frames of importlib out of tracebacks, but not those above a frame of another file.
_KeptLoader.exec_module.__code__ = _KeptLoader.exec_module.__code__.replace(
    co_filename=SourceFileLoader.get_code.__code__.co_filename
)


def status_of(path: str) -> tuple[int, int]:
    """Return when a file was written to, in ns, and its bytes; zeros: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
