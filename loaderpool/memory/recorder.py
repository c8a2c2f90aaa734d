"""The flight recorder: what each process did lately, as records of a fixed size in rings in shared memory.

    worker ──▶ its tickets, its calls ─┐
    supervisor ──▶ its marks ──────────┼─▶ rings behind the call times ──▶ who asks what happened, in any process
    trainer ──▶ its marks ─────────────┘
    trainer ──▶ deliveries of one loader, in a memory file of its own

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

from loaderpool.settings.groups import MAX_WORKERS
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


_forks = 0  # of which this process is the child; to ask for its pid is a system call


def _note_fork() -> None:
    global _forks
    _forks += 1


machine.at_forks(after_in_child=_note_fork)


class RecordKind(NamedTuple):
    """What a ring's records are made of.

    Args:
        capacity: how many records a ring holds; a power of two.
        fields: name and type of each field, as `struct` has them; the record's number stands before and behind them.
    """

    capacity: int
    fields: tuple[tuple[str, str], ...]

    @property
    def format(self) -> struct.Struct:
        """How `struct` writes one."""
        return struct.Struct("<I" + "".join(letter for _, letter in self.fields) + "H")

    @property
    def dtype(self) -> np.dtype[Any]:
        """How NumPy reads one."""
        letters = {"I": "<u4", "Q": "<u8", "B": "u1", "H": "<u2"}
        fields = [("serial", "I"), *self.fields, ("check", "H")]
        return np.dtype([(name, letters[letter]) for name, letter in fields])

    @property
    def ring_bytes(self) -> int:
        """Bytes of a ring of them, in whole pages."""
        return -(-(_HEAD_BYTES + self.capacity * self.format.size) // _PAGE_BYTES) * _PAGE_BYTES


def _kind(capacity: int, /, **fields: str) -> RecordKind:
    return RecordKind(capacity, tuple(fields.items()))


# Of a worker: a ticket that is over. Tickets of 8 ms fill the ring in 65 s.
TICKETS = _kind(
    8192, pid="I", loader="I", run="I", ticket="I", began_ns="Q", made_us="I", published_us="I", waited_us="I",
    epoch="I", batch="I", count="I", row_start="I", row_stop="I", slot="I", attempt="B", status="B",
)  # fmt: skip
# Of a worker: a call that took a millisecond or longer. One after the other they fill the ring in 33 s or more.
CALLS = _kind(32768, pid="I", ticket="I", began_ns="Q", index="Q", us="I", kind="H")
# Of the trainer and of the supervisor: a moment.
MARKS = _kind(65536, kind="I", at_ns="Q", value="Q", number="I", cell="H")
# Of a loader in the trainer: batches that were handed over at once. A thousand a second fill the ring in 65 s.
DELIVERIES = _kind(
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
    """Writes records. One process writes to a ring at a time, on any of its threads.

    Args:
        buffer: memory that is shared.
        at: where the ring begins.
        kind: of its records.
    """

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
    """Records what one worker does. Runs in: the worker.

    Attributes:
        pid: its process, as others had its rings before.
        ticket: that it is at.
        waited_ns: how long it has waited for the next ticket.
    """

    __slots__ = ("_calls", "_tickets", "pid", "ticket", "waited_ns")

    def __init__(self, tickets: RecordRing, calls: RecordRing) -> None:
        self._tickets, self._calls, self.pid = tickets, calls, os.getpid()
        self.ticket = self.waited_ns = 0

    def note_ticket(
        self, loader: int, run: int, began_ns: int, made_ns: int, published_ns: int, place: tuple[int, ...], status: int
    ) -> None:
        """A ticket is over.

        Args:
            loader: its number.
            run: its number.
            began_ns: when the worker took the ticket up.
            made_ns: when its rows were in the slot.
            published_ns: when trainer and supervisor were told.
            place: epoch, batch, count, rows (first and end), slot and attempt.
            status: what came of it.
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


