"""Finds leaks of a test: processes, Python threads, descriptors, and mappings of loaderpool's
memory files.

TensorFlow's own resources are no leaks. Its native threads are not seen (a `_DummyThread` only
shows that one of them once ran Python code). Only descriptors of loaderpool's kinds count: pipes,
sockets, memory files, pidfds.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.support import tensorflow_runtime
from tests.support.processes import POLL_S, descendants, describe, end_all, marked

# A closed pool's supervisor ends a moment later. Smaller: tests fail on a busy machine. Larger: a
# test with a leak takes longer.
GRACE_S = 3.0
_MARK = "LOADERPOOL_TEST_RUN"
_RUN = uuid.uuid4().hex
_OUR_DESCRIPTOR = re.compile(r"(pipe|socket|pidfd):|/memfd:|anon_inode:\[pidfd\]")
_OUR_MAPPING = re.compile(r"\S+ \S+ \S+ \S+ (?P<inode>\d+)\s+(?P<name>/memfd:loaderpool.*)")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Resources of this process at one moment."""

    processes: frozenset[int]
    """Descendants, also zombies, and orphans that a descendant left."""
    threads: frozenset[threading.Thread]
    """Python's own threads, not those of native libraries."""
    descriptors: Counter[str]
    """Number of descriptors for each pipe, socket, memory file or pidfd, named as in the kernel,
    with its inode.
    """
    mappings: frozenset[str]
    """Mapped memory files named loaderpool*, with their inodes."""

    def left_since(self, before: Snapshot) -> list[str]:
        """Return one line for each resource that was not there before."""
        return [
            *(describe(pid) for pid in sorted(self.processes - before.processes)),
            *(f"thread {thread.name!r}" for thread in self.threads - before.threads),
            *(
                f"descriptor of {target} ({n} times)"
                for target, n in (self.descriptors - before.descriptors).items()
            ),
            *(f"mapping of {name}" for name in sorted(self.mappings - before.mappings)),
        ]


def mark_children() -> None:
    """Mark the environment of this process's future children, so that orphans among their children
    are found.
    """
    # /proc shows the environment at exec, so a child has the mark and this process does not. A mark
    # is never inherited, because a pytest that a test starts would take its siblings for its own
    # children.
    os.environ[_MARK] = _RUN


def take_snapshot() -> Snapshot:
    """Return the present resources of this process."""
    return Snapshot(
        processes=frozenset({*descendants(os.getpid()), *marked(_MARK, _RUN)}),
        threads=frozenset(filter(_is_ours, threading.enumerate())),
        descriptors=Counter(_descriptors()),
        mappings=frozenset(_mappings()),
    )


@contextmanager
def guard(grace_s: float | None = None) -> Iterator[None]:
    """Context for a test. If resources that it started are left `grace_s` after its end, raise an
    AssertionError that names them.

    Garbage is collected first, because unreachable objects are no leak. Processes that are left
    behind are killed afterwards, so that they do not disturb the next tests.
    """
    grace_s = GRACE_S if grace_s is None else grace_s
    before = take_snapshot()
    yield
    deadline_s = time.monotonic() + grace_s
    now, is_late = take_snapshot(), False
    while now.left_since(before) and not is_late:
        # The time is checked before the collection, so that at least one collection runs. On a busy machine the first
        # snapshot may take longer than `grace_s`, and a caught exception keeps batches until a collection.
        is_late = time.monotonic() >= deadline_s
        # Only now, because a collection with TensorFlow loaded takes as long as a small test, and
        # most tests leave nothing.
        gc.collect()
        tensorflow_runtime.let_go_of_arrays()
        time.sleep(POLL_S)
        now = take_snapshot()
    left = now.left_since(before)
    if left:
        _end_and_reap(now.processes - before.processes)
        raise AssertionError(f"left behind, {grace_s:g} s after the end:\n  " + "\n  ".join(left))


def _is_ours(thread: threading.Thread) -> bool:
    # pytest-timeout has a thread for each test. A guard around several tests sees another one at
    # its end.
    return not isinstance(thread, threading._DummyThread) and not thread.name.startswith(
        "pytest_timeout"
    )


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if _OUR_DESCRIPTOR.match(target):
                yield f"{target} inode {os.stat(f'/proc/self/fd/{name}').st_ino}"
        # the descriptor that listed the directory, or one that a thread has closed meanwhile
        except OSError:
            continue


def _mappings() -> Iterator[str]:
    # By file, not by address, because a mapping becomes several lines if a part of it is remapped
    # or protected.
    with open("/proc/self/maps", "rb") as file:
        for line in file.read().splitlines():  # thousands of lines with TensorFlow
            found = _OUR_MAPPING.match(line.decode()) if b"/memfd:loaderpool" in line else None
            if found:
                yield f"{found['name']} inode {found['inode']}"


def _end_and_reap(pids: Iterable[int]) -> None:
    pids = list(pids)
    end_all(pids)
    for pid in pids:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:  # a grandchild; its own parent or init reaps it
            pass
