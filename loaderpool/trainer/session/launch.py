"""Starts the supervisor: a clean interpreter by exec, with just the descriptors it needs.

Never by fork of the trainer (threads of TensorFlow, locks of theirs) and never by a start method that runs `__main__`
again, so scripts need no guard and notebooks work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from loaderpool.errors import PoolBrokenError
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, machine
from loaderpool.transport import child_process

# One thread each: as many processes as cores run already, and a fork needs a single-threaded parent.
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)


@dataclasses.dataclass(frozen=True)
class Program:
    """What is executed in the supervisor's place.

    It is a process of its own, begun as a clean interpreter, and gets three ways to the trainer, all of them
    descriptors: it reads `control`, writes `completions`, which workers write too, and has `socket` for what is large
    or comes with descriptors. It shares `arena`. On them it speaks the words of transport/messages.py: it obeys
    `Control`, and tells `Notice`. When the trainer is gone, `control` ends, and it must end.
    """

    module: str  # whose `main(start)` is called with the settings of the start, by name
    label: str = "loaderpool-supervisor"  # for who looks at a list of tasks
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its own, beside those of each start: plain
    workers_after: int = 0  # of the supervisor that goes on where it hands over; it never does where this is 0

    def after(self) -> tuple[Program, int]:
        """Return what goes on when it hands over, and with how many workers."""
        return SUPERVISOR, self.workers_after


SUPERVISOR = Program("loaderpool.supervisor.main_loop")
# A thread of the trainer's in its place, for workers that are processes of `multiprocess`: no process, and no fork.
SPAWNED = Program("loaderpool.supervisor.spawned.loop")


@dataclasses.dataclass(frozen=True)
class Launched:
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
) -> Launched:
    """Start a supervisor for `workers` workers on an arena; returns at once.

    Args:
        arena: what it shares with the trainer.
        workers: how many workers it shall have.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.
        first_ticket: its tickets' numbers begin here.
        program: what is executed.

    Raises:
        PoolBrokenError: no process could be started.
    """
    if not sys.executable:
        raise PoolBrokenError("sys.executable is empty: an embedded Python must set it to a Python interpreter")
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
                "path": search_path(),
                "argv": [str(argument) for argument in getattr(sys, "argv", ())],
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
            file, nbytes = child_process.write_settings(start)
            theirs.callback(os.close, file)
            process = subprocess.Popen(
                child_process.command(program.module, file, nbytes, program.label),
                pass_fds=[control_read, completions_write, their_socket.fileno(), arena.descriptor, file],
                stdin=subprocess.DEVNULL,
                stdout=inherited(sys.__stdout__, 1),
                stderr=inherited(sys.__stderr__, 2),
                start_new_session=True,  # Ctrl-C and Ctrl-Z of the terminal are the trainer's alone
                env=environment(),
            )
        except OSError as error:
            advice = capacity.start_advice(error, "this process has no file descriptors left")
            raise PoolBrokenError(f"the supervisor process could not be started: {error}; {advice}") from error
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


def inherited(stream: Any, descriptor: int) -> int | None:
    """What a process of ours has for one of the trainer's streams: the same, unless the trainer began without it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if stream is None else None  # another file may have got its number


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
