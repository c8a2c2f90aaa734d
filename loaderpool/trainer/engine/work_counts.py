"""What an engine counts for a look at its loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.memory.board import Field
from loaderpool.memory.call_times import CallTimes, read_call_times
from loaderpool.system import cpu_time
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.explain.looks import WorkCounts, WorkerCounts

if TYPE_CHECKING:
    from loaderpool.trainer.engine.delivery import Engine


def count_calls(engine: Engine | None) -> CallTimes | None:
    """Return how long calls took so far, also of workers that are gone; None: nothing counts them, or not any more."""
    if not isinstance(engine, PoolEngine) or engine.session.is_closed:
        return None
    session = engine.session
    return read_call_times(session.arena.call_times, list(session.workers.cells), engine.number)


def count_work(engine: Engine | None) -> WorkCounts:
    """Return the numbers of this moment. Takes some 25 us for each worker: files of the kernel's are read."""
    if not isinstance(engine, PoolEngine) or engine.session.is_closed:
        return WorkCounts()
    session, layout = engine.session, engine.layout
    board, found = session.arena.board, list(session.workers.values())
    workers = {
        worker.number: WorkerCounts(
            worker.pid,
            1 if worker.place is None else worker.place.workers,
            board.read(worker.cell, Field.BUSY_NS),
            board.read(worker.cell, Field.WAIT_NS),
            cpu_time.process_cpu_s(worker.pid) if worker.pid else 0.0,
            cpu_time.queued_s(worker.pid) if worker.pid else 0.0,
            board.read(worker.cell, Field.SAMPLES),
            cpu_time.disk_read_bytes(worker.pid) if worker.pid else 0,
        )
        for worker in found
    }
    calls = count_calls(engine) or CallTimes()
    if layout is None:
        return WorkCounts(workers, calls)
    ring = layout.ring
    return WorkCounts(
        workers,
        calls,
        slots=ring.plan.most_slots,
        slots_lent=len(ring.lender.lent),
        slots_wanted=ring.slots_wanted,
        slot_bytes=ring.slot_bytes,
        copied=engine.counts.copied,
        copied_ns=engine.counts.copied_ns,
        slots_ready=sum(run.slots_ready for run in list(engine.runs.values())),
        load_time=engine.counts.load_time,
    )
