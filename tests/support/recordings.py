"""Records of a training in the recorders' format, made by hand."""

from __future__ import annotations

from typing import Any

from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import (
    DELIVERIES,
    DeliveryKind,
    Origin,
    RecordRing,
    WorkerRecorder,
    worker_rings,
)
from loaderpool.trainer.explain.page import PAGE_BYTES
from loaderpool.trainer.tracing import Tracing

MS = 1_000_000
TRAINER, LOADER, RUN = 100, 3, 9
NOW_NS = 100_000 * MS
ARENA_BYTES = 64 << 20  # has rings for four workers


class HandMadeRecording:
    """A training of one loader with one pool. Times are in milliseconds."""

    def __init__(self, workers: int = 2) -> None:
        at = BOARD_BYTES + CALL_TIMES_BYTES
        self._arena = bytearray(at + (ARENA_BYTES // 8))
        self.board = memoryview(self._arena)[:BOARD_BYTES].cast("Q")
        self._rings = worker_rings(at, ARENA_BYTES)
        self._deliveries = bytearray(DELIVERIES.ring_bytes)
        self._recorder = RecordRing(self._deliveries, 0, DELIVERIES)
        self.asked_ns = 0
        self._workers: list[WorkerRecorder] = []
        for cell in range(workers):
            self.start_worker(cell, cell, 200 + cell)

    def start_worker(self, cell: int, number: int, pid: int) -> None:
        """Start a worker, in a new cell or in that of a worker that has ended."""
        self.board[Board.base(cell) + Field.PID] = pid
        self.board[Board.base(cell) + Field.NUMBER] = number + 1
        Board(self._arena).cells = len({*range(Board(self._arena).cells), cell})
        if cell < len(self._rings):
            recorder = WorkerRecorder(self._arena, self._rings[cell], number)
            recorder.pid = pid
            self._workers[cell : cell + 1] = [recorder]

    def call(self, cell: int, began_ms: float, took_ms: float, index: int, ticket: int) -> None:
        self._workers[cell].ticket = ticket
        self._workers[cell].note_call(ns(began_ms), ns(began_ms + took_ms), index)

    def ticket(
        self,
        cell: int,
        began_ms: float,
        took_ms: float,
        batch: int,
        *,
        ticket: int,
        count: int = 1,
        rows: tuple[int, int] = (0, 8),
        epoch: int = 0,
        has_failed: bool = False,
    ) -> None:
        worker = self._workers[cell]
        worker.ticket = ticket
        place = (LOADER, RUN, epoch, batch, count, *rows, 0, has_failed)
        worker.note_ticket(ns(began_ms), ns(began_ms + took_ms), place)

    def delivery(
        self,
        asked_ms: float,
        waited_ms: float,
        batch: int,
        *,
        count: int = 1,
        epoch: int = 0,
        way: DeliveryKind = DeliveryKind.LENT,
        begins_pass: bool = False,
        run: int = RUN,
    ) -> None:
        origin: Origin = (run, epoch, batch, count, int(way))
        self._recorder.write(
            *origin, ns(asked_ms), ns(asked_ms + waited_ms), round(waited_ms * MS), begins_pass
        )

    def tracing(self, now_ms: float = 1_000.0, **more: Any) -> Tracing:
        """Return the trace at this time. `more` has the keys of the loader's page."""
        asked_s = (ns(now_ms) - self.asked_ns) / 1e9 if self.asked_ns else None
        told = {"loader": LOADER, "asked_s": asked_s, "looked_s": ns(now_ms) / 1e9, **more}
        found = Tracing(TRAINER, "python train.py", True, ns(now_ms), 1_700_000_000 * 10**9)
        arena, page = bytes(self._arena), bytes(PAGE_BYTES) + bytes(self._deliveries)
        found.add_pool(lambda at, nbytes: arena[at : at + nbytes], ARENA_BYTES)
        found.add_loader(told, lambda at, nbytes: page[at : at + nbytes])
        return found


def ns(at_ms: float) -> int:
    """Return a time of the monotonic clock, far from 0."""
    return NOW_NS + round(at_ms * MS)
