"""Answers of a host that have overtaken others."""

from __future__ import annotations

import numpy as np
import pytest

from loaderpool.ray import host_record
from loaderpool.ray.host_messages import Answers, HostReport


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time in seconds, to be set."""
    time_s = [100.0]
    monkeypatch.setattr(host_record.clock, "monotonic_ns", lambda: int(time_s[0] * 1e9))
    return time_s


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
