"""Ends workers, supervisors and readers of this process at random moments.

The processes are found in the process tree. psutil identifies a process by its pid and its start
time, so it never signals another process that has reused the pid.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.processes import descendants, describe, end_all

# shortest and longest stop; a process that is stopped for so short a time is not replaced
_BRIEF_STOP_S = (0.02, 0.6)
# Time after the watchdog's deadline. If the watchdog cannot run, a timer of faulthandler, which is
# written in C, ends this process.
_LAST_RESORT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """Number and rate of kills."""

    kills: int  # kills of workers, after which no more are killed
    supervisor_kills: int
    stops: int  # workers that are stopped for good; each costs the stream some seconds
    every_s: float  # mean time between kills
    reader_kills: int = 0


class Killer(threading.Thread):
    """Kills until `stop` is called or nothing is left to do, and counts its kills.

    "kills" are of workers, by SIGKILL or SIGTERM. "stops" stop workers for good. "brief_stops" stop
    workers and readers for a moment.
    """

    def __init__(
        self, budget: Budget, draw: random.Random, counts: collections.Counter[str]
    ) -> None:
        super().__init__(name="killer", daemon=True)
        self._counts = counts
        # True after the loader's first batch. Before it, the death of the supervisor is an error of
        # the import.
        self.has_first_batch = False
        self.first_batch_turn = (
            threading.Lock()
        )  # held while a supervisor is killed, and while `has_first_batch` changes
        self._budget, self._draw = budget, draw
        self._stop_now = threading.Event()
        self._supervisors_at, self._stops_at, self._readers_at = (
            collections.deque(sorted(draw.randrange(budget.kills or 1) for _ in range(count)))
            for count in (budget.supervisor_kills, budget.stops, budget.reader_kills)
        )
        # stopped processes, with the times to continue them
        self._stopped: list[tuple[float, psutil.Process]] = []

    @property
    def is_done(self) -> bool:
        """True if all planned kills have been made."""
        is_left = self._supervisors_at or self._stops_at or self._readers_at
        return self._counts["kills"] >= self._budget.kills and not is_left

    def run(self) -> None:
        """Kill and wait in turn."""
        while not self.is_done:
            if self._stop_now.wait(
                min(self._draw.expovariate(1 / self._budget.every_s), 10 * self._budget.every_s)
            ):
                break
            self._go_on_with_stopped()
            self._strike()
        while self._stopped:
            self._go_on_with_stopped()
            time.sleep(0.01)

    def stop(self) -> None:
        """End the kills. When this returns, all processes that were stopped for a moment have
        continued.
        """
        self._stop_now.set()
        self.join()

    def _strike(self) -> None:
        draw, done = self._draw, self._counts
        if (
            self.has_first_batch
            and self._supervisors_at
            and done["kills"] >= self._supervisors_at[0]
        ):
            self._strike_supervisor()
        elif self._readers_at and done["kills"] >= self._readers_at[0] and _send(
            _one_of(draw, children("reader")), _deadly(draw)
        ):  # fmt: skip
            self._readers_at.popleft()
            done["reader_kills"] += 1
        elif self._stops_at and done["kills"] >= self._stops_at[0]:
            if _send(_one_of(draw, find_workers()), signal.SIGSTOP):
                self._stops_at.popleft()
                done["stops"] += 1
        elif done["kills"] >= self._budget.kills:
            return
        elif draw.random() < 0.05:
            self._stop_briefly()
        else:
            number, several = _deadly(draw), draw.random()
            workers = (
                find_workers() if several < 0.06 else [_one_of(draw, find_workers())]
            )  # all of them, or one
            done["kills"] += sum(_send(worker, number) for worker in workers)
            if (
                0.06 <= several < 0.15
            ):  # a second kill soon after, perhaps of the replacement as it starts
                time.sleep(draw.random() * 0.01)
                done["kills"] += _send(_one_of(draw, find_workers()), number)

    def _strike_supervisor(self) -> None:
        draw, how = self._draw, self._draw.random()
        supervisor = _one_of(draw, children("supervisor"))
        if how < 0.3:  # kill a worker, too, so that no process notices its death
            self._counts["kills"] += _send(_one_of(draw, find_workers()), signal.SIGKILL)
        self._kill_supervisor(supervisor)
        if how > 0.7 and self._supervisors_at:  # also kill the next supervisor while it starts
            time.sleep(draw.random() * 0.6)
            self._kill_supervisor(
                _one_of(draw, [each for each in children("supervisor") if each != supervisor])
            )

    def _kill_supervisor(self, supervisor: psutil.Process | None) -> None:
        with self.first_batch_turn:
            if self.has_first_batch and _send(supervisor, signal.SIGKILL):
                self._counts["supervisor_kills"] += 1
                self._supervisors_at.popleft()

    def _stop_briefly(self) -> None:
        process = _one_of(self._draw, [*children("reader"), *find_workers()])
        if process is not None and _send(process, signal.SIGSTOP):
            self._counts["brief_stops"] += 1
            self._stopped.append((time.monotonic() + self._draw.uniform(*_BRIEF_STOP_S), process))

    def _go_on_with_stopped(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove(entry)
            _send(entry[1], signal.SIGCONT)


def _deadly(draw: random.Random) -> signal.Signals:
    return signal.SIGTERM if draw.random() < 0.1 else signal.SIGKILL


def _one_of(draw: random.Random, processes: list[psutil.Process]) -> psutil.Process | None:
    return draw.choice(processes) if processes else None


def _send(process: psutil.Process | None, number: int) -> bool:
    """Signal a process. Return True if it existed."""
    with contextlib.suppress(psutil.Error):
        if process is not None and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False


def children(what: str) -> list[psutil.Process]:
    """Return the living supervisors of this process ("supervisor"), or the readers of its streams
    ("reader").
    """
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if f"loaderpool-{what}" in child.cmdline():
                found.append(child)
    return found


def find_workers() -> list[psutil.Process]:
    """Return the living workers of this process's supervisors."""
    found = []
    for supervisor in children("supervisor"):
        with contextlib.suppress(psutil.Error):
            found += [
                child for child in supervisor.children() if child.status() != psutil.STATUS_ZOMBIE
            ]
    return found


