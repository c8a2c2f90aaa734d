"""A pool starts its workers once, on the first thread that uses or closes it. Here, workers are
simulated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

import loaderpool as lp
import loaderpool.engine.pool
from loaderpool.trainer.pool import Pool

# Time for which a blocked thread is watched. A thread that is not blocked is noticed at once.
GRACE_S = 0.1


class StandIn:
    """Replaces `WorkerPool`. Each new one first calls `on_start`."""

    made: list[StandIn]
    on_start: Callable[[], object]

    def __init__(self, workers: int, max_restarts: object, program: object) -> None:
        self.workers, self.is_closed = workers, False
        self.made.append(self)
        type(self).on_start()

    def resize(self, workers: int) -> None:
        self.workers = workers

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def started_pools(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    monkeypatch.setattr(StandIn, "on_start", lambda: None, raising=False)
    monkeypatch.setattr(loaderpool.engine.pool, "WorkerPool", StandIn)
    return StandIn.made


@pytest.mark.parametrize(
    ("act", "workers"),
    [(lambda pool: pool.worker_pool, 1), (Pool.close, None), (lambda pool: pool.resize(3), 3)],
    ids=["start", "close", "resize"],
)
def test_another_thread_waits_for_the_start_and_then_does_what_it_wants(
    act: Callable[[Pool], object],
    workers: int | None,
    started_pools: list[StandIn],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, came = Pool(1), list[object]()
    thread = threading.Thread(target=lambda: came.append(act(pool)))

    def on_start() -> None:
        thread.start()
        thread.join(GRACE_S)
        assert thread.is_alive()

    monkeypatch.setattr(StandIn, "on_start", on_start)
    started = pool.worker_pool
    thread.join()
    assert [each.is_closed for each in started_pools] == [workers is None]
    assert came in ([started], [None])
    if workers is None:
        with pytest.raises(lp.ClosedError):
            _ = pool.worker_pool
    else:
        assert pool.worker_pool is started and started_pools[0].workers == workers


def test_a_close_by_a_finalizer_in_the_middle_of_the_start_leaves_no_workers(
    started_pools: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1)
    monkeypatch.setattr(StandIn, "on_start", pool.close)
    with pytest.raises(lp.ClosedError):
        _ = pool.worker_pool
    assert [each.is_closed for each in started_pools] == [True]


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(1)
    thread = threading.Thread(target=pool._lock.acquire)
    thread.start()
    thread.join()  # the thread has not released the lock
    monkeypatch.setattr(os, "getpid", lambda: 1)
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(60)
    assert pool.is_closed
