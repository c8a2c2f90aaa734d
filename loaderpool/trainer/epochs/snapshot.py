"""Takes the snapshot that `Loader.statistics()` returns."""

from __future__ import annotations

from typing import Literal

from loaderpool.cache.counters import CacheCounts
from loaderpool.memory.board import Field
from loaderpool.system import machine
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.statistics import Statistics, WorkerStatistics
from loaderpool.transport.payload.captured import CapturedData
from loaderpool.transport.payload.placement import Placement


def take_snapshot(tracker: EpochTracker, engine: Engine | None) -> Statistics:
    """The counts of a loader's passes, and of its ring and pool where it has them."""
    counters = tracker.counters
    elapsed_s = (counters.last_ns - counters.first_ns) / 1e9
    samples_per_s = (counters.samples - counters.first_samples) / elapsed_s if elapsed_s > 0 else 0.0
    workers: tuple[WorkerStatistics, ...] = ()
    slots = slot_bytes = slots_lent = lent = copied = oversize = restarts = supervisor_restarts = 0
    workers_start: Literal["fork", "exec"] | None = None
    placements, packed = [Placement()], 0
    captured: tuple[CapturedData, ...] = ()
    feeds = None
    cached = engine.cache.counts() if engine is not None and engine.cache is not None else CacheCounts()
    if isinstance(engine, PoolEngine):
        workers_start = "exec" if engine.session.obstacles else "fork"
        workers = _workers(engine)
        placements, packed, captured = [engine.placement], engine.packed_items, engine.captured
        feeds = engine.feeds
        if feeds is not None:
            placements.append(feeds.placement)
        restarts = engine.session.restarts
        supervisor_restarts = engine.session.supervisor_restarts
        lent, copied, oversize = engine.counts.lent, engine.counts.copied, engine.counts.oversize
        if engine.layout is not None:
            ring = engine.layout.ring
            slots, slot_bytes, slots_lent = ring.count, ring.slot_bytes, len(ring.lender.lent)
    return Statistics(
        passes=counters.passes,
        epoch=tracker.epoch,
        batches=counters.batches,
        samples=counters.samples,
        bytes=counters.nbytes,
        elapsed_s=elapsed_s,
        samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * counters.nbytes / max(1, counters.samples),
        padding_share=counters.padding / max(1, counters.padded),
        consumer_wait_s=counters.wait_ns / 1e9,
        worker_wait_s=sum(worker.wait_s for worker in workers),
        slots=slots,
        slot_bytes=slot_bytes,
        slots_lent=slots_lent,
        batches_lent=lent,
        batches_copied=copied,
        batches_oversize=oversize,
        repeated_rows=tracker.plan.repeated_rows,
        skipped_indices=tuple(counters.skipped),
        replaced_indices=tuple(counters.replaced),
        errors=counters.errors,
        restarts=restarts,
        supervisor_restarts=supervisor_restarts,
        items_packed=packed,
        captured_packed=tuple(str(each) for each in captured if not each.left_because),
        captured_not_packed=tuple(str(each) for each in captured if each.left_because),
        data_bytes_shared=sum(placement.shared_bytes for placement in placements),
        data_bytes_copied=sum(placement.copied_bytes for placement in placements),
        data_copied_because=tuple(reason for placement in placements for reason in placement.copied_because),
        stream_read_by=None if feeds is None else feeds.read_by,
        stream_on_thread_because="" if feeds is None else feeds.why_on_thread,
        cache_hits=cached.hits,
        cache_misses=cached.misses,
        cache_damaged=cached.damaged,
        cache_bytes=cached.bytes,
        cache_is_full=cached.is_full,
        workers_start=workers_start,
        workers=workers,
    )


def _workers(engine: PoolEngine) -> tuple[WorkerStatistics, ...]:
    session = engine.session
    if session.is_closed:
        return ()
    session.catch_up()
    board = session.arena.board
    return tuple(
        WorkerStatistics(
            index=worker.number,
            pid=worker.pid,
            batches=board.read(worker.cell, Field.BATCHES),
            samples=board.read(worker.cell, Field.SAMPLES),
            busy_s=board.read(worker.cell, Field.BUSY_NS) / 1e9,
            wait_s=board.read(worker.cell, Field.WAIT_NS) / 1e9,
            cpu_s=machine.process_cpu_s(worker.pid),
        )
        for worker in list(session.workers.values())
    )
