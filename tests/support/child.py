"""Runs code in a fresh interpreter with a deadline, and leaves nothing of it behind.

The child and everything it starts carry a mark in their environment, so that orphans and processes in sessions of
their own are found too. On the deadline each of them is made to print the Python stacks of all its threads (SIGABRT
under PYTHONFAULTHANDLER, which works in C code and with the GIL held elsewhere), then all are ended, and the failure
shows what they printed. Output goes to files, not pipes: a process left behind that holds a pipe's end would make the
wait for end of file hang.

Where a script imports TensorFlow, the import costs more than all the rest. `imported="tensorflow"` runs it in a fork of
a process that has imported it and has done nothing else (tests/support/fork_server.py says what differs then). Not
for a script that is about the import or what comes before it, the start or the end of the interpreter, the signals that
it inherits, or code without a file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.processes import POLL_S, describe, end_all, is_alive, marked, wait_gone

_REPOSITORY = Path(__file__).resolve().parents[2]
# A supervisor ends its workers within a second of the trainer's death; larger, because the machine may be busy.
GRACE_S = 5.0
_DUMP_S = 0.5  # time to print the stacks; faulthandler needs some ms


class ChildHungError(AssertionError):
    """The child ran past its deadline; the message has its output and the stacks of all its processes' threads."""


class ChildLeftProcessesError(AssertionError):
    """The child ended, and a process that it had started lived on; the message names them."""


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """How a child ended."""

    returncode: int
    """Exit status; minus the signal's number where a signal ended it."""
    stdout: str
    """All it printed, and what its own children printed."""
    stderr: str
    """The same for the error stream."""
    elapsed_s: float
    """From start to exit."""
    tree_gone_s: float
    """From its exit until the last process that it had started was gone."""

    def check(self) -> ChildResult:
        """This result, if the child ended with status 0; else an AssertionError that shows its output."""
        if self.returncode != 0:
            raise AssertionError(
                f"the child ended with status {self.returncode}\n{_show(self.stdout, self.stderr)}"
            )
        return self


