"""Payloads: read out of the arena once by the supervisor, shared with all workers by fork.

Or, where it must not fork (`ForkCheck`), read by each worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from loaderpool.errors import counted
from loaderpool.memory.arena import Arena, map_private
from loaderpool.system import clock, machine, process
from loaderpool.transport.pickling import Importing, receive

if TYPE_CHECKING:
    from loaderpool.cache.setting import CachePlan

_LOADING = "loading the function and the source"
# A thread that was joined is in the kernel's list for a moment more. Shorter would take it for one that stays, longer
# delays the first worker where there is one.
_GRACE_S = 0.25
_LOOK_S = 0.005

# Threads that are ready for a fork, by name (of which the kernel keeps 15 characters). That of jemalloc, which pyarrow
# (and pandas beside it) and polars start on import: around a fork it holds all its locks, and the child begins without
# it (`background_thread_postfork_child`). And polars' "polars-ooc-cleaner", which waits on a channel for names of files
# to delete: a child's channel never blocks, and what it spilled is deleted by the next process that imports polars.
# polars' own pool begins with its first operation; after that a child that uses polars waits for ever.
_READY_FOR_FORK = frozenset({"jemalloc_bg_thd", "polars-ooc-clea"})


Sign = int | str  # the id of a thread, or a runtime's name, such as "TensorFlow"


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
            file = machine.above_standard(os.dup(self.files[loader][files])) if cache.in_memory else -1
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
        self.loaded.pop(loader, None)
        self.places.pop(loader, None)
        for file in self.files.pop(loader, ()):
            os.close(file)
        self.changes.pop(loader, None)

    def _table(self, offset: int, nbytes: int) -> tuple[bytes, tuple[int, int], list[Any], list[int], CachePlan | None]:
        """Read a shipment's table: its pickle, where its arrays are, places of all, files' sizes, its cache.

        A place: a part (0: what was copied into the arena, then the data files), an offset in it, and a length.
        """
        (start, length), *others = receive(self._arena.map[offset : offset + nbytes])
        return self._arena.map[start : start + length], *others


class ForkCheck:
    """Watches what a supervisor's process has beside its one thread, and which import has brought it. Runs in: there.

    A fork copies one thread, and every lock as it is: one that another thread holds stays locked for ever in the
    worker. So where the user's modules start threads while they are imported, workers are not forked
    (`core.exec_worker`).
    """

    def __init__(self) -> None:
        # After what each thread and runtime was seen first, mostly the import of a module.
        self._causes = dict.fromkeys(_signs(), "the start of the interpreter (sitecustomize, or a .pth file)")
        self._obstacles: dict[str, list[Sign]] = {}

    @contextlib.contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """A context for an import: what the module starts, or one that it imports, is noted with its name."""
        if module in sys.modules:
            yield
            return
        self._note(_LOADING)
        try:
            yield
        finally:
            self._note(f"importing {module!r}")

    def obstacles(self) -> Mapping[str, Sequence[Sign]]:
        """Return why this process must not be forked: what each cause has left running; empty: it may.

        Once there was a cause it stays, for who started threads once may do so again at any time.
        """
        if not self._obstacles and (left := self._left()):
            self._note(_LOADING)
            for sign, cause in self._causes.items():
                if sign in left:
                    self._obstacles.setdefault(cause, []).append(sign)
        return self._obstacles

    def _note(self, cause: str) -> None:
        for sign in _signs():
            self._causes.setdefault(sign, cause)

    @staticmethod
    def _left() -> set[Sign]:
        """Threads and runtimes that are there and will not be gone in a moment."""
        until = clock.monotonic_s() + _GRACE_S
        while (left := _signs()) and not any(isinstance(sign, str) for sign in left) and clock.monotonic_s() < until:
            time.sleep(_LOOK_S)
        return left


def _signs() -> set[Sign]:
    """Return the ids of threads beside the main one, and names of runtimes that no fork survives."""
    signs: set[Sign] = {each for each in machine.thread_ids() if machine.thread_name(each) not in _READY_FOR_FORK}
    for runtime, runs in _RUNTIMES.items():
        with contextlib.suppress(Exception):  # it was not imported, or not to its end
            if runs(sys.modules):
                signs.add(runtime)
    return signs


# Whether a framework's runtime was started, by its name.
_RUNTIMES: dict[str, Callable[[Any], object]] = {
    "TensorFlow": lambda modules: modules["tensorflow.python.eager.context"]._context._initialized is True,
    "JAX": lambda modules: modules["jax._src.xla_bridge"]._backends,  # filled by the first operation
    "CUDA": lambda modules: modules["torch.cuda"].is_initialized() is True,
}


class OpenHandleError(Exception):
    """A module has left something open that workers would inherit, and must not use after a fork."""


def refuse_open_handles() -> None:
    """Raise OpenHandleError where a module that was imported has an HDF5 file or an SQLite database open.

    HDF5 reads through a place in the file that all forked processes move together, and hands out the inherited file to
    any code that opens the path again; a fork that uses an inherited SQLite connection can damage the database
    (https://www.sqlite.org/howtocorrupt.html, "Carrying an open database connection across a fork()").

    Runs in: the supervisor, after it has loaded a payload and before it forks. Costs nothing where neither library is.
    """
    if found := [*_hdf5_files(), *_sqlite_connections()]:
        raise OpenHandleError("; ".join(found))


def _hdf5_files() -> Iterator[str]:
    h5py: Any = sys.modules.get("h5py")
    try:
        h5f = h5py.h5f
        # A file is open as long as anything in it is, also when its own object is gone.
        kinds = h5f.OBJ_FILE | h5f.OBJ_DATASET | h5f.OBJ_GROUP | h5f.OBJ_ATTR
        files = [h5py.h5i.get_file_id(handle) for handle in h5f.get_obj_ids(h5f.OBJ_ALL, kinds)]
        in_memory = h5py.h5fd.CORE
        on_disk = [file for file in files if file.get_access_plist().get_driver() != in_memory]
        paths = {h5f.get_name(file).decode(errors="replace") for file in on_disk}
    except Exception:  # it is not there, or half imported; what cannot be looked at is not refused
        return
    yield from (f"the HDF5 file {path} is open" for path in sorted(paths))


def _sqlite_connections() -> Iterator[str]:
    connection: Any = getattr(sys.modules.get("sqlite3"), "Connection", None)
    if connection is None:
        return
    for module in sys.modules.copy().values():
        # Not by `isinstance`: some modules are replaced by objects that import more when they are asked.
        if type(module) is not ModuleType or process.is_library(module.__name__):
            continue
        for name, value in list(vars(module).items()):
            held = getattr(value, "connection", value) if type(value).__module__ == "sqlite3" else value  # of a cursor
            path = _path_of(held) if isinstance(held, connection) else ""
            if path:
                yield f"{module.__name__}.{name} holds a connection to the SQLite database {path}"


def _path_of(connection: Any) -> str:
    """Return a database's path; "" where it is in memory, and so each process's own, or the connection is closed."""
    try:
        return next((path for _, _, path in connection.execute("PRAGMA database_list") if path), "")
    except Exception:
        return ""


def why_not_forked(obstacles: Mapping[str, Sequence[Sign]], node: str) -> str:
    """Return a warning's text; `node` is empty on the main process' machine."""
    causes = "; ".join(f"{cause} started {_named(signs)}" for cause, signs in list(obstacles.items())[:3])
    more = f"; and {len(obstacles) - 3} more" if len(obstacles) > 3 else ""
    advice = "start threads in setup= instead of at import time"
    if any(isinstance(sign, str) for signs in obstacles.values() for sign in signs):
        advice += ", run no operation of a framework at import time, and capture NumPy arrays instead of tensors"
    where = f" on node {node}" if node else ""
    return (
        f"Workers{where} are started without fork() because {causes}{more}. This is safe, but start-up is slower and "
        f"uses more memory. To use fork(), {advice}."
    )


def _named(signs: Sequence[Sign]) -> str:
    """Return "2 threads", or "the runtime of TensorFlow (2 threads)"."""
    runtimes = [sign for sign in signs if isinstance(sign, str)]
    threads = counted(len(signs) - len(runtimes), "thread")
    if not runtimes:
        return threads
    return f"the runtime of {' and '.join(runtimes)}" + f" ({threads})" * (len(signs) > len(runtimes))
