"""Starts the supervisor: a clean interpreter by exec, with just the descriptors it needs.

Never by fork of the trainer (threads of TensorFlow, locks of theirs) and never by a start method that runs `__main__`
again, so scripts need no guard and notebooks work.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from typing import Any

from loaderpool.errors import PoolBrokenError
from loaderpool.memory.arena import Arena

__all__ = ["SupervisorLink", "launch"]

# sys.path is set before anything is imported, so the supervisor finds what the trainer finds. `-c` has put the working
# directory in front: not even json may come from there.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import json; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from loaderpool.supervisor.engine import main; main(start)"
)
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
class SupervisorLink:
    """The trainer's ends."""

    process: subprocess.Popen[bytes]
    control: int  # write end of the control pipe
    completions: int  # read end of the completion pipe
    socket: socket.socket  # large things arrive here


def launch(arena: Arena, workers: int) -> SupervisorLink:
    """Start a supervisor for `workers` workers on an arena; returns at once.

    Raises:
        PoolBrokenError: no process could be started.
    """
    if not sys.executable:
        raise PoolBrokenError("sys.executable is empty: an embedded Python must set it to a Python interpreter")
    control_read, control_write = os.pipe()
    completions_read, completions_write = os.pipe()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_blocking(completions_read, False)
    os.set_blocking(completions_write, False)
    mine.setblocking(False)
    theirs.setblocking(False)
    inherited = [control_read, completions_write, theirs.fileno(), arena.descriptor]
    start = {
        "path": [os.getcwd() if entry == "" else entry for entry in sys.path],
        "argv": sys.argv,
        "trainer_pid": os.getpid(),
        "control": control_read,
        "completions": completions_write,
        "socket": theirs.fileno(),
        "arena": arena.descriptor,
        "arena_bytes": arena.nbytes,
        "workers": workers,
    }
    try:
        process = subprocess.Popen(
            [sys.executable, *_interpreter_flags(), "-c", _BOOT, json.dumps(start), "loaderpool-supervisor"],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and Ctrl-Z of the terminal are the trainer's alone
            env=_environment(),
        )
    except OSError as error:
        for descriptor in (control_write, completions_read):
            os.close(descriptor)
        mine.close()
        raise PoolBrokenError(f"the supervisor process could not be started: {error}") from error
    finally:
        os.close(control_read)
        os.close(completions_write)
        theirs.close()
    return SupervisorLink(process, control_write, completions_read, mine)


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # Sets of str keep one order in all workers, over restarts and from run to run.
    if environment.get("PYTHONHASHSEED", "random") == "random":
        environment["PYTHONHASHSEED"] = "0"
    environment.pop("PYTHONSTARTUP", None)
    return environment


def _interpreter_flags() -> list[Any]:
    """The trainer's own -X, -W, -O and the like."""
    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]
