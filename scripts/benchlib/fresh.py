"""A run in a process of its own: started, waited for up to a limit, ended with all it has started, its result read.

What is run prints one line with `print_result`. All processes that descend from it carry a mark in their environment,
by which those that outlive it are found and ended: only they, never by name.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["RunError", "print_result", "run_fresh"]

_SCRIPTS = Path(__file__).resolve().parents[1]
_RESULT_MARK = "RESULT "
_ENVIRONMENT_MARK = "LOADERPOOL_BENCH_RUN"
# From a run's end to that of what it has started; some peers take a moment to end their servers.
_GRACE_S = 2.0


class RunError(RuntimeError):
    """A run gave no result; the text says why, with the end of its stderr."""


def print_result(result: Mapping[str, Any]) -> None:
    """Hand the result to `run_fresh`, which has started this process."""
    print("\n" + _RESULT_MARK + json.dumps(result), flush=True)


def run_fresh(
    command: Sequence[str], timeout_s: float, name: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The result that the command has printed.

    Args:
        command: starts the process.
        timeout_s: past them it is ended.
        name: what to call it in errors.
        environment: variables beside those of every run.

    Raises:
        RunError: it gave no result, or was still running.
    """
    mark = uuid.uuid4().hex
    # Files, not pipes: a server that a peer leaves behind would hold a pipe open, and so hold us.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(
            command, cwd=_SCRIPTS,  # `python -m` finds modules in the current directory before all others
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            env={**_child_environment(), **(environment or {}), _ENVIRONMENT_MARK: mark},
        ) as process:  # fmt: skip
            try:
                process.wait(timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet, so the group is its own
                _end_marked(mark, 0.0)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise RunError(f"{name} was still running after {timeout_s:g} s\n{_tail(err)}") from None
        _end_marked(mark, _GRACE_S)
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith(_RESULT_MARK)]
        if process.returncode or len(lines) != 1:
            raise RunError(f"{name} ended with {process.returncode}\n{_tail(err)}")
    result: dict[str, Any] = json.loads(lines[0][len(_RESULT_MARK) :])
    return result


def _tail(file: IO[str]) -> str:
    file.seek(0)
    return file.read()[-4000:]


def _child_environment() -> dict[str, str]:
    """The environment of every run: these packages and loaderpool, compiled as by an installer, a quiet TensorFlow.

    The loaderpool is the one on PYTHONPATH, else the one that is installed, else that of this checkout. Where
    PYTHONDONTWRITEBYTECODE is set, as in many containers, each run would compile its modules anew, but not those of the
    packages that pip has compiled.
    """
    elsewhere = [folder for folder in sys.path if folder and Path(folder).resolve() != _SCRIPTS.parent]
    checkout = "" if importlib.machinery.PathFinder.find_spec("loaderpool", elsewhere) else str(_SCRIPTS.parent)
    given = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = os.pathsep.join(filter(None, [*given, str(_SCRIPTS), checkout]))
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _end_marked(mark: str, grace_s: float) -> None:
    """Wait for the processes of a run to end by themselves, then end those that have not."""
    deadline = time.monotonic() + grace_s
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    needle = f"{_ENVIRONMENT_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
