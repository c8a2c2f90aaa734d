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
# Far below what a test would notice, far above what a look at /proc costs (some ms with hundreds of processes).
POLL_S = 0.02


def parents() -> dict[int, int]:
    """Every process of the machine with its parent, zombies too."""
    found: dict[int, int] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields:
            found[pid] = int(fields[1])
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, in whatever session; zombies too, `pid` itself not.

    A process whose parent died is nobody's descendant any more: `marked` finds those.
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
    """Processes that were started with `name=value` in their environment, or forked by one that was.

    This is the environment at exec: it finds orphans and processes in sessions of their own, and never the process
    that set the variable for its children. Zombies have no environment left.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = _read(pid, "environ")
        except OSError:  # gone, or another user's
            continue
        if wanted in environment and wanted in environment.split(b"\0"):
            found.append(pid)
    return sorted(found)


def in_session(session: int) -> list[int]:
    """Processes of a session that still run, itself among them: those that started no session of their own."""
    stats = {pid: _stat(pid) for pid in _pids()}
    return sorted(
        pid
        for pid, fields in stats.items()
        if fields and int(fields[3]) == session and fields[0] not in "ZX"
    )


_supervisors: set[int] = set()  # that were seen alive: a zombie has no command


def supervisors() -> tuple[list[int], list[int]]:
    """This process's supervisors: those that are alive, and those that are not reaped yet."""
    children = [pid for pid, parent in parents().items() if parent == os.getpid()]
    alive = [
        pid
        for pid in children
        if command_of(pid).endswith("loaderpool-supervisor") and is_alive(pid)
    ]
    dead = [pid for pid in children if pid in _supervisors and not is_alive(pid)]
    _supervisors.intersection_update(
        children
    )  # another process may have the pid of one that is gone
    _supervisors.update(alive)
    return alive, dead


def is_alive(pid: int) -> bool:
    """Whether the process exists and still runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def wait_until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Blocks until it holds; an AssertionError where it does not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.005)


def wait_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Blocks until none of the processes is alive, or for `timeout_s`; returns those that still are."""
    deadline_s = time.monotonic() + timeout_s
    remaining = [pid for pid in pids if is_alive(pid)]
    while remaining and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        remaining = [pid for pid in remaining if is_alive(pid)]
    return remaining


def found(look: Callable[[], Iterable[int]], timeout_s: float = 20.0) -> int:
    """The first process that a look finds; one that is just starting, or being replaced, is waited for."""
    deadline_s = time.monotonic() + timeout_s
    while (pid := next(iter(look()), None)) is None:
        assert time.monotonic() < deadline_s, "no such process"
        time.sleep(POLL_S)
    return pid


def strike(look: Callable[[], Iterable[int]], number: int = signal.SIGKILL) -> int:
    """Send a signal to the first process that a look finds; returns its pid. One that just ended is looked up again."""
    while True:
        pid = found(look)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            time.sleep(POLL_S)
        else:
            return pid


def end_all(pids: Iterable[int]) -> None:
    """Kill the processes, stopped ones too; those that are gone already are no error."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def read_pss(pid: int) -> int:
    """Bytes of memory that are this process's share: pages shared by n processes count one n-th.

    Without those of files on disk: a library's count more as soon as some other process that has loaded it, too, ends.
    """
    kinds = [line.split() for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()]
    shares = [int(kind[1]) * 1024 for kind in kinds if kind[0] in ("Pss_Anon:", "Pss_Shmem:")]
    if not shares:
        raise ProcessLookupError(f"process {pid} has no memory (a zombie?)")
    return sum(shares)


def count_fds(pid: int) -> int:
    """Descriptors that the process has open; asked of oneself, the one for the look is not counted."""
    return len(os.listdir(_PROC / str(pid) / "fd")) - (1 if pid == os.getpid() else 0)


def lies_in_shared_memory(address: int) -> bool:
    """Whether a memory file of ours, or a block of shared memory, is mapped there in this process."""
    for line in _read(os.getpid(), "maps").decode(errors="replace").splitlines():
        if "/memfd:loaderpool" in line or "/dev/shm/" in line:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return True
    return False


def shared_bytes(*pids: int, but: str = " ") -> int:
    """Bytes that the memory files take which processes of ours have open, each file once; holes take none.

    Args:
        *pids: the processes.
        but: files with this in their name do not count.
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
    """The time that all threads of a process have run so far; 0 where it has ended."""
    try:
        tasks = [
            _read(pid, f"task/{task}/schedstat") for task in os.listdir(_PROC / str(pid) / "task")
        ]
    except OSError:
        return 0
    return sum(int(task.split()[0]) for task in tasks)


def command_of(pid: int) -> str:
    """The command with its arguments, "" where the process has ended."""
    try:
        return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def describe(pid: int) -> str:
    """One line for a message: pid, parent, state, and the command with its arguments."""
    fields = _stat(pid)
    if not fields:
        return f"process {pid} (gone by now)"
    return f"process {pid}, parent {fields[1]}, state {fields[0]}: {command_of(pid)[:200] or '(no command line)'}"


def _stat(pid: int) -> list[str]:
    """State, parent, … of `/proc/PID/stat`; empty where the process is gone."""
    try:
        # The name in parentheses may hold spaces and parentheses itself.
        return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    # All processes are looked at around each test: pathlib and buffers would take half of that time.
    with open(f"{_PROC}/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def status_of_fork(do: Callable[[], object]) -> int:
    """How a fork of this process ended that did this: its exit status, minus the signal's number where one ended it."""
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
