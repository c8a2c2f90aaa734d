"""How a process of ours begins that is not forked: a clean interpreter, told by a memory file what it is to be."""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from loaderpool.system import clock, machine

_MOMENT_S = 0.0005

# sys.path is set before anything is imported, so the process finds what the trainer finds. `-c` has put the working
# directory in front: not even mmap may come from there. The settings come in a memory file: a script's arguments alone
# (6,000 file names) can be more than one argument of a command may be. By marshal, as both ends are this interpreter
# and it is built in: json takes each of them a millisecond and a half to import. Garbage is not collected
# while our modules are imported, nor is what they made looked at later: each would take five milliseconds.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import marshal, mmap, os; file = int(sys.argv[1]); "
    "start = marshal.loads(mmap.mmap(file, int(sys.argv[2]))[:]); os.close(file); sys.path[:] = start['path']; "
    "import gc; gc.disable(); from {module} import main; gc.freeze(); gc.enable(); main(start)"
)


def start(
    module: str,
    settings: Mapping[str, Any],
    descriptors: Sequence[int],
    label: str,
    *,
    directory: str | None,
    environment: Mapping[str, str],
    is_apart: bool = True,
) -> subprocess.Popen[bytes]:
    """Have `main` of a module of ours run with settings, by this interpreter with its own -X, -W, -O and the like.

    Args:
        module: its name.
        settings: plain values, and lists and dicts of them, by name; `path` must be among them.
        descriptors: what it inherits.
        label: for who looks at a list of tasks.
        directory: where it begins; None: where this process is.
        environment: its variables.
        is_apart: Ctrl-C and Ctrl-Z of the terminal are not for it.
    """
    content = marshal.dumps(dict(settings))
    file = machine.create_memory_file("start")
    try:
        os.ftruncate(file, len(content))
        with mmap.mmap(file, len(content)) as view:  # the fallback of a memory file takes no write()
            view[:] = content
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT.format(module=module), str(file), str(len(content)), label],
            pass_fds=[file, *descriptors],
            stdin=subprocess.DEVNULL,
            stdout=_inherited(sys.__stdout__, 1),
            stderr=_inherited(sys.__stderr__, 2),
            start_new_session=is_apart,
            cwd=directory if directory is not None and os.path.isdir(directory) else None,
            env=environment,
        )
    finally:
        os.close(file)


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
    ends_s = clock.monotonic_s() + grace_s
    while clock.monotonic_s() < ends_s and not has_ended(process.pid):
        time.sleep(_MOMENT_S)
    kill_group(process.pid)
    return process.wait()


def _inherited(stream: Any, descriptor: int) -> int | None:
    """What a process of ours has for one of this one's streams: the same, unless this one began without it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if stream is None else None  # another file may have got its number
