"""The flight recorder: what each process did lately, as records of a fixed size in rings in shared memory.

    worker ──▶ its tickets, its calls ─┐
    supervisor ──▶ its marks ──────────┼─▶ rings after the call times ──▶ `trainer/tracing.py`
    trainer ──▶ its marks ─────────────┘
    trainer ──▶ deliveries of one loader, after its page

It is always on. A record is written by one call in C, without a lock or a system call, and goes into memory that is
there only once it was written to; the oldest one makes way. A writer may die between any two bytes: a record begins and
ends with its number, and a reader drops one in which they differ, or that changes while it is read (`read_ring`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import MAX_WORKERS
from loaderpool.system import clock, machine

Records = npt.NDArray[np.void]
ReadBytes = Callable[[int, int], bytes]  # from an offset so many

# A call that takes less is in no record of its own. Less: functions of fast samples would be slowed down by records.
RECORDED_FROM_NS = 1_000_000
_LOW = 0xFFFFFFFF
_CHECKED = 0xFFFF
_HEAD_BYTES = 64  # of a ring: how many records were written to it, ever
_SHARE = 8  # of a small arena rings take so much, and have room for fewer workers
_PAGE_BYTES = 4096
_MOST_US = _LOW  # 71 minutes
_TYPES = {"I": "<u4", "Q": "<u8", "B": "u1", "H": "<u2"}  # of NumPy, by letters of `struct`


_forks = 0  # of which this process is the child; to ask for its pid is a system call


def _note_fork() -> None:
    global _forks
    _forks += 1


machine.at_forks(after_in_child=_note_fork)


class RecordKind:
    """What a ring's records are made of, for `struct`, which writes them, and for NumPy, which reads them.

    Args:
        capacity: how many records a ring holds; a power of two.
        fields: of each name the type, as `struct` has it; the record's number stands before and after them.
    """

    def __init__(self, capacity: int, **fields: str) -> None:
        self.capacity = capacity
        self.format = struct.Struct("<I" + "".join(fields.values()) + "H")
        columns = {"serial": "I", **fields, "check": "H"}
        self.dtype = np.dtype([(name, _TYPES[letter]) for name, letter in columns.items()])
        self.ring_bytes = -(-(_HEAD_BYTES + capacity * self.format.size) // _PAGE_BYTES) * _PAGE_BYTES


# Of a worker: a ticket that is over. Tickets of 8 ms fill the ring in 65 s.
TICKETS = RecordKind(
    8192, pid="I", loader="I", run="I", ticket="I", began_ns="Q", made_us="I", published_us="I", waited_us="I",
    epoch="I", batch="I", count="I", row_start="I", row_stop="I", slot="I", attempt="B", status="B",
)  # fmt: skip
# Of a worker: a call that took a millisecond or longer. One after the other they fill the ring in 33 s or more.
CALLS = RecordKind(32768, pid="I", ticket="I", began_ns="Q", index="Q", us="I", kind="H")
# Of the trainer and of the supervisor: a moment.
MARKS = RecordKind(65536, kind="I", at_ns="Q", value="Q", number="I", cell="H")
# Of a loader in the trainer: batches that were handed over at once. A thousand a second fill the ring in 65 s.
DELIVERIES = RecordKind(
    65536, run="I", epoch="I", batch="I", count="I", ticket="Q", slot="I", arrived_ns="Q", copied_us="I", way="B",
    asked_ns="Q", handed_over_ns="Q", waited_us="I", begins_pass="B",
)  # fmt: skip
# Of DELIVERIES the fields that tell where a delivery came from: run to way.
Origin = tuple[int, int, int, int, int, int, int, int, int]

_MARKS_BYTES = 2 * MARKS.ring_bytes  # the trainer's and the supervisor's
_WORKER_BYTES = TICKETS.ring_bytes + CALLS.ring_bytes


class Status(enum.IntEnum):
    """How a ticket ended."""

    FINISHED = 0
    FAILED = 1  # the user's code raised
    OVERSIZE = 2  # the batch is in a file of its own


class CallKind(enum.IntEnum):
    """What a record of CALLS is about."""

    CALL = 0  # of the user's function, for a source index
    SETUP = 1  # of the `setup` hook
    PROBE = 2  # for the first sample, or the first batch


class MarkKind(enum.IntEnum):
    """What a record of MARKS is about."""

    RELEASED = 1  # slot `number`, which held ticket `value`, is free again
    STARTED = 2  # worker `number` of this cell, as process `value`
    ENDED = 3  # worker `number` of this cell, process `value`
    WANTED = 4  # `number` workers
    SUPERVISOR = 5  # process `value` directs the workers from now on


class DeliveryKind(enum.IntEnum):
    """How batches of a delivery were handed over."""

    LENT = 0
    COPIED = 1
    OVERSIZE = 2  # in memory of their own, as they did not fit a slot
    MADE_HERE = 3  # in the trainer's own process


class RecordRing:
    """Writes records to shared memory. One process writes to a ring at a time, on any of its threads."""

    __slots__ = ("_buffer", "_first", "_head", "_mask", "_numbers", "_pack", "_size")

    def __init__(self, buffer: Any, at: int, kind: RecordKind) -> None:
        form = kind.format
        self._buffer, self._first, self._mask = buffer, at + _HEAD_BYTES, kind.capacity - 1
        self._pack, self._size = form.pack_into, form.size
        self._head = memoryview(buffer)[at : at + 8].cast("Q")
        self._numbers = itertools.count(self._head[0])  # goes on where the writer before has died; counts in one step

    def write(self, *fields: int) -> None:
        """Add a record; one with a number that its field has no room for is left out."""
        before = next(self._numbers)
        number = (before + 1) & _LOW
        at = self._first + (before & self._mask) * self._size
        try:
            # SYNC: in their order, so that a record that is half written begins and ends differently; see `read_ring`.
            self._pack(self._buffer, at, number, *fields, number & _CHECKED)
        except struct.error:
            return
        self._head[0] = before + 1


class WorkerRecorder:
    """Records what one worker does: its `ticket`, and for how long it waited before it. Runs in: the worker."""

    __slots__ = ("_calls", "_tickets", "pid", "ticket", "waited_ns")

    def __init__(self, tickets: RecordRing, calls: RecordRing) -> None:
        self._tickets, self._calls, self.pid = tickets, calls, os.getpid()
        self.ticket = self.waited_ns = 0

    def note_ticket(
        self, loader: int, run: int, began_ns: int, made_ns: int, published_ns: int, place: tuple[int, ...], status: int
    ) -> None:
        """A ticket is over: taken up, made and told of at these times.

        `place` is epoch, batch, count, rows (first and end), slot and attempt.
        """
        waited_us, self.waited_ns = min(self.waited_ns // 1000, _MOST_US), 0
        made_us, published_us = (made_ns - began_ns) // 1000, (published_ns - made_ns) // 1000
        if made_us > _MOST_US:
            made_us = _MOST_US
        times = began_ns, made_us, published_us, waited_us
        self._tickets.write(self.pid, loader, run, self.ticket & _LOW, *times, *place, status)

    def note_call(self, began_ns: int, ns: int, index: int, kind: int = CallKind.CALL) -> None:
        """A call is over that took a millisecond or longer."""
        self._calls.write(self.pid, self.ticket & _LOW, began_ns, index, min(ns // 1000, _MOST_US), kind)


class DeliveryRecorder(RecordRing):
    """Records what one loader hands over. Runs in: the trainer, on the thread that takes batches."""

    __slots__ = ("_made_at",)

    def __init__(self, buffer: Any, at: int) -> None:
        super().__init__(buffer, at, DELIVERIES)
        self._made_at = _forks

    def note(self, origin: Origin, asked_ns: int, now_ns: int, waited_ns: int, begins_pass: bool) -> None:
        """Batches of this origin were handed over, asked for then and waited for so long; a pass's first, or not."""
        if self._made_at == _forks:  # not a fork, which has the ring of the process that it is of
            self.write(*origin, asked_ns, now_ns, min(waited_ns // 1000, _MOST_US), begins_pass)


class MarkRecorder(RecordRing):
    """Records moments of one process, on any of its threads."""

    __slots__ = ()

    def __init__(self, buffer: Any, at: int) -> None:
        super().__init__(buffer, at, MARKS)

    def mark(self, kind: int, value: int, number: int = 0, cell: int = 0) -> None:
        """Note that this happens now."""
        self.write(kind, clock.monotonic_ns(), value, number, cell)


class RecorderMemory:
    """Where the rings of an arena lie, and what writes to them: in a small arena only the first `workers` have some.

    Args:
        at: where they begin.
        arena_bytes: of the arena.
        buffer: the arena's mapping; None: nothing is written.
    """

    def __init__(self, at: int, arena_bytes: int, buffer: Any = None) -> None:
        self._buffer = buffer
        self.trainer_at, self.supervisor_at = at, at + MARKS.ring_bytes
        self._first = at + _MARKS_BYTES
        self.workers = max(0, min(MAX_WORKERS, (arena_bytes // _SHARE - _MARKS_BYTES) // _WORKER_BYTES))
        self.end = self._first + self.workers * _WORKER_BYTES

    @functools.cached_property
    def trainer(self) -> MarkRecorder:
        """What records for the trainer."""
        return MarkRecorder(self._buffer, self.trainer_at)

    @functools.cached_property
    def supervisor(self) -> MarkRecorder:
        """What records for the supervisor."""
        return MarkRecorder(self._buffer, self.supervisor_at)

    def worker(self, cell: int) -> WorkerRecorder | None:
        """Return what records for the worker of this cell; None: it has no rings."""
        at = self.worker_at(cell)
        if at is None:
            return None
        tickets = RecordRing(self._buffer, at, TICKETS)
        return WorkerRecorder(tickets, RecordRing(self._buffer, at + TICKETS.ring_bytes, CALLS))

    def worker_at(self, cell: int) -> int | None:
        """Return where the tickets of this cell's worker begin, before its calls; None: it has no rings."""
        return self._first + cell * _WORKER_BYTES if cell < self.workers else None


class RingContent(NamedTuple):
    """What a ring held."""

    records: Records  # the oldest first
    is_full: bool  # there were older ones

    @property
    def since_ns(self) -> int:
        """From when on it has all; 0: from the beginning on."""
        if not self.is_full or not len(self.records):
            return 0
        names = self.records.dtype.names or ()
        return int(min(self.records[name][0] for name in _TIMES if name in names))


_TIMES = ("began_ns", "at_ns", "handed_over_ns")


def read_ring(read: ReadBytes, at: int, kind: RecordKind) -> RingContent:
    """Return the records that were whole. Runs in: any process, beside the ring's writer.

    They are read twice, and count where both are the same: one that was being written while it was read the first time
    is another one the second time.
    """
    written = int.from_bytes(read(at, 8), "little")
    # One more: of a writer that died before it could count it, or that is about to.
    count = min(written + 1, kind.capacity)
    first, again = (np.frombuffer(read(at + _HEAD_BYTES, count * kind.format.size), kind.dtype) for _ in range(2))
    numbers = again["serial"].astype(np.int64)
    is_whole = (numbers & _CHECKED) == again["check"]
    is_whole &= (first == again) & (numbers != 0)
    is_whole &= (numbers - 1) % kind.capacity == np.arange(count)
    # How far behind the latest one, in a count that begins again at 2**32; what was written meanwhile is before it.
    age = ((written & _LOW) - numbers + (1 << 31)) % (1 << 32) - (1 << 31)
    is_whole &= (age < kind.capacity) & (age > -kind.capacity)
    found = np.flatnonzero(is_whole)
    return RingContent(again[found[np.argsort(-age[found], kind="stable")]], written > kind.capacity)
