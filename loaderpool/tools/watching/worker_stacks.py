"""Asks workers what their threads are at, as their supervisor asks one that hangs (`supervisor.watch`).

A worker answers SIGUSR1 by writing the stacks of its threads to a memory file of its own, also while C code runs.
Nothing else in this room touches a process that is watched.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from loaderpool.system import clock, machine

_LINK = "/memfd:loaderpool-stacks (deleted)"
_LOOK_S = 0.01
# It takes well under a millisecond, once the worker has a CPU.
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


class _StackFile(NamedTuple):
    descriptor: int
    begins: int


def ask_stacks(pids: Iterable[int]) -> dict[int, str]:
    """Return what faulthandler writes of the threads of workers, by pid, for those that answer in time.

    Blocks: half a second at most.

    Args:
        pids: of workers of this machine.
    """
    with contextlib.ExitStack() as stack:
        asked = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if (file := _ask(pid)) is not None:
                    stack.callback(os.close, file.descriptor)
                    asked[pid] = file
        until_s = clock.monotonic_s() + _MOST_S
        texts, before = dict.fromkeys(asked, ""), None
        while (texts != before or not all(texts.values())) and clock.monotonic_s() < until_s:
            time.sleep(_LOOK_S)
            before, texts = texts, {pid: _answer(file) for pid, file in asked.items()}
        return {pid: text for pid, text in texts.items() if text}


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


def _ask(pid: int) -> _StackFile | None:
    """Ask a worker; None: it is none, or does not answer yet.

    Raises:
        OSError: it is gone, or may not be asked.
    """
    pidfd = machine.open_pidfd(pid)
    if pidfd is None:
        return None
    try:
        # Behind the pidfd: what is found now is of the process that will get the signal, or that one is gone.
        path = _stack_file(pid)
        if path is None or not _answers(pid):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            asked = _StackFile(descriptor, os.fstat(descriptor).st_size)
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        except BaseException:
            os.close(descriptor)
            raise
        return asked
    finally:
        os.close(pidfd)


def _stack_file(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(path := f"{folder}/{name}") == _LINK:
                return path
    return None


def _answers(pid: int) -> bool:
    """Whether it catches the signal, as far as the kernel says so: else it would end by it."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)


def _answer(asked: _StackFile) -> str:
    return os.pread(asked.descriptor, _READ_BYTES, asked.begins).decode(errors="replace")
