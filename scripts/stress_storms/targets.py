"""Finds supervisors, readers and workers of this process, as anybody could, and signals them and nobody else.

A process is held by a pidfd first, then found below this process in the tree, then signalled through that same pidfd,
so a pid that was reused in between is of no consequence.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.processes import parents

__all__ = ["find_readers", "find_supervisors", "find_workers", "held", "send", "send_through"]

_SUPERVISOR, _READER = b"loaderpool-supervisor", b"loaderpool-reader"


def find_supervisors() -> list[int]:
    """Supervisors that this process has started and that are alive."""
    return _find_children(_SUPERVISOR)


def find_readers() -> list[int]:
    """Readers of this process's streams that are alive."""
    return _find_children(_READER)


def _find_children(mark: bytes) -> list[int]:
    return [pid for pid, parent in parents().items() if parent == os.getpid() and _is_marked(pid, mark)]


def find_workers(supervisor: int) -> list[int]:
    """Workers of a supervisor that are alive."""
    return [pid for pid, parent in parents().items() if parent == supervisor and _state(pid)[0] not in "ZX"]


def send(pid: int, parent: int, number: int) -> bool:
    """Signal a process of ours; whether it was there."""
    with held(pid, parent) as pidfd:
        return pidfd is not None and send_through(pidfd, number)


@contextlib.contextmanager
def held(pid: int, parent: int) -> Iterator[int | None]:
    """A pidfd of the process, if it is a supervisor or reader of ours, or a supervisor's worker; else None."""
    assert pid > 1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield pidfd if _is_ours(pid, parent) else None
    finally:
        os.close(pidfd)


def _is_ours(pid: int, parent: int) -> bool:
    me = os.getpid()
    if _parent(pid) != parent:
        return False
    if parent == me:
        return _is_marked(pid, _SUPERVISOR) or _is_marked(pid, _READER)
    return _parent(parent) == me and _is_marked(parent, _SUPERVISOR)


def send_through(pidfd: int, number: int) -> bool:
    """Signal the process unless it is dead already."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if poll.poll(0):
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def _is_marked(pid: int, mark: bytes) -> bool:
    return mark in _read(f"/proc/{pid}/cmdline", lambda data: data.split(b"\0"), [])


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/stat", lambda data: data.decode(errors="replace").rpartition(")")[2].split(), ["X", "0"])


def _read(path: str, parse: Callable[[bytes], list], missing: list) -> list:  # type: ignore[type-arg]
    try:
        return parse(Path(path).read_bytes()) or missing
    except OSError:
        return missing