class DeliveryRecorder:
    """Records what one loader hands over. Runs in: the trainer, on the thread that takes batches.

    Args:
        buffer: memory that is shared, or not.
        at: where the ring begins in it.
    """

    def __init__(self, buffer: Any, at: int) -> None:
        self._ring, self._made_at = RecordRing(buffer, at, DELIVERIES), _forks

    def note(self, origin: Origin, asked_ns: int, now_ns: int, waited_ns: int, begins_pass: bool) -> None:
        """Batches were handed over.

        Args:
            origin: of the batches.
            asked_ns: when they were asked for.
            now_ns: when they were handed over.
            waited_ns: how long they were waited for.
            begins_pass: they are a pass's first.
        """
        if self._made_at == _forks:  # not a fork, which has the ring of the process that it is of
            self._ring.write(*origin, asked_ns, now_ns, min(waited_ns // 1000, _MOST_US), begins_pass)


class MarkRecorder:
    """Records moments of one process."""

    __slots__ = ("_marks",)

    def __init__(self, marks: RecordRing) -> None:
        self._marks = marks

    def mark(self, kind: int, value: int, number: int = 0, cell: int = 0) -> None:
        """Note that this happens now."""
        self._marks.write(kind, clock.monotonic_ns(), value, number, cell)


class RecorderMemory:
    """The rings of an arena.

    Args:
        buffer: the arena's mapping.
        at: where they begin.
        arena_bytes: of the arena: in a small one only the first workers have rings.
    """

    def __init__(self, buffer: Any, at: int, arena_bytes: int) -> None:
        self._buffer, self._at = buffer, at
        self.places = RecorderPlaces(at, arena_bytes)

    @functools.cached_property
    def trainer(self) -> MarkRecorder:
        """What records for the trainer: one for all of its threads."""
        return MarkRecorder(RecordRing(self._buffer, self.places.trainer, MARKS))

    @functools.cached_property
    def supervisor(self) -> MarkRecorder:
        """What records for the supervisor."""
        return MarkRecorder(RecordRing(self._buffer, self.places.supervisor, MARKS))

    def worker(self, cell: int) -> WorkerRecorder | None:
        """Return what records for the worker of this cell; None: it has no rings."""
        at = self.places.worker(cell)
        if at is None:
            return None
        tickets = RecordRing(self._buffer, at, TICKETS)
        return WorkerRecorder(tickets, RecordRing(self._buffer, at + TICKETS.ring_bytes, CALLS))


class RecorderPlaces:
    """Where the rings of an arena lie.

    Attributes:
        trainer: where those of the trainer's marks begin.
        supervisor: where those of the supervisor's do.
        workers: so many have rings.
        end: the first byte behind all of them.
    """

    def __init__(self, at: int, arena_bytes: int) -> None:
        self.trainer, self.supervisor = at, at + MARKS.ring_bytes
        self._first = at + _MARKS_BYTES
        self.workers = max(0, min(MAX_WORKERS, (arena_bytes // _SHARE - _MARKS_BYTES) // _WORKER_BYTES))
        self.end = self._first + self.workers * _WORKER_BYTES

    def worker(self, cell: int) -> int | None:
        """Return where the tickets of this cell's worker begin, before its calls; None: it has no rings."""
        return self._first + cell * _WORKER_BYTES if cell < self.workers else None


class RingContent(NamedTuple):
    """What a ring held.

    Attributes:
        records: the oldest first.
        is_full: there were older ones.
    """

    records: Records
    is_full: bool

    @property
    def since_ns(self) -> int:
        """From when on it has all; 0: from the beginning on."""
        if not self.is_full or not len(self.records):
            return 0
        names = self.records.dtype.names or ()
        return int(min(self.records[name][0] for name in _TIMES if name in names))


_TIMES = ("began_ns", "at_ns", "handed_over_ns")


def no_records(kind: RecordKind) -> RingContent:
    """Return what a ring holds that was never written to."""
    return RingContent(np.empty(0, kind.dtype), False)


def read_ring(read: ReadBytes, at: int, kind: RecordKind) -> RingContent:
    """Return the records that were whole. Runs in: any process, beside the ring's writer.

    They are read twice, and count where both are the same: one that was being written while it was read the first time
    is another one the second time.
    """
    form, dtype = kind.format, kind.dtype
    written = int.from_bytes(read(at, 8), "little")
    # One more: of a writer that died before it could count it, or that is about to.
    count = min(written + 1, kind.capacity)
    first, again = (read(at + _HEAD_BYTES, count * form.size) for _ in range(2))
    return whole_records(np.frombuffer(first, dtype), np.frombuffer(again, dtype), written, kind.capacity)


def whole_records(first: Records, again: Records, written: int, count: int) -> RingContent:
    """Return the records that two reads have found whole.

    Args:
        first: the ring's records, as they were read first.
        again: the same a moment later, or fewer.
        written: how many were ever written, before the first read.
        count: how many the ring has room for.
    """
    first = first[: len(again)]
    numbers = again["serial"].astype(np.int64)
    is_whole = (numbers & _CHECKED) == again["check"]
    is_whole &= (first == again) & (numbers != 0)
    is_whole &= (numbers - 1) % count == np.arange(len(again))
    # How far behind the latest one, in a count that begins again at 2**32; what was written meanwhile is before it.
    age = ((written & _LOW) - numbers + (1 << 31)) % (1 << 32) - (1 << 31)
    is_whole &= (age < count) & (age > -count)
    found = np.flatnonzero(is_whole)
    return RingContent(again[found[np.argsort(-age[found], kind="stable")]], written > count)
