"""The flight recorder: what each process did lately, as records of a fixed size in rings in shared memory.

    worker ──▶ its tickets, its calls: in rings after the call times ─┐
    trainer ──▶ deliveries of one loader, after its page ─────────────┴─▶ `trainer/tracing.py`

It is always on. A record is written by one call in C, without a lock or a system call, and goes into memory that is
there only once it was written to; the oldest one makes way. A writer may die between any two bytes: a record counts
once its number stands in the ring's head, and a reader drops what may have been written over meanwhile (`read_ring`).
"""

from __future__ import annotations

import enum
import itertools
import operator
import os
import struct
from collections.abc import Callable
from typing import Any

from loaderpool.config import MAX_WORKERS

Record = dict[str, int]  # by its fields' names
ReadBytes = Callable[[int, int], bytes]  # from an offset so many

# A call that takes less is in no record of its own. Less: functions of fast samples would be slowed down by records.
RECORDED_FROM_NS = 1_000_000
_LOW = 0xFFFFFFFF
_HEAD_BYTES = 64  # of a ring: the number of the latest record, from 1 on
_SHARE = 8  # of a small arena rings take so much, and have room for fewer workers
_PAGE_BYTES = 4096


class RecordKind:
    """What a ring's records are made of.

    Args:
        capacity: how many records a ring holds; a power of two.
        fields: of each name the type, as `struct` has it; the record's number stands after them.
    """

    def __init__(self, capacity: int, **fields: str) -> None:
        self.capacity, self.names = capacity, (*fields, "number")
        self.format = struct.Struct(f"<{''.join(fields.values())}Q")
        self.ring_bytes = (
            -(-(_HEAD_BYTES + capacity * self.format.size) // _PAGE_BYTES) * _PAGE_BYTES
        )


# Of a worker: a ticket that is over. Tickets of 8 ms fill the ring in 65 s.
TICKETS = RecordKind(
    8192, pid="I", worker="I", ticket="I", began_ns="Q", ended_ns="Q", loader="I", run="I", epoch="I", batch="I",
    count="I", row_start="I", row_stop="I", attempt="B", has_failed="B",
)  # fmt: skip
# Of a worker: a call that took a millisecond or longer. One after the other they fill the ring in 33 s or more.
CALLS = RecordKind(32768, pid="I", ticket="I", began_ns="Q", ended_ns="Q", index="Q", kind="B")
# Of a loader in the trainer: batches that were handed over at once, from when they were asked for on. A thousand a
# second fill the ring in 65 s.
DELIVERIES = RecordKind(
    65536, run="I", epoch="I", batch="I", count="I", way="B", began_ns="Q", ended_ns="Q", waited_ns="Q", begins_pass="B"
)  # fmt: skip
# Of DELIVERIES the fields that tell where a delivery came from: run to way.
Origin = tuple[int, int, int, int, int]

_WORKER_BYTES = TICKETS.ring_bytes + CALLS.ring_bytes


class CallKind(enum.IntEnum):
    """What a record of CALLS is about."""

    CALL = 0  # of the user's function, for a source index
    SETUP = 1  # of the `setup` hook
    PROBE = 2  # for the first sample, or the first batch


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
        self._numbers = itertools.count(
            self._head[0]
        )  # goes on where the writer before has died; counts in one step

    def write(self, *fields: int) -> None:
        """Add a record; one with a number that its field has no room for is left out."""
        before = next(self._numbers)
        try:
            self._pack(
                self._buffer, self._first + (before & self._mask) * self._size, *fields, before + 1
            )
        except struct.error:  # and its number is not there
            return
        self._head[0] = before + 1  # SYNC: stored last; pairs with `read_ring`


class WorkerRecorder:
    """Records what one worker does, among it each call with the `ticket` that it is of. Runs in: the worker.

    Args:
        buffer: the arena's mapping.
        at: where the worker's rings begin: that of its tickets, then that of its calls.
        number: the worker's.
    """

    __slots__ = ("_calls", "_tickets", "number", "pid", "ticket")

    def __init__(self, buffer: Any, at: int, number: int) -> None:
        self._tickets = RecordRing(buffer, at, TICKETS)
        self._calls = RecordRing(buffer, at + TICKETS.ring_bytes, CALLS)
        self.pid, self.number, self.ticket = os.getpid(), number, 0

    def note_ticket(self, began_ns: int, ended_ns: int, place: tuple[int, ...]) -> None:
        """The ticket is over; `place` is all that TICKETS has from the loader on."""
        self._tickets.write(self.pid, self.number, self.ticket & _LOW, began_ns, ended_ns, *place)

    def note_call(
        self, began_ns: int, ended_ns: int, index: int, kind: int = CallKind.CALL
    ) -> None:
        """A call is over that took a millisecond or longer."""
        self._calls.write(self.pid, self.ticket & _LOW, began_ns, ended_ns, index, kind)


def worker_rings(at: int, arena_bytes: int) -> range:
    """Return where the rings of each worker begin, by its cell, from this place on: in a small arena few have some."""
    workers = min(MAX_WORKERS, arena_bytes // _SHARE // _WORKER_BYTES)
    return range(at, at + workers * _WORKER_BYTES, _WORKER_BYTES)


def read_ring(read: ReadBytes, at: int, kind: RecordKind) -> list[Record]:
    """Return the records that were whole, the oldest first. Runs in: any process, beside the ring's writer.

    Those count that were in the head before they were read, and whose places no later ones can have taken until after.
    """
    before = int.from_bytes(read(at, 8), "little")
    data = read(at + _HEAD_BYTES, min(before, kind.capacity) * kind.format.size)
    after = int.from_bytes(read(at, 8), "little") + 1  # which one is being written
    records = (
        dict(zip(kind.names, values, strict=True)) for values in kind.format.iter_unpack(data)
    )
    whole = (each for each in records if max(0, after - kind.capacity) < each["number"] <= before)
    return sorted(whole, key=operator.itemgetter("number"))
