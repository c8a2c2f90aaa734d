"""Whether the supervisor may fork: it has one thread and no framework's runtime, else whose import started them.

A fork copies one thread, and every lock as it is: one that another thread holds stays locked for ever in the worker. So
where the user's modules start threads while they are imported, workers are not forked (`core.exec_worker`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from loaderpool.errors import counted
from loaderpool.system import clock, machine
from loaderpool.system.process import is_library

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


class ForkCheck:
    """Watches what a supervisor's process has beside its one thread. Runs in: the supervisor."""

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
        if type(module) is not ModuleType or is_library(module.__name__):
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
