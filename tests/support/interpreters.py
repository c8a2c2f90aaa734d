"""Interpreters that run lines of code and return their output, for tests with several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_REPOSITORY = str(Path(__file__).resolve().parents[2])
_TIMEOUT_S = 60


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
