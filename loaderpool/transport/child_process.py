"""Start processes without a fork: clean interpreters that read their settings from a file.

If `sys.executable` is a frozen or embedding program, a start runs that program instead of the
command. So each start sets a mark in the child's environment, and the command removes it. If an
import of this package finds the mark, the process runs the program that it was started for
(`become_child`). If a loader finds the mark, it raises, because the program would start itself
without end.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from loaderpool.errors import PoolBrokenError
from loaderpool.system import abilities, capacity, clock, machine
from loaderpool.transport.modules import ModuleStore

# Variables that set the number of threads of a library. They are set to one, because there is
# already a process for each core, and a fork needs a parent with one thread.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)

# - sys.path is set before any import, so the process finds the same modules as the main process.
#   `-c` has put the working directory in front, and nothing may be imported from there, not even
#   mmap.
# - The settings are in a file, because the script's arguments (6,000 file names) can be longer
#   than one argument of a command. The file is the standard input, which the child of any system
#   inherits. Its position is at its end, so that the user's code reads nothing from it.
# - They are marshalled: both ends are the same interpreter, and marshal is built in. The import of
#   json would take each end 1.5 ms.
# - Descriptors had to be inheritable for the exec. Processes that the user's code starts need none.
# - Garbage collection is off while the package is imported, and its objects are frozen afterwards.
#   Each of these saves 5 ms.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import importlib, marshal, mmap, os; "
    "module, size = os.environ.pop('LOADERPOOL_START').split(); "
    "start = marshal.loads(mmap.mmap(0, int(size))[:]); "
    "sys.path[:] = start['path']; sys.argv[:] = start['argv']; "
    "[os.set_inheritable(each, False) for each in start['descriptors']]; "
    "import gc; gc.disable(); main = importlib.import_module(module).main; "
    "gc.freeze(); gc.enable(); main(start)"
)
# Environment variable with the module to run, and the size of the settings.
_MARK = "LOADERPOOL_START"


class Program(NamedTuple):
    """The program of a process that is started as a clean interpreter."""

    module: str  # module whose `main(start)` is called; `start` has the settings by name
    label: str = "loaderpool-supervisor"  # last argument of the command, shown in process lists
    settings: Mapping[str, Any] = {}  # settings of all its starts, as plain values


class Surroundings(NamedTuple):
    """Working directory, environment and modules of this process when the pool was made.

    All processes of the pool get these, whenever they start. Otherwise batches would depend on when
    a process was started.
    """

    directory: str | None  # working directory; None: deleted, so a child inherits the current one
    environment: Mapping[str, str]
    path: list[str]
    argv: list[str]
    modules: ModuleStore

    @classmethod
    def of_now(cls, modules: ModuleStore) -> Surroundings:
        """Return the present surroundings of this process, with the pool's store of modules."""
        directory = None
        with contextlib.suppress(FileNotFoundError):
            directory = os.getcwd()
        # Imports skip entries that are not str, and read "" as the working directory.
        path = [str(entry) or directory for entry in sys.path if isinstance(entry, str)]
        argv = [str(argument) for argument in getattr(sys, "argv", ())]
        return cls(
            directory, _environment(), [entry for entry in path if entry is not None], argv, modules
        )


def _environment() -> dict[str, str]:
    """Return the environment of the processes that run the user's code."""
    variables = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    # With one thread, OpenMP would bind all workers to the same CPU.
    for name in capacity.OPENMP_BINDING:
        variables.pop(name, None)
    variables["CUDA_VISIBLE_DEVICES"] = ""
    # Otherwise JAX would try to use the configured GPU, or the main process's TPU.
    variables["JAX_PLATFORMS"] = "cpu"
    # The environment lacks a setting that was made at run time. Without it, workers would turn
    # float64 into float32.
    if "jax" in sys.modules:
        variables["JAX_ENABLE_X64"] = str(int(sys.modules["jax"].config.jax_enable_x64))
    # Sets of str have the same order in all workers, after restarts, and in each training.
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
    """Start a process that calls `main` of the program's module with the settings.

    It runs this interpreter with the same options (-X, -W, -O and the like).

    Args:
        program: The module, and its settings.
        around: Working directory, environment and modules. `path` and `argv` are added to the
            settings.
        settings: Plain values, and lists and dicts of them, by name.
        descriptors: Descriptors that the process inherits.
        is_apart: Start a new session, so that Ctrl-C and Ctrl-Z of the terminal do not reach it.

    Raises:
        PoolBrokenError: `sys.executable` cannot be run.
        OSError: The process cannot be started for another reason.
    """
    directory, modules = around.directory, around.modules.descriptor
    descriptors = [each for each in (*descriptors, modules) if each >= 0]
    told = {
        "path": around.path,
        "argv": around.argv,
        "modules": modules,
        "descriptors": [] if sys.platform == "win32" else descriptors,
    }
    content = marshal.dumps({**program.settings, **told, **settings})
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # A frozen program does not know these options.
    command = [] if is_frozen() else [*flags, "-c", _BOOT]
    try:
        with _settings_file() as file:
            file.write(content)
            file.flush()
            return subprocess.Popen(
                [sys.executable, *command, program.label],
                stdin=file,
                stdout=_inherited(sys.__stdout__, 1),
                stderr=_inherited(sys.__stderr__, 2),
                start_new_session=is_apart,
                cwd=directory if directory is not None and os.path.isdir(directory) else None,
                env={**around.environment, _MARK: f"{program.module} {len(content)}"},
                **_inheriting(descriptors),
            )
    except OSError as error:
        if error.filename == sys.executable:
            text = (
                f"sys.executable is {sys.executable}, which cannot be run ({error.strerror}). "
                f"{_CURE}"
            )
            raise PoolBrokenError(text) from error
        raise


