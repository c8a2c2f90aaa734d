"""Ends workers, supervisors and readers of this process at random moments."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
import threading
import time
from typing import Protocol

from .targets import find_readers, find_supervisors, find_workers, held, send, send_through

__all__ = ["AnyKiller", "Budget", "Counts", "Killer"]

_BRIEF_STOP_S = (0.02, 0.6)  # a worker that is stopped for so long is left alone
_LONG_STOP_COSTS_S = 6.0  # until it is replaced, and somewhat more


@dataclasses.dataclass
class Counts:
    """What was done to processes."""

    kills: int = 0  # of workers, by SIGKILL or SIGTERM
    supervisor_kills: int = 0
    reader_kills: int = 0
    stops: int = 0  # of workers, for good
    brief_stops: int = 0  # of workers and readers

    def add(self, other: Counts) -> None:
        """Sum up."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much a killer does, and how fast."""

    kills: int  # of workers, then it stops killing
    supervisor_kills: int
    stops: int  # of workers, for good; each costs the stream some seconds
    every_s: float  # on average
    waits_for_first: bool = False  # batch; nobody dies before it
    reader_kills: int = 0


class AnyKiller(Protocol):
    """Kills on a thread of its own.

    Attributes:
        has_first_batch: whether the loader that is stormed has given a batch.
    """

    has_first_batch: bool

    @property
    def is_done(self) -> bool:
        """Whether everything was killed that should be."""


class Killer(threading.Thread):
    """Kills until it is told to stop, or has nothing left to do.

    Args:
        budget: what it may do.
        draw: whom, how and when; its own.
    """

    def __init__(self, budget: Budget, draw: random.Random) -> None:
        super().__init__(name="killer", daemon=True)
        self.counts = Counts()
        # Before a loader was ever loaded its supervisor's death is an error of the import.
        self._has_first_batch = False
        self._first_batch_turn = threading.Lock()  # held while a supervisor is killed
        self._budget, self._draw = budget, draw
        self._stop_now = threading.Event()
        self._supervisors_at, self._stops_at, self._readers_at = (
            collections.deque(sorted(draw.randrange(budget.kills or 1) for _ in range(count)))
            for count in (budget.supervisor_kills, budget.stops, budget.reader_kills)
        )
        self._stopped: list[tuple[float, int]] = []  # when to go on, pidfd

    @property
    def is_done(self) -> bool:
        """Whether everything was killed that should be."""
        done, budget = self.counts, self._budget
        is_left = self._supervisors_at or self._stops_at or self._readers_at
        return done.kills >= budget.kills and not is_left

    @property
    def has_first_batch(self) -> bool:
        """Whether the loader that is stormed has given a batch; else no supervisor is killed."""
        return self._has_first_batch

    @has_first_batch.setter
    def has_first_batch(self, has_it: bool) -> None:
        if has_it != self._has_first_batch:
            with self._first_batch_turn:
                self._has_first_batch = has_it

    def run(self) -> None:
        """Kill, wait, kill."""
        while not self.is_done:
            if self._stop_now.wait(min(self._draw.expovariate(1 / self._budget.every_s), 10 * self._budget.every_s)):
                break
            self._go_on_with_stopped()
            if self.has_first_batch or not self._budget.waits_for_first:
                self._strike()
        while self._stopped:
            self._go_on_with_stopped()
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill no more; those that were stopped for a moment have gone on when this returns."""
        self._stop_now.set()
        self.join()

    def _strike(self) -> None:
        draw, done = self._draw, self.counts
        if self.has_first_batch and self._supervisors_at and done.kills >= self._supervisors_at[0]:
            self._strike_supervisor()
        elif self._readers_at and done.kills >= self._readers_at[0] and self._strike_reader():
            self._readers_at.popleft()
            done.reader_kills += 1
        elif self._stops_at and done.kills >= self._stops_at[0]:
            if self._signal_worker(signal.SIGSTOP):
                self._stops_at.popleft()
                done.stops += 1
        elif done.kills >= self._budget.kills:
            return
        elif draw.random() < 0.05:
            self._stop_briefly()
        else:
            number = signal.SIGTERM if draw.random() < 0.1 else signal.SIGKILL
            several = draw.random()
            if several < 0.06:  # all at once
                for supervisor in find_supervisors():
                    for worker in find_workers(supervisor):
                        done.kills += send(worker, supervisor, number)
                return
            done.kills += self._signal_worker(number)
            if several < 0.15:  # and whoever is there a moment later, perhaps the replacement in its first steps
                time.sleep(draw.random() * 0.01)
                done.kills += self._signal_worker(number)

    def _strike_supervisor(self) -> None:
        draw = self._draw
        supervisors = find_supervisors()
        if not supervisors:
            return
        supervisor = draw.choice(supervisors)
        how = draw.random()
        if how < 0.3:  # a worker dies and nobody is left to notice
            self.counts.kills += self._signal_worker(signal.SIGKILL)
        if self._send_supervisor(supervisor):
            self.counts.supervisor_kills += 1
            self._supervisors_at.popleft()
        if how > 0.7 and self._supervisors_at:  # and the next one while it starts
            time.sleep(draw.random() * 0.6)
            for another in find_supervisors():
                if another != supervisor and self._send_supervisor(another):
                    self.counts.supervisor_kills += 1
                    self._supervisors_at.popleft()
                    break

    def _send_supervisor(self, pid: int) -> bool:
        with self._first_batch_turn:
            return self._has_first_batch and send(pid, os.getpid(), signal.SIGKILL)

    def _strike_reader(self) -> bool:
        readers = find_readers()
        number = signal.SIGTERM if self._draw.random() < 0.1 else signal.SIGKILL
        return bool(readers) and send(self._draw.choice(readers), os.getpid(), number)

    def _signal_worker(self, number: int) -> bool:
        for supervisor in find_supervisors():
            workers = find_workers(supervisor)
            if workers:
                return send(self._draw.choice(workers), supervisor, number)
        return False

    def _stop_briefly(self) -> None:
        found = [(reader, os.getpid()) for reader in find_readers()]
        found += [(worker, supervisor) for supervisor in find_supervisors() for worker in find_workers(supervisor)]
        if found:
            with held(*self._draw.choice(found)) as pidfd:
                if pidfd is not None and send_through(pidfd, signal.SIGSTOP):
                    self.counts.brief_stops += 1
                    self._stopped.append((time.monotonic() + self._draw.uniform(*_BRIEF_STOP_S), os.dup(pidfd)))

    def _go_on_with_stopped(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._stopped if entry[0] <= now]:
            self._stopped.remove(entry)
            send_through(entry[1], signal.SIGCONT)
            os.close(entry[1])
