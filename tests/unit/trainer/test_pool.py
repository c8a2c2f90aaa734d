"""A pool has one session, whoever asks for it first and whoever closes it meanwhile; sessions are stand-ins here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import loaderpool as lp
import loaderpool.core.pool
from loaderpool.trainer.pool import Pool

# How long a thread that must not come through is waited for; one that does come through is seen at once.
GRACE_S = 0.1


class StandIn:
    """Takes the place of the core's Pool; each that is made first does what `on_start` says."""

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
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    monkeypatch.setattr(StandIn, "on_start", lambda: None, raising=False)
    monkeypatch.setattr(loaderpool.core.pool, "Pool", StandIn)
    return StandIn.made


def during_the_start(pool: Pool, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> list[Any]:
    """Start the pool while another thread does `act`, once; returns what that came to."""
    came: list[Any] = []

    def other() -> None:
        came.append(act())

    thread = threading.Thread(target=other)

    def on_start() -> None:
        if not thread.ident:
            thread.start()
            thread.join(GRACE_S)

    monkeypatch.setattr(StandIn, "on_start", on_start)
    assert pool.session is not None
    thread.join()
    return came


def test_two_threads_get_one_session(sessions: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1)
    assert during_the_start(pool, monkeypatch, lambda: pool.session) == [pool.session]
    assert len(sessions) == 1


def test_a_close_ends_the_session_that_another_thread_starts(
    sessions: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1)
    during_the_start(pool, monkeypatch, pool.close)
    assert [session.is_closed for session in sessions] == [True]
    with pytest.raises(lp.ClosedError):
        _ = pool.session


def test_a_resize_reaches_the_session_that_another_thread_starts(
    sessions: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1)
    during_the_start(pool, monkeypatch, lambda: pool.resize(3))
    assert [session.workers for session in sessions] == [3]


def test_a_close_by_a_finalizer_in_the_middle_of_the_start_leaves_no_session(
    sessions: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1)
    monkeypatch.setattr(StandIn, "on_start", pool.close)
    with pytest.raises(lp.ClosedError):
        _ = pool.session
    assert [session.is_closed for session in sessions] == [True]


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(
    sessions: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(1)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        closing = threading.Thread(target=pool.close)
        closing.start()
        closing.join(60)
        assert pool.is_closed
    finally:
        done.set()
        thread.join()
