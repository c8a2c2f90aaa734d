"""What does it cost to be ready for deaths, and how long is a dead worker's work at rest?

Work: "engine" and "workers": about 5 ms of pure Python a sample, in batches of 32, with two workers, and nothing goes
wrong; counted is CPU time by the scheduler's clock, trainer and supervisor against the workers. "recovery": 2 ms of
waiting a sample, in batches of 8, with two workers, of which one is ended by SIGKILL time and again; from just before
each kill to the end of the first row that the replacement makes, by the machine's one monotonic clock.
Baselines: the workers' CPU time; 50 ms, which a person hardly notices.
Bars: at most 0.01 of the workers' CPU time; at most 50 ms on an idle machine, median of the kills.
Verified: every batch's ends against the closed form, every item of the storm in its order; each kill has a replacement.
Command: scripts/bench/run faults

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    faults      workers          8,057 ms        [7,971 .. 8,196]
    faults      engine            29.2 ms        [28.6 .. 31.1]    0.004 x workers (best 0.004; bar ≤ 0.01)
    faults      limit               50 ms        [50 .. 50]
    faults      recovery          9.86 ms        [9.14 .. 10.2]     0.20 x limit (best 0.18; bar ≤ 1)
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import numpy as np

from benchlib.model import Bar, Figure, Measured, Question, Window, require
from benchlib.processes import cpu_ms, parent
from benchlib.samples import closed_form, slow
from benchlib.windows import delivered

WORKERS, BATCH_SIZE = 2, 32
LIMIT_MS = 50.0
SLEEP_S = 0.002
KILLED_BATCH = 8
KILLS = 30
# Batches from kill to kill: ten times what a recovery may take, at the two workers' pace.
BATCHES_BETWEEN = 30


def cpu_share(window: Window) -> Measured:
    import loaderpool as lp

    with lp.Loader(range(10**6), slow, batch_size=BATCH_SIZE, workers=WORKERS) as loader:
        batches = iter(loader)
        require(next(batches).item(0) == closed_form(0), "a wrong first batch")

        def look(batch: Any) -> tuple[int, int]:
            return batch.item(0), batch.item(-1)

        warm = delivered(batches, Window(0.1, window.warm_s, {}), look).seen
        workers = [worker.pid for worker in loader.statistics().workers]
        supervisor = parent(workers[0])
        before = [cpu_ms(os.getpid()), cpu_ms(supervisor), sum(map(cpu_ms, workers))]
        seen = delivered(batches, Window(window.seconds, 0.0, {}), look, turn=WORKERS).seen
        after = [cpu_ms(os.getpid()), cpu_ms(supervisor), sum(map(cpu_ms, workers))]
        require(workers == [worker.pid for worker in loader.statistics().workers], "a worker was replaced")
    for position, ends in enumerate([*warm, *seen], start=1):
        start = position * BATCH_SIZE
        require(ends == (closed_form(start), closed_form(start + BATCH_SIZE - 1)), f"batch {position} is wrong")
    trainer_ms, supervisor_ms, workers_ms = (now - then for now, then in zip(after, before, strict=True))
    facts = {"trainer_ms": trainer_ms, "supervisor_ms": supervisor_ms, "batches": float(len(seen))}
    return Measured({"engine": trainer_ms + supervisor_ms, "workers": workers_ms}, facts)


def who_and_when(item: int) -> Any:
    """The item, who made it, and when."""
    time.sleep(SLEEP_S)
    return np.array([item, os.getpid(), time.monotonic_ns()])


def recovery(window: Window) -> Measured:
    import loaderpool as lp

    rows: list[Any] = []
    killed: list[tuple[int, int]] = []  # when, and who
    items = (KILLS + 2) * BATCHES_BETWEEN * KILLED_BATCH
    limits = lp.Limits(restarts=None)
    with lp.Loader(range(items), who_and_when, batch_size=KILLED_BATCH, workers=WORKERS, limits=limits) as loader:
        for number, batch in enumerate(loader, start=1):
            rows.append(batch.copy())
            if number % BATCHES_BETWEEN == 0 and len(killed) < KILLS:
                pid = loader.statistics().workers[number // BATCHES_BETWEEN % WORKERS].pid
                require(parent(parent(pid)) == os.getpid(), f"{pid} is no worker of ours")
                killed.append((time.monotonic_ns(), pid))
                os.kill(pid, signal.SIGKILL)
    found = np.concatenate(rows)
    require(found[:, 0].tolist() == list(range(items)), "items are wrong, missing or out of order")
    began = sorted(int(found[found[:, 1] == pid, 2].min()) for pid in np.unique(found[:, 1]).tolist())
    times_ms = []
    for when, _ in killed:
        later = [first for first in began if first > when]
        require(later, "a dead worker was never replaced")
        times_ms.append((later[0] - when) / 1e6)
    require(len(killed) == KILLS and len(began) == KILLS + WORKERS, "kills and replacements are not the same number")
    return Measured({"recovery": statistics.median(times_ms)}, {"slowest_recovery_ms": max(times_ms)})


def limit(window: Window) -> Measured:
    return Measured({"limit": LIMIT_MS})


QUESTION = Question(
    name="faults",
    figures=(
        Figure("workers", "ms", "CPU time of the workers"),
        Figure("engine", "ms", "CPU time of trainer and supervisor while nothing goes wrong"),
        Figure("limit", "ms", "what a person hardly notices"),
        Figure("recovery", "ms", "from a worker's SIGKILL to its replacement's first row"),
    ),
    contestants={"cpu_share": cpu_share, "limit": limit, "recovery": recovery},
    bars=(Bar("engine", "workers", at_most=0.01), Bar("recovery", "limit", at_most=1.0)),
    seconds=4.0,
    warm_s=0.8,
)
