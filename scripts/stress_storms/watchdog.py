"""Shows what hangs: past a deadline the Python stacks of all processes are printed, then all of them are ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import descendants, describe, end_all

from .targets import find_supervisors, find_workers

__all__ = ["watched"]

# After our own deadline: where not even this thread gets its turn, faulthandler's own, which is in C, ends us.
_LAST_RESORT_S = 20.0


@contextmanager
def watched(seconds: float, what: str) -> Iterator[None]:
    """The block ends within so many seconds; else its stacks are shown and this process ends with status 1."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(over, seconds, what), name="watchdog", daemon=True)
    faulthandler.dump_traceback_later(seconds + _LAST_RESORT_S, exit=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(over: threading.Event, seconds: float, what: str) -> None:
    if over.wait(seconds):
        return
    print(f"\nHANG: {what} still ran after {seconds:g} s\n---- trainer ----", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    tree = descendants(os.getpid())
    print("\n".join(["---- processes ----", *map(describe, tree)]), file=sys.stderr, flush=True)
    for supervisor in find_supervisors():
        for worker in find_workers(supervisor):
            print(f"---- worker {worker} ----\n{_stacks_of_worker(worker)}", file=sys.stderr, flush=True)
        print(f"---- supervisor {supervisor} ----", file=sys.stderr, flush=True)
        os.kill(supervisor, signal.SIGABRT)  # PYTHONFAULTHANDLER: it prints its stack, and ends
        os.kill(supervisor, signal.SIGCONT)
        time.sleep(0.5)
    for pid in filter(_is_of_a_cluster, tree):
        print(f"---- {describe(pid)} ----\n{_last_words(pid)}", file=sys.stderr, flush=True)
    end_all(tree)
    os._exit(1)


def _is_of_a_cluster(pid: int) -> bool:
    """Whether it is a dispatcher, a host or something of a host's."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in (b"loaderpool-dispatcher", b"loaderpool-supervisor", b"ray::HostActor"))


def _last_words(pid: int) -> str:
    """The stacks that a process leaves on its stderr, where that is a file, as Ray has them for hosts."""
    try:
        with open(f"/proc/{pid}/fd/2", "rb") as stderr:
            is_file = stat.S_ISREG(os.fstat(stderr.fileno()).st_mode)
            if is_file:
                stderr.seek(0, os.SEEK_END)
            os.kill(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER: it prints its stack, and ends
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
            return stderr.read().decode(errors="replace") if is_file else "(on its stderr)"
    except OSError as error:
        return f"({error})"


def _stacks_of_worker(pid: int) -> str:
    """What its faulthandler writes, on SIGUSR1, into its memory file for stacks."""
    try:
        files = [file for file in Path(f"/proc/{pid}/fd").iterdir() if "loaderpool-stacks" in os.readlink(file)]
        if not files:
            return "(it has no file for stacks)"
        with files[0].open("rb") as stacks:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
            return stacks.read().decode(errors="replace")
    except OSError as error:
        return f"({error})"