def run_child(
    code: str | Callable[[], object],
    *,
    timeout_s: float = 60.0,
    stdin_code: bool = False,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    imported: str | None = None,
) -> ChildResult:
    """The code has run to its end in an interpreter of its own, and every process that it started is gone.

    Blocks: until the child has ended and its processes are gone, at most `timeout_s` plus some seconds.

    Args:
        code: a script, indented as you like; or a function without arguments, whose source is sent and called, so
            that it sees nothing of the module around it.
        timeout_s: from start to exit.
        stdin_code: read the script from standard input, so that no file has the source of `__main__`, as in a notebook.
        env: changes to this process's environment; None takes a variable away.
        cwd: working directory; an empty one of its own by default.
        imported: a module that is slow to import; the script runs in a fork of a process that has imported it.

    Raises:
        ChildHungError: it ran past `timeout_s`.
        ChildLeftProcessesError: a process that it started lived on for `GRACE_S` after it.
    """
    if imported is not None and importlib.util.find_spec(imported) is None:
        pytest.skip(f"{imported} is not installed")
    script = _script(code)
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="loaderpool-child-") as scratch_name:
        scratch = Path(scratch_name)
        (scratch / "empty").mkdir()
        path = scratch / "script.py"
        path.write_text(script)
        with (
            open(scratch / "stdout", "wb") as stdout,
            open(scratch / "stderr", "wb") as stderr,
            open(path if stdin_code else os.devnull, "rb") as stdin,
        ):
            environment = _environment(env, mark)
            folder = scratch / "empty" if cwd is None else Path(cwd)
            process: Any
            if imported is not None:
                assert not stdin_code, "such a script needs an interpreter of its own"
                process = forks.start(
                    imported, path, [stdin, stdout, stderr], environment, folder, mark
                )
            else:
                process = subprocess.Popen(
                    [sys.executable, "-" if stdin_code else str(path)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    cwd=folder,
                    start_new_session=True,  # so that no signal meant for it reaches the tests
                )
        started_s = time.monotonic()
        trouble: AssertionError | None = None
        try:
            _forbid_core_files(process.pid)
            process.wait(timeout_s)
            elapsed_s = time.monotonic() - started_s
            if left := [describe(pid) for pid in _wait_tree_gone(mark)]:
                status = process.returncode
                told = f"{GRACE_S:g} s after the child's exit (status {status}) there still ran"
                trouble = ChildLeftProcessesError("\n".join([told, *left]))
            tree_gone_s = time.monotonic() - started_s - elapsed_s
        except subprocess.TimeoutExpired:
            told = f"the child still ran after timeout_s={timeout_s:g}; its processes were"
            trouble = ChildHungError("\n".join([told, *map(describe, _tree(process.pid, mark))]))
            _dump_stacks(process.pid, mark)
        finally:
            _end_tree(process, mark)
        shown_out = (scratch / "stdout").read_text(errors="replace")
        shown_err = (scratch / "stderr").read_text(errors="replace")
    if trouble is not None:
        raise type(trouble)(f"{trouble}\n{_show(shown_out, shown_err)}")
    return ChildResult(process.returncode, shown_out, shown_err, elapsed_s, tree_gone_s)


def run_command(
    *arguments: str, cwd: str | os.PathLike[str], before: str = "", **options: Any
) -> ChildResult:
    """`loaderpool ARGUMENTS` has run in a folder, of which modules can be imported.

    Args:
        arguments: of the command line.
        cwd: the folder.
        before: a script that the interpreter runs first; `os` and `sys` are there.
        options: of `run_child`.
    """
    return run_child(
        f"import os, sys\nsys.path.pop(0)\n{before}\n"
        f"from loaderpool.tools.cli import main\nsys.exit(main({list(arguments)!r}))\n",
        cwd=cwd,
        **options,
    )


def _script(code: str | Callable[[], object]) -> str:
    if isinstance(code, str):
        return textwrap.dedent(code)
    if code.__name__ == "<lambda>":
        raise TypeError("run_child takes a script or a named function, not a lambda")
    return f"{textwrap.dedent(inspect.getsource(code))}\n\n{code.__name__}()\n"


def _environment(changes: Mapping[str, str | None] | None, mark: str) -> dict[str, str]:
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_REPOSITORY), *([inherited] if inherited else [])]
    )
    environment["PYTHONFAULTHANDLER"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"  # what was printed before a hang or a kill shall be seen
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    environment[forks.MARK] = mark
    return environment


def _forbid_core_files(pid: int) -> None:
    """SIGABRT and tests that segfault on purpose must not fill the disk; inherited by all that it starts."""
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        pass


def _tree(pid: int, mark: str) -> list[int]:
    """The child and all it started, those first that started first."""
    return sorted({*marked(forks.MARK, mark), *([pid] if is_alive(pid) else [])})


def _dump_stacks(pid: int, mark: str) -> None:
    # All at once, before one can react to another's death.
    pids = _tree(pid, mark)
    for each in pids:
        try:
            os.kill(each, signal.SIGABRT)
            os.kill(each, signal.SIGCONT)  # a stopped one would keep the signal for later
        except ProcessLookupError:
            pass
    wait_gone([each for each in pids if each != pid], _DUMP_S)
    wait_gone([pid], _DUMP_S)


def _wait_tree_gone(mark: str) -> list[int]:
    deadline_s = time.monotonic() + GRACE_S
    while (left := marked(forks.MARK, mark)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


def _end_tree(process: Any, mark: str) -> None:
    """Kill until there is nothing left to kill: a supervisor may have replaced a worker meanwhile."""
    while pids := _tree(process.pid, mark):
        end_all(pids)
        wait_gone(pids, 1.0)
    process.wait()


def _show(stdout: str, stderr: str) -> str:
    return f"---- its stdout ----\n{stdout}\n---- its stderr ----\n{stderr}"
