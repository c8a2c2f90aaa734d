"""The flight recorder: recent events of each process, as fixed-size records in shared rings.

    worker       ──▶ tickets and calls: in the arena, after the call times ─┐
    main process ──▶ deliveries of a loader: after the loader's page ───────┴─▶ `trainer/tracing.py`

The recorder is always on. One call in C writes a record, without a lock or a system call. A record
replaces the oldest one. A ring takes memory only where records were written. A writer may die
between any two bytes, so a record is valid only once its number is in the ring's head. A reader
drops records that may have been overwritten meanwhile (`read_ring`).
"""

from __future__ import annotations

import enum
import itertools
import mmap
import operator
import os
import struct
from collections.abc import Callable

from loaderpool.config import MAX_WORKERS

Record = dict[str, int]  # values by name of the field
ReadBytes = Callable[[int, int], bytes]  # (offset, number of bytes): reads shared memory

# Shortest call that gets a record. Smaller: records slow down functions of fast samples.
RECORDED_FROM_NS = 1_000_000
_LOW = 0xFFFFFFFF
_HEAD_BYTES = 64  # size of a ring's head, which has the number of the latest record, from 1 on
_SHARE = 8  # rings take at most this part (1/8) of an arena, so a small one has fewer rings
_PAGE_BYTES = 4096


class RecordKind:
    """Format of a ring and its records.

    Args:
        capacity: number of records in a ring, a power of two.
        fields: type of each field, as in `struct`. The record's number follows the fields.
    """

    def __init__(self, capacity: int, **fields: str) -> None:
        self.capacity, self.names = capacity, (*fields, "number")
        self.format = struct.Struct(f"<{''.join(fields.values())}Q")
        self.ring_bytes = (
            -(-(_HEAD_BYTES + capacity * self.format.size) // _PAGE_BYTES) * _PAGE_BYTES
        )


# Finished tickets of a worker. Tickets of 8 ms fill the ring in 65 s.
TICKETS = RecordKind(
    8192, pid="I", worker="I", ticket="I", began_ns="Q", ended_ns="Q", loader="I", run="I",
    epoch="I", batch="I", count="I", row_start="I", row_stop="I", attempt="B", has_failed="B",
)  # fmt: skip
# Calls of a worker that took a millisecond or longer. One after the other, they fill the ring in
# 33 s or more.
CALLS = RecordKind(32768, pid="I", ticket="I", began_ns="Q", ended_ns="Q", index="Q", kind="B")
# Deliveries of a loader in the main process: batches that were delivered together. A record starts
# at the request. A thousand deliveries per second fill the ring in 65 s.
DELIVERIES = RecordKind(
    65536, run="I", epoch="I", batch="I", count="I", way="B", began_ns="Q", ended_ns="Q",
    waited_ns="Q", begins_pass="B"
)  # fmt: skip
# Fields of DELIVERIES that name the origin of a delivery: run, epoch, batch, count and way.
Origin = tuple[int, int, int, int, int]

_WORKER_BYTES = TICKETS.ring_bytes + CALLS.ring_bytes


class CallKind(enum.IntEnum):
    """Kind of call in a record of CALLS."""

    CALL = 0  # the user's function, for a source index
    SETUP = 1  # the `setup` hook
    PROBE = 2  # the probe: the first sample, or the first batch


class DeliveryKind(enum.IntEnum):
    """Memory of the batches of a delivery."""

    LENT = 0  # views of a slot
    COPIED = 1  # copies
    OVERSIZE = 2  # memory of their own, because they did not fit a slot
    MADE_HERE = 3  # memory of the main process, which made them


class RecordRing:
    """Writer of records to a ring in shared memory.

    One process writes to a ring at a time, on any of its threads. Pairs with `read_ring`.
    """

    __slots__ = ("_buffer", "_first", "_head", "_mask", "_numbers", "_pack", "_size")

    def __init__(self, buffer: bytearray | mmap.mmap, at: int, kind: RecordKind) -> None:
        form = kind.format
        self._buffer, self._first, self._mask = buffer, at + _HEAD_BYTES, kind.capacity - 1
        self._pack, self._size = form.pack_into, form.size
        self._head = memoryview(buffer)[at : at + 8].cast("Q")
        # Continues the numbers of an earlier writer that died. `next` is atomic between threads.
        self._numbers = itertools.count(self._head[0])

    def write(self, *fields: int) -> None:
        """Add a record. A record with a value too large for its field is dropped."""
        before = next(self._numbers)
        try:
            self._pack(
                self._buffer, self._first + (before & self._mask) * self._size, *fields, before + 1
            )
        except struct.error:  # the record's number was not written, so readers skip the record
            return
        self._head[0] = before + 1  # SYNC: stored last; pairs with `read_ring`


class WorkerRecorder:
    """Records the tickets and long calls of one worker. Runs in: the worker.

    Args:
        buffer: the arena's mapping.
        at: offset of the worker's two rings: the ring of tickets, then the ring of calls.
        number: number of the worker.

    Attributes:
        ticket: number of the running ticket; each record of a call has it.
    """

    __slots__ = ("_calls", "_tickets", "number", "pid", "ticket")

    def __init__(self, buffer: bytearray | mmap.mmap, at: int, number: int) -> None:
        self._tickets = RecordRing(buffer, at, TICKETS)
        self._calls = RecordRing(buffer, at + TICKETS.ring_bytes, CALLS)
        self.pid, self.number, self.ticket = os.getpid(), number, 0

    def note_ticket(self, began_ns: int, ended_ns: int, place: tuple[int, ...]) -> None:
        """Record a finished ticket. `place` has the fields of TICKETS from `loader` on."""
        self._tickets.write(self.pid, self.number, self.ticket & _LOW, began_ns, ended_ns, *place)

    def note_call(
        self, began_ns: int, ended_ns: int, index: int, kind: int = CallKind.CALL
    ) -> None:
        """Record a finished call. Only calls of a millisecond or longer are recorded."""
        self._calls.write(self.pid, self.ticket & _LOW, began_ns, ended_ns, index, kind)


def worker_rings(at: int, arena_bytes: int) -> range:
    """Return the offsets of the workers' rings, indexed by cell.

    In a small arena, only the first cells have rings.

    Args:
        at: offset of the first ring in the arena.
        arena_bytes: size of the arena.
    """
    workers = min(MAX_WORKERS, arena_bytes // _SHARE // _WORKER_BYTES)
    return range(at, at + workers * _WORKER_BYTES, _WORKER_BYTES)


def read_ring(read: ReadBytes, at: int, kind: RecordKind) -> list[Record]:
    """Return the valid records of a ring, the oldest first.

    Runs in: any process, while the ring's writer may be writing. A record is valid if the head
    included it before the read, and if no later record can have overwritten it until after the
    read.
    """
    before = int.from_bytes(read(at, 8), "little")
    data = read(at + _HEAD_BYTES, min(before, kind.capacity) * kind.format.size)
    after = int.from_bytes(read(at, 8), "little") + 1  # number of the record being written
    records = (
        dict(zip(kind.names, values, strict=True)) for values in kind.format.iter_unpack(data)
    )
    whole = (each for each in records if max(0, after - kind.capacity) < each["number"] <= before)
    return sorted(whole, key=operator.itemgetter("number"))
