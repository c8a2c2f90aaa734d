"""Notices samples that run past `Limits.timeout_s`, and shows what they were doing.

A worker notes on the board which sample it is at and since when. The time a sample has run is summed up over looks,
and a gap between looks (Ctrl-Z, a suspended machine, a supervisor that was kept waiting) counts as no more than two of
them, so that only a worker that really ran, or really slept, for so long is called hung. Where a worker has threads, a
sample may have begun before the board names it: what it ran since then counts, as far back as looks came without a gap.

    runs ──past the limit──▶ asked (SIGUSR1: faulthandler writes all stacks, also out of C code) ──▶ killed, reaped
      ▲────────────── it went on to the next sample after all ─────────────┘
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from loaderpool.memory.board import Board, Field
from loaderpool.system import clock, machine

_LOOKS_PER_TIMEOUT = 8
_SHORTEST_LOOK_NS, _LONGEST_LOOK_NS = 10_000_000, 1_000_000_000
# From the request for the stacks to the kill: faulthandler writes them in well under a millisecond.
_STACKS_NS = 100_000_000
_READ_BYTES = 1 << 16
_FIELDS = Field.TICKET, Field.INDEX, Field.STARTED_NS
FATAL = "Fatal Python error"  # what faulthandler begins with where C code ends a process


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

    def ask(self, pid: int) -> None:
        """Ask the worker for the stacks of its threads; what was written so far is of no interest."""
        self._begins = os.fstat(self.descriptor).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def read(self) -> str:
        """Return what was written since, or the end of it."""
        begins = max(self._begins, os.fstat(self.descriptor).st_size - _READ_BYTES)
        return os.pread(self.descriptor, _READ_BYTES, begins).decode(errors="replace")

    def close(self) -> None:
        """Drop it."""
        os.close(self.descriptor)


class Sample:
    """What a worker is at, as far as it was watched."""

    def __init__(self) -> None:
        self.started = self.ran_ns = self.asked_ns = self.ticket = 0
        self.is_asked_again = False
        self.looked_ns = self.seen_since_ns = 0  # the last look, and the first of those that came without a gap
        self.index: int | None = None  # of the sample, once the worker is killed for it
        self.stacks_text = ""


class SampleWatch:
    """Looks at the board from time to time, while there is something to watch.

    Runs in: the supervisor's loop, which calls `look` whenever it turns and sleeps at most `pause_ms`.
    """

    def __init__(self, board: Board) -> None:
        self._board, self._looked_ns = board, clock.monotonic_ns()
        self._due_ns: int | None = self._looked_ns  # the next look; None: there was nothing to watch

    def resume(self) -> None:
        """There may be something to watch."""
        if self._due_ns is None:
            self._due_ns = clock.monotonic_ns()

    def pause_ms(self) -> int | None:
        """Return how long the supervisor may sleep; None: as long as it likes."""
        return None if self._due_ns is None else max(0, -((clock.monotonic_ns() - self._due_ns) // 1_000_000))

    def look(self, find: Callable[[], Sequence[tuple[Any, int]]], shortest_s: float) -> None:
        """Look at the workers whose current ticket has a timeout, if that is due.

        Args:
            find: returns them, `WorkerProcess`es, each with that timeout in nanoseconds.
            shortest_s: the shortest timeout of all.
        """
        now = clock.monotonic_ns()
        if self._due_ns is None or now < self._due_ns:
            return
        watched = find()
        self._due_ns = now + _look_ns(int(shortest_s * 1e9)) if watched else None
        elapsed, self._looked_ns = now - self._looked_ns, now
        for worker, timeout_ns in watched:
            # The ticket first: where a new one begins meanwhile, the state sees that this one is over.
            ticket, index, started = (self._board.read(worker.cell, field) for field in _FIELDS)
            sample = worker.sample
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
            if not sample.asked_ns:
                if sample.ran_ns > timeout_ns:
                    sample.is_asked_again, sample.asked_ns = False, now
                    worker.stacks.ask(worker.pid)
            elif now - sample.asked_ns > _STACKS_NS:
                stacks = worker.stacks.read()
                # faulthandler leaves a request out while it answers another one, of `loaderpool top`.
                if not stacks and not sample.is_asked_again:
                    sample.is_asked_again, sample.asked_ns = True, now
                    worker.stacks.ask(worker.pid)
                    continue
                thread = self._board.read(worker.cell, Field.THREAD)
                sample.index, sample.stacks_text = index - 1, _beginning_with(thread, stacks)
                worker.kill()


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
