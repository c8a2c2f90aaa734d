"""Recordings that are made up, written by the recorders that processes have."""

from __future__ import annotations

from typing import Any

from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import (
    DELIVERIES,
    DeliveryKind,
    DeliveryRecorder,
    MarkKind,
    Origin,
    RecorderMemory,
    Status,
    WorkerRecorder,
    read_ring,
)
from loaderpool.trainer.tracing import LoaderRecords, Recording, read_pool

MS = 1_000_000
TRAINER, SUPERVISOR, LOADER, RUN = 100, 101, 3, 9
NOW_NS = 100_000 * MS
ARENA_BYTES = 64 << 20  # has rings for two workers


class HandMadeRecording:
    """A training of one loader with one pool, whose times are said in milliseconds."""

    def __init__(self, workers: int = 2) -> None:
        at = BOARD_BYTES + CALL_TIMES_BYTES
        self._arena = bytearray(at + (ARENA_BYTES // 8))
        self.board = memoryview(self._arena)[:BOARD_BYTES].cast("Q")
        self._region = RecorderMemory(at, ARENA_BYTES, self._arena)
        self._deliveries = bytearray(DELIVERIES.ring_bytes)
        self._recorder = DeliveryRecorder(self._deliveries, 0)
        self._now_ns = 0
        self.asked_ns = 0
        self.region_workers = self._region.workers
        self.mark_supervisor(0, MarkKind.SUPERVISOR, SUPERVISOR)
        self._workers: list[WorkerRecorder] = []
        for cell in range(workers):
            self.start_worker(0, cell, cell, 200 + cell)

    def start_worker(self, at_ms: float, cell: int, number: int, pid: int) -> None:
        """A worker begins, in a new cell or in one whose worker has ended."""
        self.board[Board.base(cell) + Field.PID] = pid
        self.mark_supervisor(at_ms, MarkKind.STARTED, pid, number, cell)
        recorder = self._region.worker(cell)
        if recorder is not None:
            recorder.pid = pid
            self._workers[cell : cell + 1] = [recorder]

    def mark_supervisor(self, at_ms: float, kind: MarkKind, value: int, number: int = 0, cell: int = 0) -> None:
        self._region.supervisor.write(kind, ns(at_ms), value, number, cell)

    def mark_trainer(self, at_ms: float, kind: MarkKind, value: int, number: int = 0) -> None:
        self._region.trainer.write(kind, ns(at_ms), value, number, 0)

    def call(self, cell: int, began_ms: float, took_ms: float, index: int, ticket: int) -> None:
        self._workers[cell].ticket = ticket
        self._workers[cell].note_call(ns(began_ms), round(took_ms * MS), index)

    def ticket(
        self,
        cell: int,
        began_ms: float,
        took_ms: float,
        batch: int,
        *,
        ticket: int,
        slot: int = 5,
        count: int = 1,
        rows: tuple[int, int] = (0, 8),
        epoch: int = 0,
        waited_ms: float = 0.0,
        status: int = Status.FINISHED,
    ) -> None:
        worker, began_ns = self._workers[cell], ns(began_ms)
        worker.ticket = ticket
        worker.waited_ns = round(waited_ms * MS)
        made_ns = began_ns + round(took_ms * MS)
        place = (epoch, batch, count, *rows, slot, 0)
        worker.note_ticket(LOADER, RUN, began_ns, made_ns, made_ns + 20_000, place, status)

    def delivery(
        self,
        asked_ms: float,
        waited_ms: float,
        batch: int,
        *,
        ticket: int = 0,
        slot: int = 5,
        count: int = 1,
        epoch: int = 0,
        arrived_ms: float | None = None,
        copied_ms: float = 0.0,
        way: DeliveryKind = DeliveryKind.LENT,
        begins_pass: bool = False,
        run: int = RUN,
    ) -> None:
        handed_over_ns = ns(asked_ms) + round(waited_ms * MS)
        arrived_ns = handed_over_ns if arrived_ms is None else ns(arrived_ms)
        copied_us = round(copied_ms * 1000)
        origin: Origin = (run, epoch, batch, count, ticket, slot, arrived_ns, copied_us, int(way))
        self._recorder.note(origin, ns(asked_ms), handed_over_ns, round(waited_ms * MS), begins_pass)

    def recording(self, now_ms: float = 1_000.0, **more: Any) -> Recording:
        """Return it as it is read at this time."""
        arena = bytes(self._arena)
        pool = read_pool(lambda at, nbytes: arena[at : at + nbytes], ARENA_BYTES, has_nodes=False)
        content = bytes(self._deliveries)
        deliveries = read_ring(lambda at, nbytes: content[at : at + nbytes], 0, DELIVERIES)
        about = {"number": LOADER, "pool": 0, "calls_of": "sample", "has_nodes": False, **more}
        loader = LoaderRecords(deliveries=deliveries, asked_ns=self.asked_ns, **about)
        pools = [pool] if loader.pool is not None else []
        return Recording(TRAINER, "python train.py", [loader], pools, ns(now_ms), 1_700_000_000 * 10**9)


def ns(at_ms: float) -> int:
    """Return a time of the monotonic clock, which is not near its beginning."""
    return NOW_NS + round(at_ms * MS)
