"""Pieces of payloads on their way to hosts, of which Ray may never tell whether they have come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loaderpool.ray import host_record, ray_hosts
from loaderpool.ray.host_messages import Answers, HostReport
from loaderpool.ray.hosts import News
from loaderpool.ray.ray_hosts import RayHosts


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time in seconds, to be set."""
    time_s = [100.0]
    monkeypatch.setattr(ray_hosts.clock, "monotonic_s", lambda: time_s[0])
    monkeypatch.setattr(host_record.clock, "monotonic_ns", lambda: int(time_s[0] * 1e9))
    return time_s


class FakeRay:
    """Calls end when a test says so."""

    def __init__(self) -> None:
        self.done: set[Any] = set()

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        return [call for call in calls if call in self.done], [call for call in calls if call not in self.done]


def hosts(told: list[News]) -> tuple[RayHosts, FakeRay]:
    made, ray = object.__new__(RayHosts), FakeRay()
    made._ray, made._pieces, made._ended, made._tell = ray, {}, set(), told.append  # type: ignore[assignment]
    made._settings = SimpleNamespace(host_timeout_s=10.0)  # type: ignore[assignment]
    return made, ray


def test_a_host_that_a_piece_does_not_reach_is_given_up(now: list[float]) -> None:
    told: list[News] = []
    made, ray = hosts(told)
    made._pieces |= {"first": (1, now[0]), "second": (2, now[0]), "third": (3, now[0])}
    ray.done.add("first")
    made._ended.add(3)
    made._look_at_pieces()
    assert list(made._pieces) == ["second"] and not told
    now[0] += 9.9
    made._look_at_pieces()
    assert not told
    now[0] += 0.2
    made._look_at_pieces()
    assert told == [News(2, "lost", "function and data have not come there within 10 s")] and not made._pieces


def test_answers_that_wait_for_others_have_a_time_since_when(now: list[float]) -> None:
    record = host_record.HostRecord(1, 0, {})
    messages = [((HostReport.TICKET, number, 0, 0), np.zeros(1)) for number in range(3)]
    assert list(record.in_order(Answers(1, messages[1:2]))) == []
    since_ns = record.gap_since_ns
    assert since_ns == int(now[0] * 1e9)
    now[0] += 5
    assert list(record.in_order(Answers(2, messages[2:]))) == []
    assert record.gap_since_ns == since_ns
    assert [said[1] for said, _ in record.in_order(Answers(0, messages[:1]))] == [0, 1, 2]
    assert not record.gap_since_ns
