"""Workers for several loaders of one pool, within the limits of memory."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from loaderpool.system import capacity
from loaderpool.trainer import autotune
from loaderpool.trainer.autotune import PoolWorkers
from loaderpool.trainer.explain.window import (
    Autotuned,
    Decision,
    Snapshot,
    WorkerCounts,
    sums_of_workers,
)

S = 1_000_000_000


class Loader:
    """A loader with steps of 50 ms. A batch takes a worker this number of ms, and hardly any
    CPU.
    """

    def __init__(self, making_ms: int) -> None:
        self.making_s = making_ms / 1e3
        self.begun_s = 0
        self.steps = self.made = 0.0
        self.wait_s = self.ready_s = self.ready = 0.0
        self.autotuned = Autotuned()

    def train(self, seconds: int, workers: int) -> None:
        step_s = max(0.05, self.making_s / workers)
        steps = seconds / step_s
        self.steps += steps
        self.wait_s += steps * (step_s - 0.05)
        if step_s == 0.05:
            self.ready += steps
            self.ready_s += seconds

    def look(self, now_s: int, workers: int) -> Snapshot:
        busy_s = self.steps * self.making_s / workers
        each = WorkerCounts(
            busy_s=busy_s,
            idle_s=now_s - busy_s,
            cpu_s=0.01 * busy_s,
            made=int(16 * self.steps / workers),
        )
        counts: dict[str, Any] = sums_of_workers(dict.fromkeys(range(workers), each), None)
        return Snapshot(
            number=now_s // 2,
            now_ns=now_s * S,
            seconds=float(now_s),
            steps=int(self.steps),
            wait_s=self.wait_s,
            ready_steps=int(self.ready),
            ready_steps_s=self.ready_s,
            samples=16 * int(self.steps),
            by_worker=dict.fromkeys(range(workers), each),
            workers=workers,
            slots=12,
            cpus=8.0,
            machine_cpus=8.0,
            slots_wanted=12,
            machine_cpu_s=0.1 * now_s,
            trainer_cpu_s=0.05 * now_s,
            autotuned=self.autotuned,
            **counts,
        )


def train(pool: PoolWorkers, loader: Loader, seconds: int, workers: int, begin_s: int = 0) -> int:
    """Take batches of one loader for this time. Return the last number of workers."""
    for now_s in range(begin_s, begin_s + seconds, 2):
        decided = pool.look(loader, loader.look(now_s, workers), workers)
        if decided is not None:
            workers = decided
        loader.autotuned = pool.autotuned
        loader.train(2, workers)
    return workers


def test_it_finds_the_number_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pool = PoolWorkers(1, 32)
    with caplog.at_level(logging.INFO, "loaderpool"):
        assert train(pool, Loader(making_ms=390), 60, workers=2) == 8
    assert "training waited" in pool.autotuned.decisions[0].reason
    assert len(caplog.records) == len(pool.autotuned.decisions)


def test_the_loader_that_needs_most_decides() -> None:
    """During a validation, the training loses no workers, and the validation has more than it
    needs.
    """
    pool = PoolWorkers(1, 32)
    training, validation = Loader(making_ms=390), Loader(making_ms=190)
    workers = train(pool, training, 60, workers=2)
    assert train(pool, validation, 60, workers, begin_s=60) == workers == 8


def test_what_another_training_tried_in_vain_does_not_bind_this_one() -> None:
    pool, loader = PoolWorkers(1, 32), Loader(making_ms=390)
    pool._decisions += [Decision(0.0, 2, 3, ""), Decision(0.0, 3, 2, "")]
    loader.autotuned = pool.autotuned
    assert train(pool, loader, 60, workers=2) == 8


def test_memory_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker needs 1 GiB, and 6 GiB are free."""
    monkeypatch.setattr(capacity, "private_bytes", lambda pid: 1 << 30)
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 6 << 30)
    pool, loader = PoolWorkers(1, 32), Loader(making_ms=2000)
    look = loader.look

    def with_pids(now_s: int, workers: int) -> Snapshot:
        found = look(now_s, workers)
        there = {number: worker._replace(pid=1) for number, worker in found.by_worker.items()}
        return dataclasses.replace(found, by_worker=there)

    loader.look = with_pids  # type: ignore[method-assign]
    train(pool, loader, 40, workers=2)
    assert pool.autotuned.decisions[0].workers <= 5


@pytest.mark.parametrize("how", ["gone", "idle"])
def test_a_loader_that_is_gone_or_was_idle_for_long_has_no_say(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, training = PoolWorkers(1, 32), [Loader(making_ms=390)]
    workers = train(pool, training[0], 60, workers=2)
    if how == "gone":
        training.clear()
    else:
        monkeypatch.setattr(autotune, "_IDLE_S", 30.0)
    assert train(pool, Loader(making_ms=190), 120, workers, begin_s=60) in (4, 5)
