"""How a process of ours begins that is not forked: a clean interpreter, told by a memory file what it is to be."""

from __future__ import annotations

import marshal
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from loaderpool.system import machine

# sys.path is set before anything is imported, so the process finds what the trainer finds. `-c` has put the working
# directory in front: not even mmap may come from there. The settings come in a memory file: a script's arguments alone
# (6,000 file names) can be more than one argument of a command may be. By marshal, as both ends are this interpreter
# and it is built in: json takes each of them a millisecond and a half to import.
_BOOT = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import marshal, mmap, os; file = int(sys.argv[1]); "
    "start = marshal.loads(mmap.mmap(file, int(sys.argv[2]))[:]); os.close(file); sys.path[:] = start['path']; "
    "from {module} import main; main(start)"
)


def write_settings(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Put settings into a memory file; returns its descriptor, which is the caller's to close, and its length.

    Args:
        settings: plain values, and lists and dicts of them, by name; `path` must be among them.

    Raises:
        OSError: no memory, or no descriptors.
    """
    content = marshal.dumps(dict(settings))
    file = machine.create_memory_file("start")
    try:
        os.ftruncate(file, len(content))
        with mmap.mmap(file, len(content)) as view:  # the fallback of a memory file takes no write()
            view[:] = content
    except BaseException:
        os.close(file)
        raise
    return file, len(content)


def command(module: str, file: int, nbytes: int, label: str) -> list[str]:
    """The command that has `main` of a module of ours run with settings; `label` is for who looks at a list of tasks.

    With this interpreter's own -X, -W, -O and the like.
    """
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", _BOOT.format(module=module), str(file), str(nbytes), label]
