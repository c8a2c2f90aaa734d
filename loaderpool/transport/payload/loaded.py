"""Payloads: read from the arena once by the supervisor, and shared with all workers by fork.

If the supervisor must not fork (see `ForkCheck`), each worker reads them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from loaderpool.cache.setting import MEMORY, CachePlan
from loaderpool.memory.arena import Arena, map_memory_file
from loaderpool.system import abilities, clock, machine, open_files, process
from loaderpool.system.inheritance import inherit
from loaderpool.transport import modules
from loaderpool.transport.payload.generators import arrive
from loaderpool.transport.payload.handles import OpenHandles
from loaderpool.transport.payload.record import LoaderSettings, Pair, WorkerPayload
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.memory.samples import SampleFile

# Seconds to wait until the kernel no longer lists a thread that was joined. Smaller: the thread
# seems to stay. Larger: if a thread does stay, the first worker starts later.
_GRACE_S = 0.25
_LOOK_S = 0.005

# Threads that are safe to fork with, by name (of which the kernel keeps 15 characters). pyarrow
# (and so pandas) and polars start jemalloc's thread on import. Around a fork it holds all its
# locks, and the child starts without it (`background_thread_postfork_child`). The thread
# "polars-ooc-cleaner" of polars waits on a channel for names of files to delete. A child's channel
# never blocks, and the child's spilled files are deleted by the next process that imports polars.
# polars starts its own pool with its first operation; after that, a child that uses polars waits
# forever.
_READY_FOR_FORK = frozenset({"jemalloc_bg_thd", "polars-ooc-clea"})


def describe_load_error(error: BaseException, place: str = "the supervisor") -> str:
    """Return the part of the payload that could not be loaded, the likely cause, and a fix.

    Called in the process in which loading raised `error`, because the message has its search path.
    `place` describes that process.
    """
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        send = (
            f", send it by RayPool(actor_options={{'runtime_env': {{'py_modules': [{package}]}}}})"
        )
        return (
            f"The module {error.name!r}, which the function or the source needs, cannot be "
            f"imported in {place}. Put it in a directory on sys.path{send * bool(process.node())}, "
            f"or define the function in the script itself. There, sys.path is {sys.path!r}."
        )
    if type(error).__name__ == "AuthenticationError":
        return (
            f"A proxy of a multiprocessing manager has another authentication key than {place}. "
            "Set multiprocessing.current_process().authkey to the manager's key in the main "
            "process before you create the loader."
        )
    return (
        f"Loading the function and the source in {place} raised {type(error).__name__}. Modules "
        "are imported again there, without the changes that the script made. The traceback shows "
        "the line."
    )


class Payloads:
    """The loaders' payloads, by number.

    Attributes:
        loaded: the payloads, which workers inherit.
        files: descriptors of each loader's data files. Ownership: `unload` closes them.
    """

    def __init__(self, arena: Arena, files: dict[int, list[int]]) -> None:
        self._arena, self.files = arena, files
        self.loaded: dict[int, WorkerPayload] = {}
        # settings of all loaders, even if their payload is not loaded
        self.settings: dict[int, LoaderSettings] = {}
        # arena offset and size of each shipment's table, for processes that load it themselves
        self.places: dict[int, tuple[int, int]] = {}

    def load(self, loader: int, offset: int, nbytes: int) -> None:
        """Unpickle a payload. Exceptions from importing the user's modules are raised.

        Its arrays are mapped from the arena: reads share the pages, and writes are private.
        """
        pickled, buffers, cache, files, generators = self.read(loader, offset, nbytes)
        travelled: list[Pair] = []
        others: dict[str, bytes] = {}
        if generators:
            travelled, others = receive(generators, own=loader)
        payload = WorkerPayload(
            **receive(pickled, buffers, [generator for generator, _ in travelled], loader)
        )
        if generators:
            arrive(payload, travelled, others)
        if payload.needs_numpy_random:
            import numpy.random  # noqa: F401  # 12 ms: once here, instead of in each worker
        if cache is not None:
            # Imported here, because most loaders have no cache, and start faster without it.
            from loaderpool.cache.store import SharedCache, counters_in

            # The file of a cache in memory comes after those of the arrays.
            file = (
                machine.above_standard(os.dup(self.files[loader][files]))
                if cache.where == MEMORY
                else -1
            )
            payload.cache = SharedCache(cache, file, counters_in(self._arena, cache))
        if payload.config.samples_per_item is not None and abilities.has_memory_files():
            # The supervisor creates the sample file, which is the last of the loader's files.
            before = files + (cache is not None and cache.where == MEMORY)
            payload.samples = self._sample_file(loader, before, payload.config.samples_per_item)
        self.loaded[loader] = payload
        self.settings[loader] = payload.settings
        self.places[loader] = offset, nbytes

    def read(
        self, loader: int, offset: int, nbytes: int
    ) -> tuple[bytes, list[memoryview], CachePlan | None, int, bytes]:
        """Return the contents of a payload's table: its pickle, the bytes of its arrays, its cache,
        the number of data files with arrays, and its random generators.
        """
        table = receive(self._arena.map[offset : offset + nbytes])
        (start, length), ranges, places, sizes, cache, generators, bequests = table
        # Before the pickle is loaded, because a proxy in it connects to its manager at once.
        inherit(bequests)
        pickled = self._arena.map[start : start + length]
        # A source may be thousands of arrays, so there are few mappings, and no descriptor for each
        # array.
        parts = [(self._arena.descriptor, *each) for each in ranges]
        parts += ((self.files[loader][number], 0, size) for number, size in enumerate(sizes))
        views = [self._view(*part) if part[2] else memoryview(b"") for part in parts]
        arrays = [views[part][at : at + size] for part, at, size in places]
        return pickled, arrays, cache, len(sizes), generators

    def _sample_file(self, loader: int, number: int, samples: int) -> SampleFile | None:
        """Return the loader's sample file, and create it at the first call.

        `number` is the file's place in the loader's list of files.
        """
        # Imported here, because few loaders need it.
        from loaderpool.memory.samples import SampleFile

        files = self.files.setdefault(loader, [])
        try:
            if len(files) == number:
                files.append(machine.create_memory_file("samples"))
            return SampleFile(machine.above_standard(os.dup(files[number])), samples)
        except OSError:  # without a file, each process keeps its own samples
            return None

    def _view(self, descriptor: int, start: int, nbytes: int) -> memoryview:
        """Return a part of a file. Writes to it stay private to this process."""
        if descriptor < 0:  # on Windows the arena has no descriptor
            return memoryview(bytearray(self._arena.map[start : start + nbytes]))
        return memoryview(map_memory_file(descriptor, nbytes, start, is_private=True)).cast("B")

    def unload(self, loader: int) -> None:
        """Forget a payload, and close its data files."""
        payload = self.loaded.pop(loader, None)
        if payload is not None and payload.samples is not None:
            payload.samples.clear()
        self.settings.pop(loader, None)
        self.places.pop(loader, None)
        for file in self.files.pop(loader, ()):
            os.close(file)


class ForkCheck:
    """Finds the state of the supervisor that makes a fork unsafe.

    Called in the supervisor, after a payload was loaded.

    A fork copies only one thread, but all locks with their states. A lock that another thread holds
    stays locked in the worker forever. All forked processes share one position in an open HDF5
    file. If they open its path again, they get the inherited file. A fork that uses an inherited
    SQLite connection can damage the database (https://www.sqlite.org/howtocorrupt.html, "Carrying
    an open database connection across a fork()"). So if importing the user's modules creates such
    objects, workers are not forked (`supervisor.processes`).

    Attributes:
        handles: open files and connections. `handles.files` are those that a fork has to open
            again.
    """

    def __init__(self) -> None:
        self.handles = OpenHandles()
        self._found: tuple[str, ...] = ()
        # user's module that was being imported when each sign appeared
        self._causes: dict[int | str, str] = {}
        self._links: dict[int, str] = {}
        # names of the modules being imported, the innermost last
        self._importing, self._pid = [""], os.getpid()
        modules.note_import = self._note_import

    def _note_import(self, module: str) -> None:
        """Note the signs that appeared while a module was being imported.

        `module` starts to be imported; "": the innermost import ends.
        """
        if os.getpid() != self._pid:  # a worker, from which nothing is forked
            return
        with contextlib.suppress(OSError):  # there is no /proc
            self._links |= (new := open_files.links(but=self._links))
            signs: tuple[int | str, ...] = (
                *machine.thread_ids(),
                *_runtimes(),
                *_hdf5_files(),
                *new.values(),
            )
            for sign in signs:
                self._causes.setdefault(sign, self._importing[-1])
        if module:
            self._importing.append(module)
        else:
            self._importing.pop()

    def obstacles(self, private: Collection[int]) -> Sequence[str]:
        """Return the obstacles to forking this process. Empty if forking is safe.

        Obstacles stay once they were found, because they may appear again.

        Args:
            private: the supervisor's own descriptors.
        """
        if not self._found:
            until = clock.monotonic_s() + _GRACE_S
            while (threads := _threads()) and clock.monotonic_s() < until:
                time.sleep(_LOOK_S)
            signs: dict[str, int | str] = {each: each for each in (*_runtimes(), *_hdf5_files())}
            signs |= _described(threads)
            signs |= self.handles.obstacles(private)
            causes = {text: self._causes.get(sign) for text, sign in signs.items()}
            self._found = tuple(
                f"{text} (from importing {cause!r})" if cause else text
                for text, cause in causes.items()
            )
        return self._found


def _threads() -> list[int]:
    """Return the ids of threads, without the main one, that make a fork unsafe."""
    ids = machine.thread_ids()
    return [each for each in ids if machine.thread_name(each) not in _READY_FOR_FORK]


def _described(threads: Sequence[int]) -> dict[str, int]:
    """Return names of these threads for the warning, with their ids.

    All unnamed threads of a library have one entry, with the id of the first.
    """
    of_python = {thread.native_id: thread for thread in threading.enumerate()}
    own_name = machine.thread_name(os.getpid())
    described: dict[str, int] = {}
    for each in threads:
        thread = of_python.get(each)
        name = thread.name if thread else machine.thread_name(each)
        library = _library_of_python(thread) if thread else _library_of_native(each)
        if importers := _importers(library):
            library += f" (imported by {', '.join(importers)})"
        if library and name == own_name:  # an unnamed thread of C code has the name of its process
            described.setdefault(f"a thread of {library}", each)
        else:
            described.setdefault(f"thread {name!r}" + (f" of {library}" if library else ""), each)
    return described


def _library_of_python(thread: threading.Thread) -> str:
    """Return the installed package whose function a Python thread runs; "" if there is none."""
    frame = sys._current_frames().get(thread.ident or 0)
    package = ""
    while frame is not None:  # from the innermost frame to the outermost
        module = frame.f_globals.get("__name__", "")
        if process.is_installed(module):
            package = module.partition(".")[0]
        frame = frame.f_back
    return package


# Files with code in which any thread may wait.
_RUNTIME_FILES = ("ld-", "libc.", "libc-", "libpthread", "libpython", "libstdc++", "python")


def _library_of_native(thread: int) -> str:
    """Return the installed package, or else the file, whose code a thread runs; "" if unknown."""
    files = machine.files_on_stack(thread)
    for file in files:
        if package := process.package_of(file):
            return package
    names = (os.path.basename(file) for file in files)
    return next((name for name in names if not name.startswith(_RUNTIME_FILES)), "")


def _importers(package: str) -> list[str]:
    """Return up to two packages that import this one; empty if the user's own modules import it.

    For example, blosc2 starts threads of numexpr, which its users may not know.
    """
    modules = sys.modules.copy()
    parts = {id(module) for name, module in modules.items() if f"{name}.".startswith(f"{package}.")}
    found: dict[str, None] = {}
    for name, module in modules.items():
        root = name.partition(".")[0]
        # Not by `isinstance`: some modules are replaced by objects that import more on access.
        if root == package or root in found or type(module) is not ModuleType:
            continue
        if any(id(value) in parts for value in list(vars(module).values())):
            if not process.is_library(name):
                return []
            found[root] = None
    return list(found)[:2]


# Framework -> function that returns True if its runtime was started.
_RUNTIMES: dict[str, Callable[[dict[str, ModuleType]], object]] = {
    "TensorFlow": lambda modules: (
        modules["tensorflow.python.eager.context"]._context._initialized is True
    ),
    # JAX fills this at its first operation
    "JAX": lambda modules: modules["jax._src.xla_bridge"]._backends,
    "CUDA": lambda modules: modules["torch.cuda"].is_initialized() is True,
}


def _runtimes() -> Iterator[str]:
    for runtime, runs in _RUNTIMES.items():
        with contextlib.suppress(Exception):  # it was not imported, or only in part
            if runs(sys.modules):
                yield f"the runtime of {runtime}"


def _hdf5_files() -> Iterator[str]:
    with contextlib.suppress(Exception):  # it was not imported, or only in part
        h5f = sys.modules["h5py"].h5f
        # A file is open while any object in it is, even if its own object is gone.
        kinds = h5f.OBJ_FILE | h5f.OBJ_DATASET | h5f.OBJ_GROUP | h5f.OBJ_ATTR
        paths = {
            h5f.get_name(handle).decode(errors="replace")
            for handle in h5f.get_obj_ids(h5f.OBJ_ALL, kinds)
        }
        yield from (f"the open HDF5 file {path}" for path in sorted(paths))


def why_not_forked(obstacles: Sequence[str], node: str) -> str:
    """Return the text of a warning. `node` is empty on the main process's machine."""
    more = f" and {len(obstacles) - 3} more" if len(obstacles) > 3 else ""
    where = f" on node {node}" if node else ""
    return (
        f"Workers{where} are started without fork() because of {', '.join(obstacles[:3])}{more} in "
        "the supervisor, which imports your modules. This is safe, but start-up is slower and uses "
        "more memory. To use fork(), start threads and open such files and connections in setup= "
        "instead of at import time or in __setstate__. Run no operation of a framework at import "
        "time, and capture NumPy arrays instead of tensors."
    )
