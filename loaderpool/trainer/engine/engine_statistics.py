"""What an engine knows for `Loader.statistics()`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from loaderpool.memory.board import Board, Field, HostField
from loaderpool.system import capacity

if TYPE_CHECKING:
    from loaderpool.trainer.engine.ring import Ring
    from loaderpool.trainer.engine.run_context import DeliveryCounts
    from loaderpool.trainer.session.engine_session import EngineSession, WorkerProcess
    from loaderpool.trainer.stream.feeds import StreamFeeds
    from loaderpool.transport.payload.ship import Placement, Shipment

_STATES: tuple[Literal["starting"], Literal["running"], Literal["leaving"]] = ("starting", "running", "leaving")


@dataclasses.dataclass(frozen=True)
class WorkerStatistics:
    """A worker's counts since it started; in a `RayPool` those of a host."""

    index: int  # never used again: a replacement has the next one
    pid: int | None  # None: a host
    batches: int  # finished
    samples: int
    busy_s: float  # at work
    wait_s: float  # for memory or work
    cpu_s: float  # 0.0 of a host
    host: str = ""  # its node's address


@dataclasses.dataclass(frozen=True)
class HostStatistics:
    """Counts of a `RayPool`'s host, which is its actor on a node."""

    node: str  # Ray's id
    address: str
    workers: int  # 0 while it starts
    state: Literal["starting", "running", "leaving"]
    batches: int  # that it made
    busy_s: float  # sum of its workers


@dataclasses.dataclass(frozen=True)
class MemoryStatistics:
    """The slots in shared memory that batches are written to."""

    slots: int = 0  # 0 before the first batch
    slot_bytes: int = 0  # size of one
    slots_lent: int = 0  # that the training's arrays use now
    batches_lent: int = 0  # given without a copy
    batches_copied: int = 0  # as too few slots were free
    batches_oversize: int = 0  # larger than a slot


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """An engine's share of `Statistics`, which says what each is; as they stand here, one that has nothing of it."""

    memory: MemoryStatistics = MemoryStatistics()
    restarts: int = 0
    supervisor_restarts: int = 0
    workers_start: Literal["fork", "exec", "spawn"] | None = None
    workers: tuple[WorkerStatistics, ...] = ()
    hosts: tuple[HostStatistics, ...] = ()
    hosts_lost: int = 0
    notes: tuple[str, ...] = ()


def shipped(shipment: Shipment, placement: Placement, feeds: StreamFeeds | None) -> EngineStatistics:
    """What is known of a loader in a pool once function and source have travelled."""
    placements = [placement] if feeds is None else [placement, feeds.placement]
    shared = sum(each.shared_bytes for each in placements)
    notes = [f"{shared:,} bytes of arrays of function and source stand in memory once"] if shared else []
    notes += [f"copied into shared memory: {reason}" for each in placements for reason in each.copied_because]
    if shipment.packed_items:
        notes.append(f"{shipment.packed_items:,} items of the source are read from bytes, and not as objects")
    if feeds is not None and feeds.read_by == "process":
        notes.append("the stream is read by a process of its own")
    elif feeds is not None:
        notes.append(f"the stream is read on a thread of this process: {feeds.why_on_thread}")
    return EngineStatistics(notes=tuple(notes))


def with_counts(
    known: EngineStatistics, session: EngineSession, ring: Ring | None, counts: DeliveryCounts
) -> EngineStatistics:
    """The same with the counts of this moment; `ring` is None before the first batch."""
    workers, hosts = _workers(session)  # first: it takes in the latest news
    return EngineStatistics(
        memory=MemoryStatistics(
            slots=0 if ring is None else ring.count,
            slot_bytes=0 if ring is None else ring.slot_bytes,
            slots_lent=0 if ring is None else len(ring.lender.lent),
            batches_lent=counts.lent,
            batches_copied=counts.copied,
            batches_oversize=counts.oversize,
        ),
        restarts=session.workers.restarts,
        supervisor_restarts=session.supervisor_restarts,
        workers_start="spawn" if not session.hands_over_files else "exec" if session.warnings.obstacles else "fork",
        workers=workers,
        hosts=hosts,
        hosts_lost=session.workers.hosts_lost,
        notes=known.notes,
    )


def _workers(session: EngineSession) -> tuple[tuple[WorkerStatistics, ...], tuple[HostStatistics, ...]]:
    """Those that run; and all hosts."""
    if session.is_closed:
        return (), ()
    session.catch_up()
    board, found = session.arena.board, list(session.workers.values())
    workers = tuple(
        WorkerStatistics(
            index=worker.number,
            pid=worker.pid or None,
            batches=board.read(worker.cell, Field.BATCHES),
            samples=board.read(worker.cell, Field.SAMPLES),
            busy_s=board.read(worker.cell, Field.BUSY_NS) / 1e9,
            wait_s=board.read(worker.cell, Field.WAIT_NS) / 1e9,
            cpu_s=capacity.process_cpu_s(worker.pid) if worker.pid else 0.0,
            host="" if worker.place is None else worker.place.address,
        )
        for worker in found
        if worker.place is None or worker.place.workers
    )
    return workers, tuple(_host(board, worker) for worker in found if worker.place is not None)


def _host(board: Board, host: WorkerProcess) -> HostStatistics:
    assert host.place is not None
    node, address, workers = host.place
    return HostStatistics(
        node=node,
        address=address,
        workers=workers,
        state=_STATES[board.read(host.cell, HostField.STATE)],
        batches=board.read(host.cell, Field.BATCHES),
        busy_s=board.read(host.cell, Field.BUSY_NS) / 1e9,
    )
