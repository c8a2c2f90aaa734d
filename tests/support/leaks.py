"""Finds what a test left behind: processes, Python threads, descriptors, mappings of loaderpool's memory files.

What TensorFlow keeps is no leak: its native threads are not seen (a `_DummyThread` is only a mark that one of them once
ran Python code), and of descriptors only those count that loaderpool is made of: pipes, sockets, memory files, pidfds.
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

# A closed pool's supervisor ends by itself a moment later. Smaller fails tests on a busy machine, larger only makes a
# test that really leaks slower.
GRACE_S = 3.0
_MARK = "LOADERPOOL_TEST_RUN"
_RUN = uuid.uuid4().hex
_OUR_DESCRIPTOR = re.compile(r"(pipe|socket|pidfd):|/memfd:|anon_inode:\[pidfd\]")
_OUR_MAPPING = re.compile(r"\S+ \S+ \S+ \S+ (?P<inode>\d+)\s+(?P<name>/memfd:loaderpool.*)")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What this process held at one moment."""

    processes: frozenset[int]
    """Descendants, zombies too, and orphans that a descendant left."""
    threads: frozenset[threading.Thread]
    """Python's own, not those that a native library started."""
    descriptors: Counter[str]
    """How many point at each pipe, socket, memory file or pidfd, named as the kernel names it, with its inode."""
    mappings: frozenset[str]
    """Memory files named loaderpool* that are mapped, with their inode."""

    def left_since(self, before: Snapshot) -> list[str]:
        """One line for each thing that is here now and was not before."""
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
    """From now on the children of this process carry a mark by which orphans among their children are found."""
    # /proc shows the environment as it was at exec: so a child has the mark and this process does not. Never inherited:
    # a pytest that a test starts must not take its siblings for its own.
    os.environ[_MARK] = _RUN


def take_snapshot() -> Snapshot:
    """What this process holds now."""
    return Snapshot(
        processes=frozenset({*descendants(os.getpid()), *marked(_MARK, _RUN)}),
        threads=frozenset(filter(_is_ours, threading.enumerate())),
        descriptors=Counter(_descriptors()),
        mappings=frozenset(_mappings()),
    )


@contextmanager
def guard(grace_s: float | None = None) -> Iterator[None]:
    """What the block started is gone when it ends, or within `grace_s`; else an AssertionError names what is not.

    Garbage is collected first, for what nobody can reach is no leak. Processes left behind are killed after they were
    named, so that they do not disturb the tests that follow.
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
        # Only now: a collection with TensorFlow loaded takes as long as a small test, and most leave nothing.
        gc.collect()
        tensorflow_runtime.let_go_of_arrays()
        time.sleep(POLL_S)
        now = take_snapshot()
    left = now.left_since(before)
    if left:
        _end_and_reap(now.processes - before.processes)
        raise AssertionError(f"left behind, {grace_s:g} s after the end:\n  " + "\n  ".join(left))


def _is_ours(thread: threading.Thread) -> bool:
    # pytest-timeout has a thread for each test: in a guard around several tests there is another one in the end.
    return not isinstance(thread, threading._DummyThread) and not thread.name.startswith(
        "pytest_timeout"
    )


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if _OUR_DESCRIPTOR.match(target):
                yield f"{target} inode {os.stat(f'/proc/self/fd/{name}').st_ino}"
        except OSError:  # the one that listed the directory, or closed by a thread meanwhile
            continue


def _mappings() -> Iterator[str]:
    # By file, not by address: one mapping becomes several lines when a part of it is remapped or protected.
    with open("/proc/self/maps", "rb") as file:
        for line in file.read().splitlines():  # thousands with TensorFlow
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
