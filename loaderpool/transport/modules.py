"""Code of the user's modules as a pool first imported it, for its processes that import them later.

Such processes are a supervisor that replaces a dead one, a worker that is not forked, and a
stream's reader. An import inside the function also comes later. They read module files when they
start. Without the stored code, a file that is edited meanwhile would mix rows of old and new code
in one epoch. A half-written file would end the training.

Runs in: the main process, which owns a `ModuleStore`, and each process that imports the user's code
(`keep`).
"""

from __future__ import annotations

import contextlib
import marshal
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import NamedTuple

from loaderpool.system import machine, process

# A frame is `_BEGIN`, its length, its content and `_END`. Frames of another version of Python are
# skipped.
_BEGIN = f"loaderpool {sys.implementation.cache_tag} ".encode()
_END = b"\nloaderpool\n"
_LENGTH = struct.Struct("<Q")
# Code of about 800 modules. Smaller: a large project is not stored as a whole. Larger: if libraries
# are installed among the user's own modules, storing more of them takes time and memory without any
# benefit.
_MOST_BYTES = 8 << 20


class KeptModule(NamedTuple):
    """A module as one process of the pool has imported it."""

    name: str
    path: str
    folders: list[str] | None  # search path of a package's modules; None: not a package
    status: tuple[int, int]  # the file's modification time in ns, and its size in bytes
    code: bytes


class ModuleStore:
    """The first version of each module that a pool's processes have imported.

    It is a memory file to which each process appends. The kernel orders the writes, so no lock is
    shared. Incomplete frames are skipped. Without memory files it is a buffer of this process.

    Attributes:
        descriptor: Descriptor of the file; -1 if there is none.

    Args:
        descriptor: Descriptor from `create`, called in this process or another one.
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
        """Return a new, empty store in a memory file.

        Raises:
            OSError: No descriptor is left.
        """
        return cls(machine.create_log_file("modules"))

    def find(self, name: str) -> KeptModule | None:
        """Return the first version of a module, or None if no process has imported it."""
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
            else:  # another frame may begin inside
                at += 1
        self._read_to = max(self._read_to, start + end)  # another thread may have been faster
        return self._modules.get(name)

    def add(self, module: KeptModule) -> KeptModule:
        """Append a module. Return its first version, which may be one that another process
        appended.
        """
        content = marshal.dumps(tuple(module))
        if self._read_to + len(content) > _MOST_BYTES:
            return module
        self.extend(b"".join([_BEGIN, _LENGTH.pack(len(content)), content, _END]))
        return self.find(module.name) or module  # if no memory is left, it is not stored

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
        """Return True if the file is closed.

        The user's code may have closed it, and its descriptor may now be another file.
        """
        return self._identity is None or machine.file_identity(self.descriptor) != self._identity


# ---- processes that import ----

note_import: Callable[[str], None] | None = None
"""Called with the name of a user's module before it is executed, and with "" afterwards. Set by
`loaded.ForkCheck`.
"""


def keep(store: ModuleStore) -> None:
    """Import the user's modules from the store from now on, and add new ones as they are
    imported.
    """
    sys.meta_path.insert(0, _Finder(store))


class _Finder:
    """Finds a module by the finders after it. For a user's source file, it replaces the
    loader.
    """

    def __init__(self, store: ModuleStore) -> None:
        self._store = store
        # Modules being searched. Guards against recursion: a user's finder may call all finders.
        self._searched = set[str]()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if target is not None or name in self._searched or self not in sys.meta_path:
            return None  # `importlib.reload` passes a target, and must read the file
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

    def _found(self, name: str, path: Sequence[str] | None) -> Iterator[ModuleSpec]:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, None)) is not None:
                yield spec

    def _missing(self, name: str) -> ModuleSpec | None:
        """Return the spec of a module whose file is gone.

        A node has none, because the stored files are those of other machines.
        """
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
    """Loads a source file with the code from the store."""

    def __init__(self, name: str, path: str, store: ModuleStore, folders: list[str] | None) -> None:
        super().__init__(name, path)
        self._store, self._folders = store, folders

    def get_code(self, fullname: str) -> CodeType | None:
        module = self._store.find(fullname)
        if module is None:
            status = status_of(self.path)  # read before the file itself
            code = super().get_code(fullname)
            folders = None if self._folders is None else list(self._folders)
            own = KeptModule(fullname, self.path, folders, status, marshal.dumps(code))
            module = self._store.add(own)
            if module == own:
                return code
        if module.path != self.path:  # on a node, another file may have that name
            return super().get_code(fullname)
        kept: CodeType = marshal.loads(module.code)
        return kept

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
# So this function gets the file name of importlib.
_KeptLoader.exec_module.__code__ = _KeptLoader.exec_module.__code__.replace(
    co_filename=SourceFileLoader.get_code.__code__.co_filename
)


def status_of(path: str) -> tuple[int, int]:
    """Return a file's modification time in ns, and its size in bytes; zeros: there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
