"""What is read of the flight recorders of one training, wherever that is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import CALLS, MARKS, TICKETS, ReadBytes, RecorderPlaces, RingContent, read_ring
from loaderpool.system import clock

# The two clocks are read so often, and the reading counts that took least.
_READINGS = 16


class RunningItem(NamedTuple):
    """What a worker is at."""

    item: int  # its source index, or a generator's position
    items: int  # of how many it is the first that are made as a block
    since_ns: int


@dataclasses.dataclass(frozen=True)
class WorkerRecords:
    """Of the workers that had one cell, one after the other.

    Attributes:
        pid: of the latest.
        tickets: that are over.
        calls: that took a millisecond or longer.
        running: what the latest is at; None: nothing that is known.
    """

    pid: int
    tickets: RingContent
    calls: RingContent
    running: RunningItem | None = None


@dataclasses.dataclass(frozen=True)
class PoolRecords:
    """Of one pool.

    Attributes:
        workers: by cell.
        trainer: its marks.
        supervisor: its marks.
        unrecorded: workers that have no rings, as the arena is small.
    """

    workers: Mapping[int, WorkerRecords]
    trainer: RingContent
    supervisor: RingContent
    unrecorded: int = 0


@dataclasses.dataclass(frozen=True)
class LoaderRecords:
    """Of one loader in the trainer.

    Attributes:
        number: in its pool; None: batches are made in the trainer.
        pool: which of the recording's pools; None: it has none, or that could not be read.
        calls_of: "sample" or "batch": what a call makes.
        has_hosts: other machines make its batches.
        deliveries: that were handed over.
        asked_ns: since when a batch is waited for; 0: none is.
    """

    number: int | None
    pool: int | None
    calls_of: str
    has_hosts: bool
    deliveries: RingContent
    asked_ns: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """Of one training.

    Attributes:
        pid: the trainer's.
        command: its command line, or another name for it.
        loaders: those that have delivered a batch.
        pools: that they have their workers of.
        now_ns: when this was read, by the monotonic clock.
        wall_ns: the same moment by the clock that other programs' files know.
    """

    pid: int
    command: str
    loaders: Sequence[LoaderRecords]
    pools: Sequence[PoolRecords]
    now_ns: int
    wall_ns: int


def read_clocks() -> tuple[int, int]:
    """Return one moment by the monotonic and by the wall clock, to about a microsecond."""
    readings = []
    for _ in range(_READINGS):
        before_ns, wall_ns, after_ns = clock.monotonic_ns(), clock.wall_ns(), clock.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2, wall_ns))
    _, monotonic_ns, wall_ns = min(readings)
    return monotonic_ns, wall_ns


def read_pool(read: ReadBytes, arena_bytes: int, has_hosts: bool) -> PoolRecords:
    """Return what an arena's rings hold, and what its workers are at. Takes some milliseconds for each worker.

    Args:
        read: reads the arena.
        arena_bytes: its length.
        has_hosts: its cells are of hosts, whose workers record where they are.
    """
    places = RecorderPlaces(BOARD_BYTES + CALL_TIMES_BYTES, arena_bytes)
    board = Board(read(0, BOARD_BYTES))
    workers: dict[int, WorkerRecords] = {}
    unrecorded = 0
    for cell, pid in {} if has_hosts else board.pids().items():
        at = places.worker(cell)
        if at is None:
            unrecorded += 1
            continue
        tickets = read_ring(read, at, TICKETS)
        calls = read_ring(read, at + TICKETS.ring_bytes, CALLS)
        workers[cell] = WorkerRecords(pid, tickets, calls, _running(board, cell))
    trainer, supervisor = (read_ring(read, at, MARKS) for at in (places.trainer, places.supervisor))
    return PoolRecords(workers, trainer, supervisor, unrecorded)


def _running(board: Board, cell: int) -> RunningItem | None:
    index = board.read(cell, Field.INDEX)
    if not index:
        return None
    return RunningItem(index - 1, max(1, board.read(cell, Field.BLOCK)), board.read(cell, Field.STARTED_NS))
