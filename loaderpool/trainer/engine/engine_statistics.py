"""What an engine knows for `Loader.statistics()`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from loaderpool.memory.board import Board, Field, HostField
from loaderpool.system import cpu_time

if TYPE_CHECKING:
    from loaderpool.trainer.engine.ring import Ring
    from loaderpool.trainer.engine.run_context import DeliveryCounts
    from loaderpool.trainer.session.engine_session import EngineSession, WorkerProcess
    from loaderpool.trainer.stream.feeds import StreamFeeds
    from loaderpool.transport.payload.placement import Placement
    from loaderpool.transport.payload.ship import Shipment

_STATES: tuple[Literal["starting"], Literal["running"], Literal["leaving"]] = ("starting", "running", "leaving")


@dataclasses.dataclass(frozen=True)
class WorkerStatistics:
    """One worker's counts since it (or the worker whose place it took) started; of a `RayPool` a whole host's."""

    index: int  # number of the worker, from 0
    pid: int | None  # its process; None: it is a host, which may be on another machine
    batches: int  # full batches' worth of tickets finished, a part of a batch counted once it ends the batch
    samples: int  # samples finished
    busy_s: float  # seconds spent on tickets
    wait_s: float  # seconds spent waiting for a ticket: for a slot, or for work; of a host summed over its workers
    cpu_s: float  # CPU seconds of the process so far; 0.0 of a host
    host: str = ""  # the address of the host's node; empty for a process of this machine


@dataclasses.dataclass(frozen=True)
class HostStatistics:
    """One host's counts since it started; a `RayPool` has one on each node that helps."""

    node: str  # the node's id, as Ray names it; empty while none is chosen
    address: str  # of the node; empty while none is chosen
    workers: int  # worker processes that it has; 0 while it starts
    state: Literal["starting", "running", "leaving"]  # starting: also where it waits for CPUs; leaving: is not replaced
    batches: int  # batches that it has answered with
    bytes: int  # bytes of those batches
    busy_s: float  # seconds that its workers spent on batches, summed
    wait_s: float  # seconds that its workers waited for work, summed: for a slot here, or for what is under way
    restarts: int  # workers of it that died and were replaced, and supervisors of these
    round_trip_s: float  # seconds that a call takes on its way there and back, lately; 0.0 before one has returned


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """An engine's share of `Statistics`, which says what each is; as they stand here, one that has nothing of it."""

    slots: int = 0
    slot_bytes: int = 0
    slots_lent: int = 0
    bytes_pinned: int = 0
    not_pinned_because: str | None = None
    batches_lent: int = 0
    batches_copied: int = 0
    batches_oversize: int = 0
    restarts: int = 0
    supervisor_restarts: int = 0
    items_packed: int = 0
    captured_packed: tuple[str, ...] = ()
    captured_not_packed: tuple[str, ...] = ()
    data_bytes_shared: int = 0
    data_bytes_copied: int = 0
    data_copied_because: tuple[str, ...] = ()
    stream_read_by: Literal["process", "thread"] | None = None
    stream_on_thread_because: str = ""
    workers_start: Literal["fork", "exec", "spawn"] | None = None
    workers: tuple[WorkerStatistics, ...] = ()
    hosts: tuple[HostStatistics, ...] = ()
    hosts_lost: int = 0
    batches_redone: int = 0
    hosts_wait_because: str = ""


def shipped(shipment: Shipment, placement: Placement, feeds: StreamFeeds | None) -> EngineStatistics:
    """What is known of a loader in a pool once function and source have travelled."""
    placements = [placement] if feeds is None else [placement, feeds.placement]
    return EngineStatistics(
        items_packed=shipment.packed_items,
        captured_packed=tuple(str(each) for each in shipment.captured if not each.left_because),
        captured_not_packed=tuple(str(each) for each in shipment.captured if each.left_because),
        data_bytes_shared=sum(each.shared_bytes for each in placements),
        data_bytes_copied=sum(each.copied_bytes for each in placements),
        data_copied_because=tuple(reason for each in placements for reason in each.copied_because),
        stream_read_by=None if feeds is None else feeds.read_by,
        stream_on_thread_because="" if feeds is None else feeds.why_on_thread,
    )


def with_counts(
    known: EngineStatistics, session: EngineSession, ring: Ring | None, counts: DeliveryCounts
) -> EngineStatistics:
    """The same with the counts of this moment; `ring` is None before the first batch."""
    if ring is not None:
        known = dataclasses.replace(
            known,
            slots=ring.count,
            slot_bytes=ring.slot_bytes,
            slots_lent=len(ring.lender.lent),
            bytes_pinned=ring.pinning.pinned_bytes(list(ring.extents.values())),
            not_pinned_because=ring.pinning.why_not,
            hosts_wait_because=ring.hosts_wait_because,
        )
    workers, hosts = _workers(session)  # first: it takes in the latest news
    return dataclasses.replace(
        known,
        batches_lent=counts.lent,
        batches_copied=counts.copied,
        batches_oversize=counts.oversize,
        restarts=session.workers.restarts + sum(host.restarts for host in hosts),
        supervisor_restarts=session.supervisor_restarts,
        workers_start="spawn" if not session.hands_over_files else "exec" if session.warnings.obstacles else "fork",
        workers=workers,
        hosts=hosts,
        hosts_lost=session.workers.hosts_lost,
        batches_redone=session.workers.batches_redone,
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
            cpu_s=cpu_time.process_cpu_s(worker.pid) if worker.pid else 0.0,
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
        bytes=board.read(host.cell, HostField.BYTES),
        busy_s=board.read(host.cell, Field.BUSY_NS) / 1e9,
        wait_s=board.read(host.cell, Field.WAIT_NS) / 1e9,
        restarts=board.read(host.cell, HostField.RESTARTS),
        round_trip_s=board.read(host.cell, HostField.ROUND_TRIP_NS) / 1e9,
    )
