"""What this process and those below it hold, and whether it has grown."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.processes import count_fds, descendants, read_pss

__all__ = ["Growth", "Holdings", "growth", "settled_holdings", "take_holdings"]

_SETTLE_S = 5.0
_AT_REST = 6  # fields: numbers, arena and files; memory never rests
_SHARED_MEMORY = Path("/dev/shm")
# Over 500 passes the trainer's own memory was seen to grow by 0.1 MiB. The whole tree's goes up and down by 4 MiB, for
# a worker that was forked a moment ago has few pages of its own. Smaller slacks cry wolf, larger ones miss small leaks.
_SLACKS = {"arena_bytes": 1 << 20, "trainer_bytes": 2 << 20, "own_bytes": 8 << 20, "file_bytes": 0}


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What this process and those below it hold."""

    processes: int
    threads: int  # of all of them
    descriptors: int  # of all of them
    files: int  # in the folder for temporary files, where caches on disk are, too, and ours in /dev/shm
    arena_bytes: int  # pages of shared memory that are taken
    file_bytes: int  # of the files
    trainer_bytes: int  # this process's heap and anonymous memory
    own_bytes: int  # the same of all of them, shared pages counted once
    # All memory of all of them. Not judged: which pages of the arena happen to be mapped hangs on how old the workers
    # are (their number is above), and the share of a library's pages on who else on the machine has it mapped.
    pss_bytes: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """One kind of holding before and after, and what it may be after."""

    what: str
    before: int
    after: int
    at_most: int | None  # None: it is shown, not judged

    @property
    def is_leak(self) -> bool:
        """Whether it has grown."""
        return self.at_most is not None and self.after > self.at_most


def take_holdings() -> Holdings:
    """What is held now. A process that ends meanwhile is not counted."""
    tree = [os.getpid(), *descendants(os.getpid())]
    threads, descriptors, own, pss = (_sum_over(tree, look) for look in (_threads, count_fds, _own_bytes, read_pss))
    files = _files()
    return Holdings(
        len(tree),
        threads,
        descriptors,
        len(files),
        _arena_bytes(),
        sum(files.values()),
        _own_bytes(os.getpid()),
        own,
        pss,
    )


def growth(before: Holdings, after: Holdings) -> list[Growth]:
    """Each holding, and whether it grew: numbers not at all, memory by no more than its slack."""
    found = []
    for field in dataclasses.fields(Holdings):
        was, is_now = getattr(before, field.name), getattr(after, field.name)
        at_most = None if field.name == "pss_bytes" else was + _SLACKS.get(field.name, 0)
        found.append(Growth(field.name, was, is_now, at_most))
    return found


def settled_holdings() -> Holdings:
    """What is held once nothing moves any more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    deadline = time.monotonic() + _SETTLE_S
    latest = take_holdings()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = take_holdings()
        if (
            dataclasses.astuple(now)[:6] == dataclasses.astuple(latest)[:6]
        ):  # numbers, arena and files; memory never rests
            return now
        latest = now
    return latest


def _sum_over(tree: list[int], look: Callable[[int], int]) -> int:
    total = 0
    for pid in tree:
        try:
            total += look(pid)
        except (OSError, ProcessLookupError):
            continue
    return total


def _own_bytes(pid: int) -> int:
    """Its share of memory that no file is behind: `Pss_Anon`, in which the arena and libraries are not."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory")


def _threads(pid: int) -> int:
    return threading.active_count() if pid == os.getpid() else len(os.listdir(f"/proc/{pid}/task"))


def _files() -> dict[str, int]:
    """Bytes of each file that this process and those below it may have left."""
    found = {}
    for path in (*Path(tempfile.gettempdir()).rglob("*"), *_SHARED_MEMORY.glob("*loaderpool*")):
        with contextlib.suppress(FileNotFoundError):  # deleted in between
            found[str(path)] = path.stat().st_blocks * 512
    return found


def _arena_bytes() -> int:
    """Pages of all arenas of this process, each counted once."""
    found: dict[int, int] = {}
    for file in Path("/proc/self/fd").iterdir():
        try:
            if "loaderpool-arena" in os.readlink(file):
                status = file.stat()
                found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())
