"""Ends workers, supervisors and readers of this process at random moments.

They are found as anybody could, by the process tree. psutil signals a process by its pid and the moment of its start,
so a pid that was reused in between is not met.
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

_BRIEF_STOP_S = (0.02, 0.6)  # a process that is stopped for so long is left alone
# After our own deadline: where not even the watchdog gets its turn, faulthandler's own, which is in C, ends us.
_LAST_RESORT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much a killer does, and how fast."""

    kills: int  # of workers, then it stops killing
    supervisor_kills: int
    stops: int  # of workers, for good; each costs the stream some seconds
    every_s: float  # on average
    reader_kills: int = 0


class Killer(threading.Thread):
    """Kills until it is told to stop, or has nothing left to do, and counts what it did.

    "kills" are of workers, by SIGKILL or SIGTERM, "stops" of workers for good, "brief_stops" of workers and readers.
    """

    def __init__(
        self, budget: Budget, draw: random.Random, counts: collections.Counter[str]
    ) -> None:
        super().__init__(name="killer", daemon=True)
        self._counts = counts
        # Of the loader that is stormed; before it, its supervisor's death is an error of the import.
        self.has_first_batch = False
        self.first_batch_turn = (
            threading.Lock()
        )  # held while a supervisor is killed, and to say that there is none yet
        self._budget, self._draw = budget, draw
        self._stop_now = threading.Event()
        self._supervisors_at, self._stops_at, self._readers_at = (
            collections.deque(sorted(draw.randrange(budget.kills or 1) for _ in range(count)))
            for count in (budget.supervisor_kills, budget.stops, budget.reader_kills)
        )
        self._stopped: list[tuple[float, psutil.Process]] = []  # when to go on

    @property
    def is_done(self) -> bool:
        """Whether everything was killed that should be."""
        is_left = self._supervisors_at or self._stops_at or self._readers_at
        return self._counts["kills"] >= self._budget.kills and not is_left

    def run(self) -> None:
        """Kill, wait, kill."""
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
        """Kill no more; those that were stopped for a moment have gone on when this returns."""
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
            )  # all at once, or one
            done["kills"] += sum(_send(worker, number) for worker in workers)
            if (
                0.06 <= several < 0.15
            ):  # and who is there a moment later, perhaps the replacement in its first steps
                time.sleep(draw.random() * 0.01)
                done["kills"] += _send(_one_of(draw, find_workers()), number)

    def _strike_supervisor(self) -> None:
        draw, how = self._draw, self._draw.random()
        supervisor = _one_of(draw, children("supervisor"))
        if how < 0.3:  # a worker dies and no process is left to notice
            self._counts["kills"] += _send(_one_of(draw, find_workers()), signal.SIGKILL)
        self._kill_supervisor(supervisor)
        if how > 0.7 and self._supervisors_at:  # and the next one while it starts
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
    """Signal a process; whether it was there."""
    with contextlib.suppress(psutil.Error):
        if process is not None and process.status() != psutil.STATUS_ZOMBIE:
            process.send_signal(number)
            return True
    return False


def children(what: str) -> list[psutil.Process]:
    """This process's supervisors ("supervisor"), or readers of its streams ("reader"), that are alive."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if f"loaderpool-{what}" in child.cmdline():
                found.append(child)
    return found


def find_workers() -> list[psutil.Process]:
    """Workers of this process's supervisors that are alive."""
    found = []
    for supervisor in children("supervisor"):
        with contextlib.suppress(psutil.Error):
            found += [
                child for child in supervisor.children() if child.status() != psutil.STATUS_ZOMBIE
            ]
    return found


# ---- what hangs


@contextlib.contextmanager
def watched(seconds: float, what: str) -> Iterator[None]:
    """The block ends within so many seconds; else its stacks are shown and this process ends with status 1."""
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
        supervisor.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER: it prints its stack, and ends
        supervisor.resume()
        time.sleep(0.5)
    end_all(tree)
    os._exit(1)


def _stacks_of_worker(pid: int) -> str:
    """What its faulthandler writes, on SIGUSR1, into its memory file for stacks."""
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
