"""Notices samples that run past `Limits.timeout_s`, and shows what they were doing.

A worker notes on the board which sample it is at and since when. The time a sample has run is summed up over looks,
and a gap between looks (Ctrl-Z, a suspended machine, a supervisor that was kept waiting) counts as no more than two of
them, so that only a worker that really ran, or really slept, for so long is called hung. Where a worker has threads, a
sample may have begun before the board names it: what it ran since then counts, as far back as looks came without a gap.

    runs ──past the limit──▶ asked (SIGUSR1: faulthandler writes all stacks, also out of C code) ──▶ killed, reaped
      ▲────────────── it went on to the next sample after all ─────────────┘
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterable
from typing import Protocol

from loaderpool.memory.board import Board, Field
from loaderpool.system import clock, machine

_LOOKS_PER_TIMEOUT = 8
_SHORTEST_LOOK_NS, _LONGEST_LOOK_NS = 10_000_000, 1_000_000_000
# From the request for the stacks to the kill: faulthandler writes them in well under a millisecond.
_STACKS_NS = 100_000_000
_READ_BYTES = 1 << 16
FATAL = "Fatal Python error"  # what faulthandler begins with where C code ends a process


class Stacks(Protocol):
    """What a worker's threads were at."""

    def forget(self) -> None:
        """What was written so far is of no interest."""

    def read(self) -> str:
        """Return what was written of it since, as faulthandler does."""

    def close(self) -> None:
        """Drop it."""


class StackFile:
    """A memory file into which a worker's faulthandler writes when it is asked; made before the fork.

    Args:
        descriptor: of one that another process has made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = machine.create_memory_file("stacks") if descriptor is None else descriptor
        self._begins = 0

    def arm(self) -> None:
        """Runs in: the worker. Faults of C code (SIGSEGV, SIGABRT, ...) write the stack there, too."""
        faulthandler.enable(self.descriptor, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=self.descriptor, all_threads=True, chain=False)

    def forget(self) -> None:
        """What was written so far is of no interest."""
        self._begins = os.fstat(self.descriptor).st_size

    def read(self) -> str:
        """Return what was written since, or the end of it."""
        begins = max(self._begins, os.fstat(self.descriptor).st_size - _READ_BYTES)
        return os.pread(self.descriptor, _READ_BYTES, begins).decode(errors="replace")

    def close(self) -> None:
        """Drop it."""
        os.close(self.descriptor)


class HungSample:
    """A worker whose sample is watched."""

    __slots__ = (
        "asked_ns",
        "cell",
        "index",
        "is_asked_again",
        "looked_ns",
        "pid",
        "ran_ns",
        "seen_since_ns",
        "stacks",
        "stacks_text",
        "started",
        "ticket",
    )

    def __init__(self, pid: int, cell: int, stacks: Stacks) -> None:
        self.pid, self.cell, self.stacks = pid, cell, stacks
        self.started = self.ran_ns = self.asked_ns = self.ticket = 0
        self.is_asked_again = False
        self.looked_ns = self.seen_since_ns = 0  # the last look, and the first of those that came without a gap
        self.index: int | None = None  # of the sample, once the worker is killed for it
        self.stacks_text = ""

    def ask(self) -> None:
        """Ask the worker for the stacks of its threads, which will be in `stacks`."""
        self.stacks.forget()
        _signal(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End the worker."""
        _signal(self.pid, signal.SIGKILL)


class SampleWatch:
    """Looks at the board from time to time.

    Runs in: the supervisor's loop, which calls `look` whenever it turns and sleeps at most `pause_ms`.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looked_ns = clock.monotonic_ns()

    @staticmethod
    def pause_ms(timeouts_ns: Iterable[int]) -> int | None:
        """Return how long the supervisor may sleep; None: as long as it likes."""
        shortest = min(timeouts_ns, default=0)
        return _look_ns(shortest) // 1_000_000 if shortest else None

    def look(self, watched: Iterable[tuple[HungSample, int]]) -> None:
        """One look at the workers whose current ticket has a timeout, each with that timeout in nanoseconds."""
        now = clock.monotonic_ns()
        elapsed, self._looked_ns = now - self._looked_ns, now
        for sample, timeout_ns in watched:
            # The ticket first: where a new one begins meanwhile, the state sees that this one is over.
            ticket = self._board.read(sample.cell, Field.TICKET)
            index = self._board.read(sample.cell, Field.INDEX)
            started = self._board.read(sample.cell, Field.STARTED_NS)
            if sample.index is not None:  # killed, not reaped yet
                continue
            if now - sample.looked_ns > 2 * _look_ns(timeout_ns):
                sample.seen_since_ns = now
            sample.looked_ns = now
            if not index or started != sample.started or ticket != sample.ticket:
                ran_ns = max(0, now - max(started, sample.seen_since_ns))
                sample.started, sample.ran_ns, sample.asked_ns, sample.ticket = started, ran_ns, 0, ticket
                continue
            sample.ran_ns += min(elapsed, 2 * _look_ns(timeout_ns))
            if sample.asked_ns:
                if now - sample.asked_ns > _STACKS_NS:
                    stacks = sample.stacks.read()
                    # faulthandler leaves a request out while it answers another one, of `loaderpool top`.
                    if not stacks and not sample.is_asked_again:
                        sample.is_asked_again, sample.asked_ns = True, now
                        sample.ask()
                        continue
                    thread = self._board.read(sample.cell, Field.THREAD)
                    sample.index, sample.stacks_text = index - 1, _beginning_with(thread, stacks)
                    sample.kill()
            elif sample.ran_ns > timeout_ns:
                sample.is_asked_again, sample.asked_ns = False, now
                sample.ask()


def fault_in(stacks: str) -> str:
    """Return what faulthandler wrote as C code ended the process; "": it did not."""
    begins = stacks.rfind(FATAL)
    return stacks[begins:] if begins >= 0 else ""


def _beginning_with(thread: int, stacks: str) -> str:
    """Return the stacks of all threads, this one's first, as far as faulthandler has named it."""
    first = f"hread 0x{thread:016x} "  # "Thread ..." or "Current thread ..."
    return "\n\n".join(sorted(stacks.strip().split("\n\n"), key=lambda stack: first not in stack.partition("\n")[0]))


def _look_ns(timeout_ns: int) -> int:
    return max(_SHORTEST_LOOK_NS, min(_LONGEST_LOOK_NS, timeout_ns // _LOOKS_PER_TIMEOUT))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
