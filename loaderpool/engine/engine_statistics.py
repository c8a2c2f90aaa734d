"""The engine's part of `Loader.statistics()`. Runs in: the main process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from loaderpool.memory.board import Field
from loaderpool.system import capacity

if TYPE_CHECKING:
    from loaderpool.engine.delivery import DeliveryCounts
    from loaderpool.engine.pool import WorkerPool


@dataclasses.dataclass(frozen=True)
class WorkerStatistics:
    """Counts of one worker since it started; with a `RayPool`, of all workers on a node."""

    index: int  # Number of the worker; a replacement gets a new number.
    pid: int | None  # Process ID; `None` for a node.
    batches: int  # Batches finished.
    samples: int  # Samples computed.
    busy_s: float  # Seconds spent on tasks.
    wait_s: float  # Seconds spent waiting for a batch buffer or a task.
    cpu_s: float  # CPU time in seconds; 0.0 for a node.
    node: str = ""  # Address of the node, or empty.


@dataclasses.dataclass(frozen=True)
class NodeStatistics:
    """Counts of one node of a `RayPool`."""

    node: str  # Ray's ID of the node.
    address: str  # Address of the node.
    workers: int  # Number of workers; 0 while the node starts.
    state: Literal["starting", "running"]  # State of the node in the pool.
    batches: int  # Batches loaded on the node.
    busy_s: float  # Seconds spent on tasks, summed over its workers.


@dataclasses.dataclass(frozen=True)
class MemoryStatistics:
    """Batch buffers in shared memory."""

    buffers: int = 0  # Number of batch buffers; 0 before the first batch.
    buffer_bytes: int = 0  # Size of one batch buffer in bytes.
    buffers_in_use: int = 0  # Batch buffers that your arrays use now.
    batches_zero_copy: int = 0  # Batches delivered as zero-copy views.
    batches_copied: int = 0  # Batches copied because too few batch buffers were free.
    batches_oversize: int = 0  # Batches larger than their buffer.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStatistics:
    """Counts of a loader's workers and batch buffers.

    The defaults are those of a loader without workers.
    """

    memory: MemoryStatistics = MemoryStatistics()  # Batch buffers.
    restarts: int = 0  # Worker restarts after a crash.
    supervisor_restarts: int = 0  # Supervisor restarts after a crash.
    # `"exec"` if imports start threads. (The site shows the comment on a field's own line only.)
    workers_start: Literal["fork", "exec", "spawn"] | None = None  # Start method of the workers.
    workers: tuple[WorkerStatistics, ...] = ()  # Counts of each worker.
    nodes: tuple[NodeStatistics, ...] = ()  # Counts of each node of a `RayPool`.
    nodes_lost: int = 0  # Nodes that crashed or left.
    notes: tuple[str, ...] = ()  # Messages about shared or copied data, and about slow parts.


def pool_statistics(
    pool: WorkerPool, counts: DeliveryCounts, slots_lent: int, notes: tuple[str, ...]
) -> EngineStatistics:
    """Return the present counts of a pool, with a loader's deliveries and notes."""
    workers, nodes = _workers(pool)  # first, because it reads the messages that have arrived
    lost = pool.arena.board.lost
    return EngineStatistics(
        memory=MemoryStatistics(
            buffers=counts.slots,
            buffer_bytes=counts.slot_bytes,
            buffers_in_use=slots_lent,
            batches_zero_copy=counts.lent,
            batches_copied=counts.copied,
            batches_oversize=counts.oversize,
        ),
        restarts=0 if pool.workers.are_nodes else lost,
        supervisor_restarts=pool.deaths.replaced,
        workers_start="spawn"
        if not pool.hands_over_files
        else "exec"
        if pool.warnings.imports_anew
        else "fork",
        workers=workers,
        nodes=nodes,
        nodes_lost=lost if pool.workers.are_nodes else 0,
        notes=notes,
    )


def _workers(pool: WorkerPool) -> tuple[tuple[WorkerStatistics, ...], tuple[NodeStatistics, ...]]:
    """Return the counts of the running workers, and of all nodes."""
    if pool.is_closed:
        return (), ()
    pool.catch_up()
    board, found = pool.arena.board, pool.workers.running()
    workers = tuple(
        WorkerStatistics(
            index=worker.number,
            pid=worker.pid or None,
            batches=board.read(worker.cell, Field.BATCHES),
            samples=board.read(worker.cell, Field.SAMPLES),
            busy_s=board.read(worker.cell, Field.BUSY_NS) / 1e9,
            wait_s=board.read(worker.cell, Field.WAIT_NS) / 1e9,
            cpu_s=capacity.process_cpu_s(worker.pid) if worker.pid else 0.0,
            node="" if worker.place is None else worker.place.address,
        )
        for worker in found
        if worker.place is None or worker.place.workers
    )
    nodes = tuple(
        NodeStatistics(
            *worker.place,
            state="running" if worker.place.workers else "starting",
            batches=board.read(worker.cell, Field.BATCHES),
            busy_s=board.read(worker.cell, Field.BUSY_NS) / 1e9,
        )
        for worker in found
        if worker.place is not None
    )
    return workers, nodes
