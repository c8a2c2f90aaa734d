"""What is read of the flight recorders of one training, wherever that is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import CALLS, MARKS, TICKETS, ReadBytes, RecorderPlaces, RingContent, read_ring
from loaderpool.system import clock

# The two clocks are read so often, and the reading counts that took least.
_READINGS = 16


class WorkerRecords(NamedTuple):
    """Of the workers that had one cell, one after the other."""

    pid: int  # of the latest
    tickets: RingContent  # that are over
    calls: RingContent  # that took a millisecond or longer
    running: tuple[int, int, int] | None  # the latest's item, of how many it is the first, and since when; None: none


class PoolRecords(NamedTuple):
    """Of one pool."""

    workers: Mapping[int, WorkerRecords]  # by cell
    trainer: RingContent  # its marks
    supervisor: RingContent  # its marks
    unrecorded: int  # workers that have no rings, as the arena is small


class LoaderRecords(NamedTuple):
    """Of one loader in the trainer."""

    number: int | None  # in its pool; None: batches are made in the trainer
    pool: int | None  # which of the recording's pools; None: it has none, or that could not be read
    calls_of: str  # "sample" or "batch": what a call makes
    has_nodes: bool  # other machines make its batches
    deliveries: RingContent
    asked_ns: int  # since when a batch is waited for; 0: none is


class Recording(NamedTuple):
    """Of one training."""

    pid: int  # the trainer's
    command: str  # its command line, or another name for it
    loaders: Sequence[LoaderRecords]  # those that have delivered a batch
    pools: Sequence[PoolRecords]  # that they have their workers of
    now_ns: int  # when this was read, by the monotonic clock
    wall_ns: int  # the same moment by the clock that other programs' files know


def read_clocks() -> tuple[int, int]:
    """Return one moment by the monotonic and by the wall clock, to about a microsecond."""
    readings = []
    for _ in range(_READINGS):
        before_ns, wall_ns, after_ns = clock.monotonic_ns(), clock.wall_ns(), clock.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2, wall_ns))
    _, monotonic_ns, wall_ns = min(readings)
    return monotonic_ns, wall_ns


def read_pool(read: ReadBytes, arena_bytes: int, has_nodes: bool) -> PoolRecords:
    """Return what an arena's rings hold, and what its workers are at. Takes some milliseconds for each worker.

    Args:
        read: reads the arena.
        arena_bytes: its length.
        has_nodes: its cells are of nodes, whose workers record where they are.
    """
    places = RecorderPlaces(BOARD_BYTES + CALL_TIMES_BYTES, arena_bytes)
    board = Board(read(0, BOARD_BYTES))
    pids = {} if has_nodes else board.pids()
    workers: dict[int, WorkerRecords] = {}
    for cell, pid in pids.items():
        at, running = places.worker(cell), None
        if at is not None:
            if index := board.read(cell, Field.INDEX):
                running = index - 1, max(1, board.read(cell, Field.BLOCK)), board.read(cell, Field.STARTED_NS)
            calls = read_ring(read, at + TICKETS.ring_bytes, CALLS)
            workers[cell] = WorkerRecords(pid, read_ring(read, at, TICKETS), calls, running)
    trainer, supervisor = (read_ring(read, at, MARKS) for at in (places.trainer, places.supervisor))
    return PoolRecords(workers, trainer, supervisor, len(pids) - len(workers))
