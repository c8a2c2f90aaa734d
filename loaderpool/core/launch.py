"""What a pool's processes are started with: the program, and what the main process has around it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from loaderpool.system.process import is_library_file

# One thread each: as many processes as cores run already, and a fork needs a single-threaded parent.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)
_library: set[str] = set()  # modules that are known to be none of the user's


class ModuleFiles:
    """Files of the user's modules as they were when a loader was made.

    Which of the modules workers import is not known. A file that keeps its time and size goes unseen.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, int, int] | None] = {}  # by module; None: told of, or cannot be looked at

    def note(self) -> None:
        """Note those that this process has imported and that were not noted before."""
        for name, module in sys.modules.copy().items():  # in one go: threads may import meanwhile
            if name in _library or name in self._files or name == "__main__":
                continue
            try:
                path = vars(module).get("__file__")
            except TypeError:  # something else stands in a module's place
                path = None
            if not isinstance(path, str) or is_library_file(path):
                _library.add(name)
            else:
                self._files[name] = _look_at(path)

    def changed(self) -> str:
        """Return a warning's text that names the files that have changed, each once; empty: there are none."""
        found = []
        for name, file in self._files.items():
            if file is not None and _look_at(file[0]) not in (None, file):
                self._files[name] = None
                found.append(f"  {name} ({file[0]})")
        if not found:
            return ""
        what = "The files of these modules changed after the loader was created. New workers import the new files, and"
        cure = "If your function uses them, create the loader and its pool again to use the new files in all workers."
        return "\n".join([f"{what} older workers keep the old ones:", *found, cure])


def _look_at(path: str) -> tuple[str, int, int] | None:
    """Return the path, when the file was written to, and its bytes; None: in an archive, or deleted."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, found.st_mtime_ns, found.st_size


class Program(NamedTuple):
    """What is executed in the supervisor's place: a process of its own, begun as a clean interpreter.

    It gets its channel, the arena and the slots as descriptors. When its channel ends, it must end.
    """

    module: str  # whose `main(start)` is called with the settings of the start, by name
    label: str = "loaderpool-supervisor"  # for who looks at a list of tasks
    settings: Mapping[str, Any] = {}  # its own, beside those of each start: plain


SUPERVISOR = Program("loaderpool.core.supervisor")


class Surroundings(NamedTuple):
    """What the processes of a pool find around them, whenever they start: as this process had it when the pool began.

    Batches of one pass would else depend on which of its processes is a later one.
    """

    directory: str | None  # None: it was deleted; then it is whichever this process has
    environment: Mapping[str, str]
    path: list[str]
    argv: list[str]

    @classmethod
    def of_now(cls) -> Surroundings:
        """Return those of this moment."""
        directory = None
        with contextlib.suppress(FileNotFoundError):
            directory = os.getcwd()
        # As imports read it: what is no str is passed over, "" is the working directory.
        path = [str(entry) or directory for entry in sys.path if isinstance(entry, str)]
        argv = [str(argument) for argument in getattr(sys, "argv", ())]
        return cls(directory, _environment(), [entry for entry in path if entry is not None], argv)


def _environment() -> dict[str, str]:
    """Return the environment of the processes that run the user's code."""
    variables = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["JAX_PLATFORMS"] = "cpu"  # or JAX would want the GPU that it is told of, or the main process' TPU
    if "jax" in sys.modules:  # set at run time, it would not travel, and workers would make float32 of what is float64
        variables["JAX_ENABLE_X64"] = str(int(sys.modules["jax"].config.jax_enable_x64))
    # Sets of str keep one order in all workers, over restarts and from one training to the next.
    if variables.get("PYTHONHASHSEED", "random") == "random":
        variables["PYTHONHASHSEED"] = "0"
    variables.pop("PYTHONSTARTUP", None)
    return variables