# ---- processes that hang


@contextlib.contextmanager
def watched(seconds: float, what: str) -> Iterator[None]:
    """Context manager for code with a deadline. If it is missed, print all stacks and end this
    process with status 1.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(over, seconds, what), name="watchdog", daemon=True
    )
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
    print(
        f"\nHANG: {what} still ran after {seconds:g} s\n---- trainer ----",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    tree = descendants(os.getpid())
    print("\n".join(["---- processes ----", *map(describe, tree)]), file=sys.stderr, flush=True)
    for worker in find_workers():
        print(
            f"---- worker {worker.pid} ----\n{_stacks_of_worker(worker.pid)}",
            file=sys.stderr,
            flush=True,
        )
    for supervisor in children("supervisor"):
        print(f"---- supervisor {supervisor.pid} ----", file=sys.stderr, flush=True)
        # with PYTHONFAULTHANDLER, it prints its stack and ends
        supervisor.send_signal(signal.SIGABRT)
        supervisor.resume()
        time.sleep(0.5)
    end_all(tree)
    os._exit(1)


def _stacks_of_worker(pid: int) -> str:
    """Return the stacks that the worker's faulthandler writes into its memory file on SIGUSR1."""
    try:
        file = next(
            file
            for file in Path(f"/proc/{pid}/fd").iterdir()
            if "loaderpool-stacks" in os.readlink(file)
        )
        with file.open("rb") as stacks:
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
            return stacks.read().decode(errors="replace")
    except (OSError, StopIteration) as error:
        return f"({error!r})"
