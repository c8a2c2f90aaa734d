"""How a process of ours begins that is not forked: a clean interpreter, told by a memory file what it is to be.

A frozen or embedding program runs itself where Python would run a command. So each start leaves a mark in the child's
environment, which the command takes away. The import of this package that finds it has the process become what it was
started as; a loader that finds it is an error, for the program would start itself without end.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loaderpool.errors import PoolBrokenError
from loaderpool.system import abilities, capacity, clock, machine
from loaderpool.transport.payload.modules import ModuleStore

# One thread each: as many processes as cores run already, and a fork needs a single-threaded parent.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)

# sys.path is set before anything is imported, so the process finds what the trainer finds. `-c` has put the working
# directory in front: not even mmap may come from there. The settings come in a memory file: a script's arguments alone
# (6,000 file names) can be more than one argument of a command may be. By marshal, as both ends are this interpreter
# and it is built in: json takes each of them a millisecond and a half to import. Descriptors had to be inheritable
# for the exec; what the user's code starts needs none. Garbage is not collected
# while our modules are imported, nor is what they made looked at later: each would take five milliseconds.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import importlib, marshal, mmap, os; module, file, size = os.environ.pop('LOADERPOOL_START').split(); "
    "start = marshal.loads(mmap.mmap(int(file), int(size))[:]); os.close(int(file)); sys.path[:] = start['path']; "
    "sys.argv[:] = start['argv']; [os.set_inheritable(each, False) for each in start['descriptors']]; "
    "import gc; gc.disable(); main = importlib.import_module(module).main; gc.freeze(); gc.enable(); main(start)"
)
_MARK = "LOADERPOOL_START"  # module, descriptor and size of the memory file


class Program(NamedTuple):
    """What a process of its own executes, begun as a clean interpreter."""

    module: str  # whose `main(start)` is called with the settings of the start, by name
    label: str = "loaderpool-supervisor"  # for who looks at a list of tasks
    settings: Mapping[str, Any] = {}  # its own, beside those of each start: plain


class Surroundings(NamedTuple):
    """What the processes of a pool find around them, whenever they start: as this process had it when the pool began.

    Batches of one pass would else depend on which of its processes is a later one.
    """

    directory: str | None  # None: it was deleted; then it is whichever this process has
    environment: Mapping[str, str]
    path: list[str]
    argv: list[str]
    modules: ModuleStore

    @classmethod
    def of_now(cls, modules: ModuleStore) -> Surroundings:
        """Return those of this moment, and the pool's store of modules."""
        directory = None
        with contextlib.suppress(FileNotFoundError):
            directory = os.getcwd()
        # As imports read it: what is no str is passed over, "" is the working directory.
        path = [str(entry) or directory for entry in sys.path if isinstance(entry, str)]
        argv = [str(argument) for argument in getattr(sys, "argv", ())]
        return cls(
            directory, _environment(), [entry for entry in path if entry is not None], argv, modules
        )


def _environment() -> dict[str, str]:
    """Return the environment of the processes that run the user's code."""
    variables = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    for (
        name
    ) in capacity.OPENMP_BINDING:  # with one thread, it would bind all workers to the same CPU
        variables.pop(name, None)
    variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["JAX_PLATFORMS"] = (
        "cpu"  # or JAX would want the GPU that it is told of, or the main process' TPU
    )
    if (
        "jax" in sys.modules
    ):  # set at run time, it would not travel, and workers would make float32 of what is float64
        variables["JAX_ENABLE_X64"] = str(int(sys.modules["jax"].config.jax_enable_x64))
    # Sets of str keep one order in all workers, over restarts and from one training to the next.
    if variables.get("PYTHONHASHSEED", "random") == "random":
        variables["PYTHONHASHSEED"] = "0"
    variables.pop("PYTHONSTARTUP", None)
    return variables


