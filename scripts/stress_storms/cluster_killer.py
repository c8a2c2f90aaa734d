"""Ends parts of a cluster at random moments: workers, supervisors, hosts, dispatchers, raylets, nodes, its head."""

from __future__ import annotations

import collections
import os
import random
import signal
import threading
import time
from collections.abc import Callable

from tests.support.processes import descendants, end_all, is_alive

from .cluster import StormedCluster
from .targets import send_through

__all__ = ["KINDS", "ClusterKiller", "Strike", "kinds_for"]

# Of a hundred kills. A node's takes some seconds until there is another, and the head's ten.
KINDS = {
    "worker, SIGKILL": 24,
    "host's supervisor, SIGKILL": 16,
    "host, SIGKILL": 15,
    "host, SIGSEGV": 8,
    "host, SIGSTOP": 6,
    "dispatcher, SIGKILL": 8,
    "dispatcher, SIGKILL in its start": 7,
    "raylet, SIGKILL": 5,
    "node, SIGKILL": 6,
    "node, SIGSTOP": 2,
    "head, SIGKILL for 10 s": 2,
    "head, SIGSTOP for 10 s": 1,
}
_HEAD_S = 10.0
_EVERY_S = 1.2  # kills, on average, and beside what each of them takes
_SEVERAL = 0.15  # of the kills come right after another one
_START_S = 1.5  # of a dispatcher: its next one dies within
_FIND_S = 20.0  # until there is one to kill; else the kind is left out
_BROKEN_S = (0.5, 4.0)  # a node without its raylet is replaced after
_LOOK_S = 2.0  # at nodes that have ended by themselves
_FEWEST_NODES = 2  # that are whole; none is broken while there are no more


class Strike:
    """One kill: of what kind, when, and how long a consumer has waited for a batch after it.

    Args:
        kind: one of `KINDS`.
        at_s: monotonic.
    """

    def __init__(self, kind: str, at_s: float) -> None:
        self.kind, self.at_s, self.gap_s = kind, at_s, 0.0


def kinds_for(kills: int, draw: random.Random) -> list[str]:
    """So many kills, all kinds in their shares, in an order that is drawn."""
    total = sum(KINDS.values())
    found: list[str] = []
    for kind, share in KINDS.items():
        found += [kind] * max(1, round(kills * share / total))
    draw.shuffle(found)
    return found


