"""Records which functions of a package each process calls. `scripts/functions` explains its use.

Python imports a module of this name at its start, in every process with this folder on PYTHONPATH.
A fork of a recorded process is recorded too, in a file of its own.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import CodeType, FrameType

FOLDER = "RECORD_FUNCTIONS_IN"  # folder for the records, and for the file with the phase
PACKAGE = "RECORD_FUNCTIONS_OF"  # folder of the package
SUPERVISOR = "loaderpool-supervisor"  # last argument of the supervisor's command
OFF = 0  # phase in which nothing is recorded
IS_FUNCTION = 1  # `inspect.CO_OPTIMIZED`, whose import would take a while in each process
PHASE_FILE = "phase"


class Recorder:
    """Writes each function once for each phase, at its first call.

    A process of a pool may be killed at any time, so each function is written at once. Workers
    close descriptors that they do not know, so the file is opened for each function.
    """

    def __init__(self, folder: str, package: str, role: str) -> None:
        self._folder, self._package, self._role = folder, os.path.join(package, ""), role
        self._seen: set[tuple[CodeType, int]] = set()
        with open(os.path.join(folder, PHASE_FILE), "r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)

    def start(self) -> None:
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        os.register_at_fork(after_in_child=self._start_fork)

    def _start_fork(self) -> None:
        self._seen.clear()
        if self._role == "supervisor":
            self._role = "worker"

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        code, phase = frame.f_code, self._phase[0]
        if event != "call" or phase == OFF or (code, phase) in self._seen:
            return
        self._seen.add((code, phase))
        # Bodies of modules and classes are no functions, and neither are comprehensions.
        is_function = code.co_flags & IS_FUNCTION
        is_comprehension = code.co_name.startswith("<") and code.co_name != "<lambda>"
        path = code.co_filename
        if not is_function or is_comprehension or not path.startswith(self._package):
            return
        qualified = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        line = f"{phase}\t{path[len(self._package) :]}\t{code.co_firstlineno}\t{qualified}\n"
        name = f"{self._role}-{os.getpid()}"
        file = os.open(os.path.join(self._folder, name), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(file, line.encode())
        os.close(file)


def _start() -> None:
    folder, package = os.environ.get(FOLDER), os.environ.get(PACKAGE)
    if folder and package:
        role = "supervisor" if sys.orig_argv[-1] == SUPERVISOR else "main"
        Recorder(folder, package, role).start()


_start()