def start(
    program: Program,
    around: Surroundings,
    settings: Mapping[str, Any],
    descriptors: Sequence[int],
    is_apart: bool = True,
) -> subprocess.Popen[bytes]:
    """Have `main` of a module of ours run with settings, by this interpreter with its own -X, -W, -O and the like.

    Args:
        program: the module, and settings of its own.
        around: what it finds around it; `path` and `argv` are among the settings, too.
        settings: plain values, and lists and dicts of them, by name.
        descriptors: what it inherits.
        is_apart: Ctrl-C and Ctrl-Z of the terminal are not for it.
    """
    directory, modules = around.directory, around.modules.descriptor
    descriptors = [*descriptors, modules]
    told = {
        "path": around.path,
        "argv": around.argv,
        "modules": modules,
        "descriptors": descriptors,
    }
    content = marshal.dumps({**program.settings, **told, **settings})
    file = machine.create_memory_file("start")
    try:
        os.ftruncate(file, len(content))
        with mmap.mmap(
            file, len(content)
        ) as view:  # the fallback of a memory file takes no write()
            view[:] = content
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = (
            [] if is_frozen() else [*flags, "-c", _BOOT]
        )  # of which a frozen program understands nothing
        return subprocess.Popen(
            [sys.executable, *command, program.label],
            pass_fds=[file, *descriptors],
            stdin=subprocess.DEVNULL,
            stdout=_inherited(sys.__stdout__, 1),
            stderr=_inherited(sys.__stderr__, 2),
            start_new_session=is_apart,
            cwd=directory if directory is not None and os.path.isdir(directory) else None,
            env={**around.environment, _MARK: f"{program.module} {file} {len(content)}"},
        )
    except OSError as error:
        if error.filename == sys.executable:
            text = f"sys.executable is {sys.executable}, which cannot be run ({error.strerror}). {_CURE}"
            raise PoolBrokenError(text) from error
        raise
    finally:
        os.close(file)


# ---- programs that are not Python

_CURE = (
    "Before you create the loader, set sys.executable to the path of a Python interpreter that has the same packages, "
    "or use workers=0."
)


_ANSWERS_S = 60.0  # an interpreter may have to come over a slow network


def is_frozen() -> bool:
    """Return whether `sys.executable` is a program that brings Python along, as PyInstaller and cx_Freeze make them."""
    return bool(getattr(sys, "frozen", False))


def check_executable() -> None:
    """Raise where no process can be started, or where this one was started as one and has become the program again."""
    if _MARK in os.environ:
        raise PoolBrokenError(
            f"loaderpool started {sys.executable} as one of its processes, but that runs this program again. A loader "
            f"in it would start the program without end. {_CURE}"
        )
    if not sys.executable:
        raise PoolBrokenError(f"sys.executable is empty. {_CURE}")


def check_spawning(executable: str) -> None:
    """Raise where processes that `multiprocess` starts would run this program again.

    Blocks: for the time of a start, where the name does not show that it is Python.
    """
    if is_frozen():
        cure = (
            'Remove start="spawn", or use workers=0.'
            if abilities.can_fork_workers()
            else "Use workers=0."
        )
        raise PoolBrokenError(f"A frozen program cannot spawn workers. {cure}")
    if "python" in os.path.basename(executable).lower():
        return
    command, answer = [executable, "-c", "print(6 * 7)"], b""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            command,
            env={**os.environ, _MARK: "no"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWERS_S,
        )
        answer = asked.stdout.strip()
    if answer != b"42":
        raise PoolBrokenError(
            f"sys.executable is {executable}, which does not run Python code. {_CURE}"
        )


def not_begun_error(what: str) -> PoolBrokenError:
    """Return what is raised where the first process of a pool has never run any code of ours; `what` became of it."""
    return PoolBrokenError(
        f"The supervisor process {what}. Its own messages are above. sys.executable is {sys.executable}, which must be "
        f"a Python interpreter. {_CURE}"
    )


def become_child() -> None:
    """Be what this process was started as, if its executable has run the user's program instead. Then it never returns.

    Runs in: any process that imports this package and has the mark. In the command's own process that may only be code
    of the site, which runs before the command.
    """
    is_told = len(os.environ[_MARK].split()) == 3  # else it was only to answer `check_spawning`
    is_main = threading.current_thread() is threading.main_thread()
    if sys.argv[:1] == ["-c"] or not is_told or not is_main:
        return
    try:
        exec(_BOOT, {})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped by that."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the program has reaped it, or ignores SIGCHLD
        return True


def kill_group(pid: int) -> None:
    """Kill a child that is apart, and what it has started; safe while it is not reaped: its number is not reused."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Return how a child that is apart has ended: by itself within some seconds, or killed with its group."""
    clock.wait_until(lambda: has_ended(process.pid), grace_s)
    kill_group(process.pid)
    return process.wait()


def _inherited(stream: Any, descriptor: int) -> int | None:
    """What a process of ours has for one of this one's streams: the same, unless this one began without it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if stream is None else None  # another file may have got its number
