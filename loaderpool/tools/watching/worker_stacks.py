"""Asks workers what their threads are at.

Each thread of a worker answers a signal by writing its own stack to a memory file of the worker's, also while C code
runs; one after the other, as only one at a time is answered. Nothing else in this room touches a process that is
watched.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import select
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from loaderpool.supervisor.watch import ASKED_FILE, thread_signal
from loaderpool.system import clock, machine

_LINK = f"/memfd:loaderpool-{ASKED_FILE} (deleted)"
# It takes well under a millisecond, once the thread has a CPU.
_LOOK_S = 0.001
_MOST_S = 0.5
_READ_BYTES = 1 << 16
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# What called the user's function, or waits for the next ticket.
_OURS = ("/loaderpool/worker/", "/loaderpool/supervisor/")


class Frame(NamedTuple):
    """A call that has not returned yet."""

    function: str
    file: str
    line: int


class Place(NamedTuple):
    """Where threads of workers are, and what has called it there."""

    pids: tuple[int, ...]  # of the workers, one for each thread
    frames: tuple[Frame, ...]  # the innermost first, as far as loaderpool's own call; empty: that is the innermost


class _AskedWorker:
    """A worker whose threads are asked one after the other.

    Raises:
        OSError: it is none; or it is gone, or may not be asked.
    """

    def __init__(self, pid: int, undo: contextlib.ExitStack) -> None:
        self._pid, self._folder = pid, f"/proc/{pid}/task"
        pidfd = machine.open_pidfd(pid)
        if pidfd is None:
            raise ProcessLookupError
        undo.callback(os.close, pidfd)
        self._end = select.poll()
        self._end.register(pidfd, select.POLLIN)
        # Behind the pidfd: what is found now is of the process that will get the signals, or that one is gone.
        self._file = os.open(_stack_file(pid), os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, self._file)
        self._threads = sorted(map(int, os.listdir(self._folder)), reverse=True)  # the main one, the eldest, is first
        self._asked: int | None = None  # the thread that is to answer now
        self._begins = 0  # of what it writes
        self.stacks: list[str] = []

    def ask_next(self) -> bool:
        """Take in what a thread has written, and ask the next one; False: there is none."""
        if self._asked is not None:
            if self._is_asked(self._asked):
                return True
            if text := os.pread(self._file, _READ_BYTES, self._begins).decode(errors="replace").strip():
                self.stacks.append(text)
            self._asked = None
        while self._threads and not self._end.poll(0):
            thread = self._threads.pop()
            with contextlib.suppress(OSError):  # it has ended
                if self._can_be_asked(thread):
                    self._begins = os.fstat(self._file).st_size
                    _signal_thread(self._pid, thread, thread_signal())
                    self._asked = thread
                    return True
        return False

    def _is_asked(self, thread: int) -> bool:
        """Whether the signal waits for the thread, or the thread is writing: it is blocked then."""
        try:
            return self._has_signal(thread, "SigPnd:", "SigBlk:") and not self._end.poll(0)
        except OSError:  # it has ended
            return False

    def _can_be_asked(self, thread: int) -> bool:
        """Whether the signal is caught, else the worker would end by it; a thread that blocks it would never answer."""
        return self._has_signal(thread, "SigCgt:") and not self._has_signal(thread, "SigPnd:", "SigBlk:")

    def _has_signal(self, thread: int, *names: str) -> bool:
        with open(f"{self._folder}/{thread}/status", encoding="utf-8", errors="replace") as file:
            sets = [int(line.split()[1], 16) for line in file if line.startswith(names)]
        return any(each >> (thread_signal() - 1) & 1 for each in sets)


def ask_stacks(pids: Iterable[int]) -> dict[int, str]:
    """Return what faulthandler writes of the threads of workers, by pid, for those that answer in time.

    Blocks: half a second at most.

    Args:
        pids: of workers of this machine.
    """
    with contextlib.ExitStack() as undo:
        workers: dict[int, _AskedWorker] = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, is none, or is another user's
                workers[pid] = _AskedWorker(pid, undo)
        left, until_s = list(workers.values()), clock.monotonic_s() + _MOST_S
        while (left := [worker for worker in left if worker.ask_next()]) and clock.monotonic_s() < until_s:
            time.sleep(_LOOK_S)
        return {pid: "\n\n".join(worker.stacks) for pid, worker in workers.items() if worker.stacks}


def places(stacks: Mapping[int, str]) -> list[Place]:
    """Return where threads are, those first where most of them are.

    Args:
        stacks: as `ask_stacks` returns them.
    """
    found: dict[tuple[Frame, ...], list[int]] = collections.defaultdict(list)
    for pid, text in sorted(stacks.items()):
        for thread in text.split("\n\n"):
            if frames := [Frame(name, file, int(line)) for file, line, name in _FRAME.findall(thread)]:
                found[_above_ours(frames)].append(pid)
    return sorted((Place(tuple(each), frames) for frames, each in found.items()), key=lambda place: -len(place.pids))


def _above_ours(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    above = []
    for frame in frames:
        if any(each in frame.file for each in _OURS):
            break
        above.append(frame)
    return tuple(above)


def _stack_file(pid: int) -> str:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(path := f"{folder}/{name}") == _LINK:
                return path
    raise FileNotFoundError(f"process {pid} has no such file")


def _signal_thread(pid: int, thread: int, number: int) -> None:
    send = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc has it from 2.30 on
    if send is None or send(pid, thread, number):
        raise OSError(ctypes.get_errno(), "tgkill failed")
