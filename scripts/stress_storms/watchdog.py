"""Shows what hangs: past a deadline the Python stacks of all processes are printed, then all of them are ended."""

from __future__ import annotations

import faulthandler
import os
import signal
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
    end_all(tree)
    os._exit(1)


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
