"""Looks of a loader that are made up."""

from __future__ import annotations

from typing import Any

from loaderpool.memory.call_times import CallTimes
from loaderpool.trainer.explain.looks import AboutLoader, Look, MachineCounts, StepCounts, WorkCounts, WorkerCounts

S = 1_000_000_000
ABOUT = AboutLoader(1, True, "sample", True, True, False, 4.0, 4.0)


def look(
    number: int,
    *,
    wait: float = 0.5,
    pids: tuple[int, ...] = (),
    end_ns: int = 100 * S,
    calls: CallTimes = CallTimes(),  # noqa: B008  # a tuple
    **steps: Any,
) -> Look:
    """The look that was taken after so many times two seconds, the last of which `end_ns` is the time of.

    Each second has ten steps of 32 samples, four of them with data ready. Workers are busy half of the time: they
    compute for half of that, and wait for a CPU for a tenth; and each makes 100 samples a second, reading 1 kB for
    each from a disk.
    """
    passed_ns = number * 2 * S
    seconds = passed_ns / S
    workers = {
        place: WorkerCounts(
            pid, 1, passed_ns // 2, passed_ns // 2, seconds / 4, seconds / 20, number * 200, number * 200_000
        )
        for place, pid in enumerate(pids)
    }
    counts = {
        "steps": number * 20,
        "steps_ns": passed_ns,
        "wait_ns": int(passed_ns * wait),
        "ready_steps": number * 8,
        "ready_steps_ns": passed_ns // 5,
        **steps,
    }
    return Look(
        number,
        end_ns,
        StepCounts(**counts),
        number * 640,
        number * 640_000,
        WorkCounts(workers, calls, 6, 2, 6, 32_000, copied=number, slots_ready=3),
        MachineCounts(seconds, seconds / 10, seconds / 40, 0.0),
    )


def looks(count: int, *, last_ns: int = 100 * S, **more: Any) -> list[Look]:
    """So many, each two seconds after the one before, the last one at this time."""
    return [look(number, end_ns=last_ns - (count - 1 - number) * 2 * S, **more) for number in range(count)]
