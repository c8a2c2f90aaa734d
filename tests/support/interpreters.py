"""Interpreters that run lines of code and return their output, for tests with several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_REPOSITORY = str(Path(__file__).resolve().parents[2])
_TIMEOUT_S = 60
# End of a script: it prints its pid, and then the value of each line of its standard input.
_VALUES = """
print(os.getpid(), flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


class Interpreter:
    """Process of a script that prints its pid, and then one line for each line that it reads."""

    def __init__(self, script: Path, *arguments: str, **env: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": _REPOSITORY, **env},
        )
        self.pid = int(self.answer())

    def begin(self, line: str) -> None:
        """Send a line to the script. `answer` returns the output."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Return the next line that the script prints, or "" if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, line: str) -> str:
        """Send a line to the script, and return its output."""
        self.begin(line)
        return self.answer()

    def end(self, number: int = signal.SIGKILL) -> None:
        """Kill the script with a signal, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait(_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


Ranks = Callable[..., list[Interpreter]]


@contextlib.contextmanager
def ranks_of(folder: Path, script: str, count: int) -> Iterator[Ranks]:
    """Yield a function that starts ranks of one job on this machine. All are killed at the end.

    Args:
        folder: Folder of the script. It is the script's first argument, and the rank is its second.
        script: Script that imports `os` and `sys`. Each rank prints the value of each line it gets.
        count: Number of ranks that are started, unless the function is called with another number.
    """
    path, running = folder / "script.py", list[Interpreter]()
    path.write_text(script + _VALUES)

    def start(started: int = count, job: str = "job", local: int = count) -> list[Interpreter]:
        launcher = {"TORCHELASTIC_RUN_ID": f"{job} {folder}", "LOCAL_WORLD_SIZE": str(local)}
        for rank in range(started):
            running.append(Interpreter(path, str(folder), str(rank), **launcher))
        return running[len(running) - started :]

    yield start
    for each in running:
        each.end()
