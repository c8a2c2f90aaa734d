"""Snapshots of a loader, computed and not measured."""

from __future__ import annotations

from typing import Any

from loaderpool.memory.call_times import CallTimes
from loaderpool.trainer.explain.window import Snapshot, WorkerCounts, sums_of_workers

S = 1_000_000_000
DOING = {"state": "idle"}


def look(
    number: int,
    *,
    wait: float = 0.5,
    pids: tuple[int, ...] = (),
    end_ns: int = 100 * S,
    calls: CallTimes = CallTimes(),  # noqa: B008  # a tuple
    **more: Any,
) -> Snapshot:
    """Return the snapshot after this number of intervals of two seconds, of which the last one ends
    at `end_ns`.

    Each second has ten steps of 32 samples, four of them with data ready. Workers are busy half of
    the time: they compute for half of that, and wait for a CPU for a tenth. Each makes 100 samples
    a second.
    """
    seconds = 2.0 * number
    workers = {
        place: WorkerCounts(
            pid=pid,
            made=number * 200,
            busy_s=seconds / 2,
            idle_s=seconds / 2,
            cpu_s=seconds / 4,
            queued_s=seconds / 20,
            doing=DOING,
        )
        for place, pid in enumerate(pids)
    }
    counts: dict[str, Any] = {
        "cpus": 4.0,
        "machine_cpus": 4.0,
        "steps": number * 20,
        "seconds": seconds,
        "wait_s": seconds * wait,
        "ready_steps": number * 8,
        "ready_steps_s": seconds / 5,
        "samples": number * 640,
        "bytes": number * 640_000,
        "by_worker": workers,
        "workers": len(workers),
        "calls": calls,
        "slots": 6,
        "slots_lent": 2,
        "slots_wanted": 6,
        "slot_bytes": 32_000,
        "copied": number,
        "slots_ready": 3,
        "machine_cpu_s": seconds,
        "trainer_cpu_s": seconds / 10,
        "trainer_queued_s": seconds / 40,
        **sums_of_workers(workers, None),
        **more,
    }
    return Snapshot(number=number, now_ns=end_ns, **counts)


def looks(count: int, *, last_ns: int = 100 * S, **more: Any) -> list[Snapshot]:
    """Return this number of snapshots, two seconds apart. The last one is taken at this time."""
    return [
        look(number, end_ns=last_ns - (count - 1 - number) * 2 * S, **more)
        for number in range(count)
    ]
