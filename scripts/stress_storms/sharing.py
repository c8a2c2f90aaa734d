"""Kill processes that share data by name at random moments. None may hang or get a part of a
value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np

import loaderpool as lp
import loaderpool.transport.payload.named  # imported before forks, so that processes start quickly
from tests.support.processes import wait_until

_PROCESSES = 6
_NAMES = ("loaderpool storm 1", "loaderpool storm 2")
_NUMBERS = 20_000
_TEMPORARY = "@loaderpool/"


@dataclasses.dataclass
class Sharing:
    """Result of a storm."""

    kills: int = 0
    makes: int = 0
    values: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)


def run_sharing(kills: int, seed: int, deadline_s: float, folder: Path) -> Sharing:
    """Kill processes that share data `kills` times. Then check that no address is left."""
    draw, found = random.Random(f"{seed}/sharing"), Sharing()
    before = names_bound()
    (folder / "log").touch()
    # pipe of heartbeats and time of the latest one, by pid
    running: dict[int, tuple[int, float]] = {}
    try:
        while found.kills < kills and not found.mismatches:
            while len(running) < _PROCESSES:
                pid, pipe = _start(folder, draw.random())
                running[pid] = pipe, time.monotonic()
            # Kill one or several. If all are killed, the next process must make the data again.
            time.sleep(draw.random() ** 2 * 0.2)
            dying = draw.sample(sorted(running), draw.choice([1, 1, 1, 2, 3, _PROCESSES]))
            for pid in dying:
                os.kill(pid, signal.SIGKILL)
            for pid in dying:
                found.mismatches += _reap(pid, running.pop(pid)[0])
            found.kills += len(dying)
            found.mismatches += _check_heartbeats(running, deadline_s)
        # Check that the remaining processes go on.
        since, left = time.monotonic(), dict(running)
        while left and not found.mismatches:
            found.mismatches += _check_heartbeats(running, deadline_s)
            left = {pid: each for pid, each in left.items() if running[pid][1] <= since}
            time.sleep(0.01)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        for pid, (pipe, _) in running.items():
            _reap(pid, pipe)
    log = (folder / "log").read_text()
    found.makes, found.values = log.count("m"), log.count("v")
    if "2" in log:
        found.mismatches.append(f"{log.count('2')} times, two processes made the data together")
    wait_until(lambda: not names_bound() - before or time.monotonic() - since > deadline_s)
    if left_names := names_bound() - before:
        found.mismatches.append(f"addresses are left: {sorted(left_names)}")
    return found


def names_bound() -> set[str]:
    """Return all abstract addresses of loaderpool that are in use."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return {line[line.index(_TEMPORARY) :] for line in lines if _TEMPORARY in line}


def _check_heartbeats(running: dict[int, tuple[int, float]], deadline_s: float) -> list[str]:
    """Read heartbeats. Return a line for each process that failed or was silent for too long."""
    found = []
    readable, _, _ = select.select([pipe for pipe, _ in running.values()], [], [], 0)
    for pid, (pipe, at) in running.items():
        if pipe in readable:
            running[pid] = pipe, time.monotonic()
            if b"!" in os.read(pipe, 1 << 16):
                found.append(f"process {pid} failed")
        elif time.monotonic() - at > deadline_s:
            os.kill(pid, signal.SIGABRT)  # prints its stack
            found.append(f"process {pid} hangs")
    return found


def _reap(pid: int, pipe: int) -> list[str]:
    os.waitpid(pid, 0)
    with open(pipe, "rb") as file:
        return [f"process {pid} failed"] if b"!" in file.read() else []


def _start(folder: Path, seed: float) -> tuple[int, int]:
    pipe, end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(pipe)
        _share(folder, seed, end)
    os.close(end)
    return pid, pipe


def _fork_now_and_then(draw: random.Random) -> None:
    """Sometimes start a process that keeps this one's sockets open, like a fork by C code."""
    if draw.random() < 0.1:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the directory is closed by now
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    os.set_inheritable(int(number), True)
        subprocess.Popen(["sleep", "0.3"], close_fds=False)


def _share(folder: Path, seed: float, pipe: int) -> NoReturn:
    """Share data, check them and drop them, until this process is killed."""
    draw = random.Random(seed)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)
    try:
        while True:
            name = draw.choice(_NAMES)

            def make(name: str = name) -> list[bytes]:
                with open(folder / f"{name}.lock", "wb") as lock:
                    try:  # forks do not inherit this lock, and the kernel releases it at a death
                        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        os.write(log, b"2")
                    os.write(log, b"m")
                    _fork_now_and_then(draw)
                    time.sleep(draw.random() ** 3 * 0.05)
                    number = draw.randrange(1 << 30)
                    return [np.full(_NUMBERS, number).tobytes(), *[b"%d" % number] * 100]

            values = lp.share(make, name=name)
            numbers = np.frombuffer(values[0], np.int64)
            assert len(values) == 101 and (numbers == int(values[100])).all()
            os.write(log, b"v")
            with contextlib.suppress(BlockingIOError):
                os.write(pipe, b".")
            _fork_now_and_then(draw)
            time.sleep(draw.random() ** 3 * 0.05)
            del values, numbers
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os.write(pipe, b"!")
    os._exit(1)