class ClusterKiller(threading.Thread):
    """Kills until it is told to stop, or has nothing left to do.

    Attributes:
        strikes: what was done.
        has_first_batch: whether a loader has given a batch; only the head is spared before it.

    Args:
        cluster: whose parts it ends.
        kinds: what is to be done, from the first to the last.
        host_timeout_s: of the pool.
        draw: whom and when; its own.
    """

    def __init__(self, cluster: StormedCluster, kinds: list[str], host_timeout_s: float, draw: random.Random) -> None:
        super().__init__(name="killer", daemon=True)
        self.strikes: list[Strike] = []
        self.has_first_batch = False
        self._cluster, self._timeout_s, self._draw = cluster, host_timeout_s, draw
        self._left = collections.deque(kinds)
        self._stop_now = threading.Event()
        self._later: list[tuple[float, Callable[[], None]]] = []  # repairs
        self._has_head = True
        self._looked_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether everything was killed that should be, and all of the cluster is there again."""
        return not self._left and not self._later

    def run(self) -> None:
        """Kill, wait, kill; repair in between."""
        while self._left and not self._stop_now.wait(self._pause()):
            self._repair()
            self._strike(self._left.popleft())
        while self._later:
            self._repair()
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill no more; the cluster is whole when this returns."""
        self._stop_now.set()
        self.join()

    def note_wait(self, begun_s: float, ended_s: float) -> None:
        """A consumer has waited for a batch: each part of that is counted for what was done last before it."""
        until_s = ended_s
        for strike in reversed(self.strikes):
            strike.gap_s = max(strike.gap_s, until_s - max(begun_s, strike.at_s))
            until_s = strike.at_s
            if until_s <= begun_s:
                break

    def _pause(self) -> float:
        return 0.0 if self._draw.random() < _SEVERAL else min(self._draw.expovariate(1 / _EVERY_S), 5 * _EVERY_S)

    def _strike(self, kind: str) -> None:
        what, _, how = kind.partition(", ")
        number = getattr(signal, how.partition(" ")[0])
        if what == "node" or what == "raylet":
            self._strike_node(kind, number)
        elif what == "head":
            self._strike_head(kind, number)
        elif "in its start" in how:
            self._signal(None, self._cluster.dispatchers, signal.SIGKILL)
            time.sleep(self._draw.random() * _START_S)
            self._signal(kind, self._cluster.dispatchers, number)
        else:
            find = {
                "worker": self._cluster.workers,
                "host's supervisor": self._cluster.supervisors,
                "host": self._cluster.hosts,
                "dispatcher": self._cluster.dispatchers,
            }[what]
            self._signal(kind, find, number)

    def _signal(self, kind: str | None, find: Callable[[], list[int]], number: int) -> None:
        """Signal one of those that there are, or that come within some time."""
        until = time.monotonic() + _FIND_S
        while time.monotonic() < until and not self._stop_now.is_set():
            found = find()
            if found:
                pid = self._draw.choice(found)
                try:
                    pidfd = os.pidfd_open(pid)
                except OSError:
                    continue
                try:
                    now = time.monotonic()
                    if pid in find() and send_through(pidfd, number):
                        self._note(kind, now)
                        return
                finally:
                    os.close(pidfd)
            self._repair()
            time.sleep(0.02)

    def _note(self, kind: str | None, at_s: float) -> None:
        if kind is not None:
            self.strikes.append(Strike(kind, at_s))

    def _strike_node(self, kind: str, number: int) -> None:
        cluster = self._cluster
        while len(cluster.nodes) <= _FEWEST_NODES and not self._stop_now.wait(0.05):
            self._repair()
        if self._stop_now.is_set():
            return
        node = cluster.nodes.pop(self._draw.randrange(len(cluster.nodes)))
        raylet = cluster.raylet(node)
        victims = [raylet] if kind.startswith("raylet") else [raylet, *descendants(raylet)]
        self._note(kind, time.monotonic())
        for pid in victims:
            if is_alive(pid):
                os.kill(pid, number)
        after_s = self._draw.uniform(*_BROKEN_S)
        if number == signal.SIGSTOP:
            after_s += self._timeout_s + 1

        def repair() -> None:
            end_all(pid for pid in victims if is_alive(pid))
            cluster.replace(node)

        self._later.append((time.monotonic() + after_s, repair))

    def _strike_head(self, kind: str, number: int) -> None:
        # A pool that finds no cluster in its start says so at once, and waits for none.
        while not (self._has_head and self.has_first_batch) and not self._stop_now.wait(0.05):
            self._repair()
        if self._stop_now.is_set():
            return
        cluster, head = self._cluster, self._cluster.head()
        self._has_head = False
        self._note(kind, time.monotonic())
        if number == signal.SIGKILL:
            cluster.end_head()
        else:
            os.kill(head, signal.SIGSTOP)

        def repair() -> None:
            if number == signal.SIGKILL:
                cluster.start_head()
            else:
                os.kill(head, signal.SIGCONT)
            self._has_head = True

        self._later.insert(0, (time.monotonic() + _HEAD_S, repair))

    def _repair(self) -> None:
        """Do what is due. Nothing joins a cluster without a head."""
        now = time.monotonic()
        if self._has_head and now > self._looked_s + _LOOK_S:
            self._looked_s = now
            self._cluster.replace_broken()
        for entry in list(self._later):
            if entry[0] <= now and (self._has_head or entry is self._later[0]):
                self._later.remove(entry)
                entry[1]()
