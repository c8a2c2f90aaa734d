"""Parents, states, memory and descriptors of processes, read from `/proc`. Linux only.

If a process ends during a read, it counts as gone, and no error is raised.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

_PROC = Path("/proc")
# Interval of checks. Larger: tests take longer. Smaller: reading /proc, which takes some ms with
# hundreds of processes, costs too much.
POLL_S = 0.02


def parents() -> dict[int, int]:
    """Return the parent of every process of the machine, also of zombies."""
    found: dict[int, int] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields:
            found[pid] = int(fields[1])
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on, in any session, also zombies,
    without `pid` itself.

    A process whose parent has died is no descendant any more. `marked` finds it.
    """
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found.append(child)
            waiting.append(child)
    return sorted(found)


def marked(name: str, value: str) -> list[int]:
    """Return the processes that were started with `name=value` in their environment, and their
    forks.

    The environment is that at exec. So orphans and processes in other sessions are found, and never
    the process that set the variable for its children. Zombies have no environment.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = _read(pid, "environ")
        except OSError:  # it has ended, or belongs to another user
            continue
        if wanted in environment and wanted in environment.split(b"\0"):
            found.append(pid)
    return sorted(found)


def in_session(session: int) -> list[int]:
    """Return the running processes of a session, with the one that started it, but without
    processes in sessions of their own.
    """
    stats = {pid: _stat(pid) for pid in _pids()}
    return sorted(
        pid
        for pid, fields in stats.items()
        if fields and int(fields[3]) == session and fields[0] not in "ZX"
    )


_supervisors: set[int] = set()  # supervisors that were seen alive, because a zombie has no command


def supervisors() -> tuple[list[int], list[int]]:
    """Return this process's supervisors that are alive or not yet reaped."""
    children = [pid for pid, parent in parents().items() if parent == os.getpid()]
    alive = [
        pid
        for pid in children
        if command_of(pid).endswith("loaderpool-supervisor") and is_alive(pid)
    ]
    dead = [pid for pid in children if pid in _supervisors and not is_alive(pid)]
    _supervisors.intersection_update(children)  # another process may have the pid of an earlier one
    _supervisors.update(alive)
    return alive, dead


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def wait_until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds. Raise an AssertionError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.005)


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until none of the processes is alive, or for `timeout_s`. Return those that are."""
    deadline_s = time.monotonic() + timeout_s
    remaining = [pid for pid in pids if is_alive(pid)]
    while remaining and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        remaining = [pid for pid in remaining if is_alive(pid)]
    return remaining


def found(look: Callable[[], Iterable[int]], timeout_s: float = 20.0) -> int:
    """Return the first process that `look` finds. Wait for one that is starting or being
    replaced.
    """
    deadline_s = time.monotonic() + timeout_s
    while (pid := next(iter(look()), None)) is None:
        assert time.monotonic() < deadline_s, "no such process"
        time.sleep(POLL_S)
    return pid


def strike(look: Callable[[], Iterable[int]], number: int = signal.SIGKILL) -> int:
    """Send a signal to the first process that `look` finds, and return its pid. If it has just
    ended, look again.
    """
    while True:
        pid = found(look)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            time.sleep(POLL_S)
        else:
            return pid


def end_all(pids: Iterable[int]) -> None:
    """Kill the processes, also stopped ones. Ignore those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def read_pss(pid: int) -> int:
    """Return this process's share of memory in bytes. Of pages that n processes share, an n-th
    counts.

    Files on disk do not count, because the share of a library grows when another process that has
    loaded it ends.
    """
    kinds = [line.split() for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()]
    shares = [int(kind[1]) * 1024 for kind in kinds if kind[0] in ("Pss_Anon:", "Pss_Shmem:")]
    if not shares:
        raise ProcessLookupError(f"process {pid} has no memory (a zombie?)")
    return sum(shares)


def count_fds(pid: int) -> int:
    """Return the number of the process's open descriptors, without the one that this call opens."""
    return len(os.listdir(_PROC / str(pid) / "fd")) - (1 if pid == os.getpid() else 0)


def lies_in_shared_memory(address: int) -> bool:
    """Return True if an address of this process is in a memory file of loaderpool, or in a block of
    shared memory.
    """
    for line in _read(os.getpid(), "maps").decode(errors="replace").splitlines():
        if "/memfd:loaderpool" in line or "/dev/shm/" in line:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return True
    return False


def shared_bytes(*pids: int, but: str = " ") -> int:
    """Return the bytes of the open memory files of loaderpool in these processes. Each file counts
    once, and holes do not count.

    Args:
        *pids: the processes.
        but: text in the names of files that do not count.
    """
    sizes = {}
    folders = [_PROC / str(pid) / "fd" for pid in pids]
    for path in [folder / name for folder in folders for name in os.listdir(folder)]:
        try:
            name = os.readlink(path).removesuffix(" (deleted)")
            if name.startswith(("/memfd:loaderpool", "/dev/shm/")) and but not in name:
                status = os.stat(path)
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return sum(sizes.values())


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process; 0 if it has ended."""
    try:
        tasks = [
            _read(pid, f"task/{task}/schedstat") for task in os.listdir(_PROC / str(pid) / "task")
        ]
    except OSError:
        return 0
    return sum(int(task.split()[0]) for task in tasks)


def command_of(pid: int) -> str:
    """Return the command with its arguments; "" if the process has ended."""
    try:
        return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def describe(pid: int) -> str:
    """Return one line for a message: pid, parent, state, and the command with its arguments."""
    fields = _stat(pid)
    if not fields:
        return f"process {pid} (gone by now)"
    return f"process {pid}, parent {fields[1]}, state {fields[0]}: {command_of(pid)[:200] or '(no command line)'}"


def _stat(pid: int) -> list[str]:
    """Return the state, parent, … of `/proc/PID/stat`; empty if the process has ended."""
    try:
        # The name in parentheses may contain spaces and parentheses.
        return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    # All processes are read around each test. pathlib and buffers would double the time.
    with open(f"{_PROC}/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def status_of_fork(do: Callable[[], object]) -> int:
    """Run a function in a fork of this process. Return its exit status; negative: minus the number
    of the signal that ended it.
    """
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            do()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_first(path: Path) -> bool:
    """Return True for the first caller with this path, of all processes."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
