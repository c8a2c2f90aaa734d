"""Runs code in a fresh interpreter with a deadline, and leaves nothing of it behind.

The child and all its descendants have a mark in their environment, so orphans and processes in
other sessions are found, too. At the deadline, each of them prints the Python stacks of all its
threads (SIGABRT with PYTHONFAULTHANDLER, which also works in C code and if another thread has the
GIL). Then all are killed, and the failure shows their output. Output goes to files, not to pipes,
because a process that is left behind could hold a pipe open, and reading would wait for it.

If a script imports TensorFlow, the import takes longer than all the rest. `imported="tensorflow"`
runs the script in a fork of a process that has imported it and done nothing else.
(tests/support/fork_server.py has the differences.) It is not for a script about the import or
anything before it, about the start or end of the interpreter, about inherited signals, or about
code without a file.
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
# A supervisor ends its workers within a second of the main process's death. This is longer, because
# the machine may be busy.
GRACE_S = 5.0
_DUMP_S = 0.5  # time to print the stacks; faulthandler needs some ms


class ChildHungError(AssertionError):
    """The child ran past its deadline. The message has its output, and the stacks of all threads of
    its processes.
    """


class ChildLeftProcessesError(AssertionError):
    """The child ended, and one of its processes did not. The message names these processes."""


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """Result of a child."""

    returncode: int
    """Exit status; negative: minus the number of the signal that ended it."""
    stdout: str
    """Output of the child and its own children."""
    stderr: str
    """Their output on stderr."""
    elapsed_s: float
    """Time from its start to its exit."""
    tree_gone_s: float
    """Time from its exit to the end of its last process."""

    def check(self) -> ChildResult:
        """Return this result if the exit status is 0. Otherwise raise an AssertionError that shows
        the output.
        """
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
    """Run code in an interpreter of its own, until it and all its processes have ended.

    Blocks: until the child and its processes have ended, at most `timeout_s` plus some seconds.

    Args:
        code: a script, with any indentation; or a function without arguments, whose source is sent and
            called, so that it sees nothing of its module.
        timeout_s: limit of the time from start to exit.
        stdin_code: True to read the script from standard input, so that no file has the source of
            `__main__`, as in a notebook.
        env: changes to this process's environment; None removes a variable.
        cwd: working directory. Default: an empty one.
        imported: a module whose import is slow. The script runs in a fork of a process that has
            imported it.

    Raises:
        ChildHungError: it ran past `timeout_s`.
        ChildLeftProcessesError: one of its processes was left `GRACE_S` after its exit.
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
                    start_new_session=True,  # so that signals for it do not reach the tests
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
    """Run `loaderpool ARGUMENTS` in a folder whose modules can be imported.

    Args:
        arguments: arguments of the command line.
        cwd: the folder.
        before: a script that the interpreter runs first; it can use `os` and `sys`.
        options: arguments of `run_child`.
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
    environment["PYTHONUNBUFFERED"] = "1"  # so that output before a hang or a kill is visible
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    environment[forks.MARK] = mark
    return environment


def _forbid_core_files(pid: int) -> None:
    """Set a limit so that SIGABRT and intended segmentation faults do not fill the disk. All
    descendants inherit it.
    """
    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        pass


def _tree(pid: int, mark: str) -> list[int]:
    """Return the child and its descendants, in the order of their starts."""
    return sorted({*marked(forks.MARK, mark), *([pid] if is_alive(pid) else [])})


def _dump_stacks(pid: int, mark: str) -> None:
    # All at once, before one of them can react to another's death.
    pids = _tree(pid, mark)
    for each in pids:
        try:
            os.kill(each, signal.SIGABRT)
            os.kill(each, signal.SIGCONT)  # otherwise a stopped process would get the signal later
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
    """Kill until no process is left, because a supervisor may replace a worker meanwhile."""
    while pids := _tree(process.pid, mark):
        end_all(pids)
        wait_gone(pids, 1.0)
    process.wait()


def _show(stdout: str, stderr: str) -> str:
    return f"---- its stdout ----\n{stdout}\n---- its stderr ----\n{stderr}"
