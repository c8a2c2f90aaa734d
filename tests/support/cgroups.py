"""Small cgroups for children of the tests: real limits of memory, or of the number of processes.

Needs the right to make a cgroup below one's own (root in most virtual machines, and rarely in a
container).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
# Files of the limit: by controller, those of cgroup v1 and v2.
_FILES = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}

# Start of a child's script, with the cgroup's directory in `LOADERPOOL_TEST_CGROUP`. The child
# joins the cgroup first.
JOIN = """
import os
with open(os.environ["LOADERPOOL_TEST_CGROUP"] + "/cgroup.procs", "w") as _file:
    _file.write(str(os.getpid()))
"""


@contextlib.contextmanager
def small_cgroup(controller: str, limit: int) -> Iterator[dict[str, str | None]]:
    """Context with a new cgroup with this limit, as `env` for `run_child`. Skips the test if none
    can be made.
    """
    version_1, version_2 = _FILES[controller]
    for parent, file in ((_own(controller), version_1), (_own(""), version_2)):
        if parent is None:
            continue
        directory = parent / f"loaderpool-test-{time.monotonic_ns()}"
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            (directory / file).write_text(str(limit))
        except OSError:
            directory.rmdir()
            continue
        try:
            yield {"LOADERPOOL_TEST_CGROUP": str(directory)}
        finally:
            _remove(directory)
        return
    pytest.skip(f"no {controller} cgroup can be made here")


def _own(controller: str) -> Path | None:
    """Return this process's path in a controller's hierarchy; "" stands for that of version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            found = _ROOT / controllers / path.lstrip("/")
            return found if found.exists() else None
    return None


def _remove(directory: Path) -> None:
    """Remove a cgroup. The kernel notices the end of its processes a moment later."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            return directory.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
