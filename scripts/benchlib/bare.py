"""The ideal: bare processes that only run the function, with no queue, no order and nobody to hand results to."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable

from benchlib.model import Window, require

__all__ = ["Work", "bare_rate"]

# Given its number among the processes, a process makes its work: what does one batch, and what verifies the last one.
Work = Callable[[int], tuple[Callable[[], None], Callable[[], None]]]


def bare_rate(work: Work, processes: int, window: Window) -> float:
    """Batches per second of all processes together, each forked here and timed by itself.

    Raises:
        AssertionError: a process ended without a result; its traceback is on stderr.
    """
    go_read, go_write = os.pipe()
    reports = []
    for number in range(processes):
        report_read, report_write = os.pipe()
        if os.fork() == 0:
            os.close(go_write)
            _run(work, number, window, go_read, report_write)
        os.close(report_write)
        reports.append(os.fdopen(report_read))
    os.close(go_read)
    for report in reports:
        require(report.readline() == "warm\n", "a bare process failed in its warm-up")
    os.close(go_write)  # all are warm: all start, as this is the last writing end
    rate = 0.0
    for report in reports:
        line = report.readline()
        require(line, "a bare process ended without a result")
        batches, elapsed_s = json.loads(line)
        rate += batches / elapsed_s
        report.close()
    for _ in range(processes):
        os.wait()
    return rate


def _run(work: Work, number: int, window: Window, go_read: int, report_write: int) -> None:
    """Runs in: a forked child, which it ends."""
    status = 1
    try:
        one_batch, check = work(number)
        warm_until = time.perf_counter() + window.warm_s
        while True:
            one_batch()
            if time.perf_counter() >= warm_until:
                break
        check()
        os.write(report_write, b"warm\n")
        os.read(go_read, 1)
        batches, started = 0, time.perf_counter()
        deadline = started + window.seconds
        while True:
            one_batch()
            batches += 1
            now = time.perf_counter()
            if now >= deadline:
                break
        check()
        os.write(report_write, json.dumps([batches, now - started]).encode() + b"\n")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