def _settings_file() -> IO[bytes]:
    """Return a new file without a name, for writing and reading."""
    if abilities.has_memory_files():
        return open(machine.create_memory_file("start"), "w+b")
    # Imported here, because few systems need it.
    import tempfile

    return tempfile.TemporaryFile()


def _inheriting(descriptors: Sequence[int]) -> dict[str, Any]:
    """Return arguments of `Popen` for a child that inherits descriptors, or handles on Windows."""
    if sys.platform == "win32":
        for handle in descriptors:
            os.set_handle_inheritable(handle, True)
        attributes = {"handle_list": [*descriptors]}
        return {"startupinfo": subprocess.STARTUPINFO(lpAttributeList=attributes)}
    return {"pass_fds": descriptors}


# ---- programs that are not Python

_CURE = (
    "Before you create the loader, set sys.executable to the path of a Python interpreter that has "
    "the same packages, or use workers=0."
)


_ANSWERS_S = 60.0  # time for an interpreter to start and answer, also over a slow network


def is_frozen() -> bool:
    """Return True if `sys.executable` is a frozen program, as made by PyInstaller or cx_Freeze."""
    return bool(getattr(sys, "frozen", False))


def check_executable() -> None:
    """Raise `PoolBrokenError` if `sys.executable` cannot start the processes of a pool.

    It cannot if it is empty, or if this process was itself started as one of them but has run the
    user's program again.
    """
    if _MARK in os.environ:
        raise PoolBrokenError(
            f"loaderpool started {sys.executable} as one of its processes, but that runs this "
            f"program again. A loader in it would start the program without end. {_CURE}"
        )
    if not sys.executable:
        raise PoolBrokenError(f"sys.executable is empty. {_CURE}")


def check_spawning(executable: str) -> None:
    """Raise `PoolBrokenError` if spawned workers would run this program again.

    Blocks: Until an interpreter has started, if the name of the executable does not contain
    "python".
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
    """Return the error for a first supervisor that has never run any code of this package.

    Args:
        what: Verb phrase for the message, such as "ended before it began".
    """
    return PoolBrokenError(
        f"The supervisor process {what}. Its own messages are above. sys.executable is "
        f"{sys.executable}, which must be a Python interpreter. {_CURE}"
    )


def become_child() -> None:
    """Run the program that `start` was called for, if this process runs the user's program instead.

    Never returns in that case. Called by the import of this package, in any process that has the
    mark. If the process runs the command as it should, this import is part of Python's site code,
    which runs before the command. The function then returns at once.
    """
    is_told = len(os.environ[_MARK].split()) == 2  # otherwise the mark is of `check_spawning`
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
    """Return True if a child has ended. Does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the user's program has reaped it, or ignores SIGCHLD
        return True


def kill_group(pid: int) -> None:
    """Kill a child in its own session, and the processes that it has started.

    The caller must not have reaped the child. Until then its pid is not reused.
    """
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait until a child in its own session has ended, kill its group, and return its exit status.

    The child is killed if it has not ended after `grace_s` seconds.
    """
    clock.wait_until(lambda: has_ended(process.pid), grace_s)
    kill_group(process.pid)
    return process.wait()


def _inherited(stream: IO[str] | None, descriptor: int) -> int | None:
    """Return the `subprocess` argument for a standard stream: inherit it, or DEVNULL if absent.

    Args:
        stream: Python's stream of this process; None if the process was started without it.
        descriptor: Descriptor of the stream.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    # Without a stream, the descriptor may belong to another file by now.
    return subprocess.DEVNULL if stream is None else None
