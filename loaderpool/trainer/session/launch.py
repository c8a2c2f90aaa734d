"""Starts the supervisor: a clean interpreter by exec, with just the descriptors it needs.

Never by fork of the trainer (threads of TensorFlow, locks of theirs) and never by a start method that runs `__main__`
again, so scripts need no guard and notebooks work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from loaderpool.errors import PoolBrokenError
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, machine
from loaderpool.system.process import is_library_file
from loaderpool.transport import child_process

_library: set[str] = set()  # modules that are known to be none of the user's


class _File(NamedTuple):
    path: str
    changed_ns: int  # when it was written to
    nbytes: int


class ModuleFiles:
    """Files of the user's modules as they were when a loader was made.

    Which of the modules workers import is not known. A file that keeps its time and size goes unseen.
    """

    def __init__(self) -> None:
        self._files: dict[str, _File | None] = {}  # by module; None: it was told of, or cannot be looked at

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
            if file is not None and (now := _look_at(file.path)) is not None and now != file:
                self._files[name] = None
                found.append(f"  {name} ({file.path})")
        if not found:
            return ""
        what = "The files of these modules changed after the loader was created. New workers import the new files, and"
        cure = "If your function uses them, create the loader and its pool again to use the new files in all workers."
        return "\n".join([f"{what} older workers keep the old ones:", *found, cure])


def _look_at(path: str) -> _File | None:
    try:
        found = os.stat(path)
    except OSError:  # in an archive, or deleted: an import of it says so
        return None
    return _File(path, found.st_mtime_ns, found.st_size)


# One thread each: as many processes as cores run already, and a fork needs a single-threaded parent.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)


class Program(NamedTuple):
    """What is executed in the supervisor's place.

    It is a process of its own, begun as a clean interpreter, and gets three ways to the trainer, all of them
    descriptors: it reads `control`, writes `completions`, which workers write too, and has `socket` for what is large
    or comes with descriptors. It shares `arena`. On them it speaks the words of transport/messages.py: it obeys
    `Control`, and tells `Notice`. When the trainer is gone, `control` ends, and it must end.
    """

    module: str  # whose `main(start)` is called with the settings of the start, by name
    label: str = "loaderpool-supervisor"  # for who looks at a list of tasks
    settings: Mapping[str, Any] = {}  # its own, beside those of each start: plain
    is_replaced: bool = True  # by another where it has died


SUPERVISOR = Program("loaderpool.supervisor.main_loop")
# A thread of the trainer's in its place, for workers that are processes of `multiprocess`: no process, and no fork.
SPAWNED = Program("loaderpool.supervisor.spawned.loop")


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
        argv = [str(argument) for argument in getattr(sys, "argv", ())]
        return cls(directory, environment(), search_path(), argv)


class Launched(NamedTuple):
    """The trainer's ends."""

    process: subprocess.Popen[bytes]
    control: int  # write end of the control pipe
    completions: int  # read end of the completion pipe
    socket: socket.socket  # large things arrive here

    def end_group(self) -> None:
        """Kill the supervisor's process group; safe while it is not reaped, for until then its number is not reused."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close what is read from; the control pipe's end belongs to the `ReturnPipe`."""
        os.close(self.completions)
        self.socket.close()

    def undo(self) -> None:
        """Kill the supervisor and close all ends, where the session that was to use them cannot be made."""
        self.end_group()
        self.process.wait()
        os.close(self.control)
        self.close()


def launch(
    arena: Arena,
    workers: int,
    max_restarts: tuple[int, float] | None,
    first_ticket: int = 1,
    program: Program = SUPERVISOR,
    around: Surroundings | None = None,
) -> Launched:
    """Start a supervisor for `workers` workers on an arena; returns at once.

    Args:
        arena: what it shares with the trainer.
        workers: how many workers it shall have.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.
        first_ticket: its tickets' numbers begin here.
        program: what is executed.
        around: what it finds around it; None: what there is now.

    Raises:
        PoolBrokenError: no process could be started.
    """
    around = around or Surroundings.of_now()
    if not sys.executable:
        raise PoolBrokenError("sys.executable is empty. Set it to the path of a Python interpreter")
    with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
        try:
            control_read, control_write = map(machine.above_standard, os.pipe())
            theirs.callback(os.close, control_read)
            mine.callback(os.close, control_write)
            completions_read, completions_write = map(machine.above_standard, os.pipe())
            mine.callback(os.close, completions_read)
            theirs.callback(os.close, completions_write)
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            my_socket, their_socket = (socket.socket(fileno=machine.above_standard(each.detach())) for each in pair)
            mine.callback(my_socket.close)
            theirs.callback(their_socket.close)
            os.set_blocking(completions_read, False)
            os.set_blocking(completions_write, False)
            my_socket.setblocking(False)
            their_socket.setblocking(False)
            start = {
                **program.settings,
                "path": around.path,
                "argv": around.argv,
                "trainer_pid": os.getpid(),
                "control": control_read,
                "completions": completions_write,
                "socket": their_socket.fileno(),
                "arena": arena.descriptor,
                "arena_bytes": arena.nbytes,
                "workers": workers,
                "max_restarts": max_restarts,
                "first_ticket": first_ticket,
            }
            process = child_process.start(
                program.module,
                start,
                [control_read, completions_write, their_socket.fileno(), arena.descriptor],
                program.label,
                directory=around.directory,
                environment=around.environment,
            )
        except OSError as error:
            advice = capacity.start_advice(error, "this process has no file descriptors left")
            raise PoolBrokenError(f"Could not start the supervisor process: {error}; {advice}") from error
        mine.pop_all()
        return Launched(process, control_write, completions_read, my_socket)


def search_path() -> list[str]:
    """The trainer's sys.path as its imports read it: what is no str is passed over, "" is the working directory."""
    path = []
    for entry in sys.path:
        if entry == "":
            with contextlib.suppress(FileNotFoundError):  # it was deleted: nothing is found in it
                path.append(os.getcwd())
        elif isinstance(entry, str):
            path.append(str(entry))
    return path


def environment() -> dict[str, str]:
    """Return the environment of the processes that run the user's code."""
    variables = dict(os.environ)
    variables.update(dict.fromkeys(_ONE_THREAD, "1"))
    variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["JAX_PLATFORMS"] = "cpu"  # or JAX would want the GPU that it is told of, or a TPU that the trainer has
    if "jax" in sys.modules:  # set at run time, it would not travel, and workers would make float32 of what is float64
        variables["JAX_ENABLE_X64"] = str(int(sys.modules["jax"].config.jax_enable_x64))
    # Sets of str keep one order in all workers, over restarts and from one training to the next.
    if variables.get("PYTHONHASHSEED", "random") == "random":
        variables["PYTHONHASHSEED"] = "0"
    variables.pop("PYTHONSTARTUP", None)
    return variables
