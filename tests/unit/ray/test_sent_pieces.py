"""Pieces of payloads on their way to hosts, of which Ray may never tell whether they have come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loaderpool.ray import host_record, sent_pieces
from loaderpool.ray.host_messages import Answers, HostReport
from loaderpool.ray.sent_pieces import SentPieces


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time in seconds, to be set."""
    time_s = [100.0]
    monkeypatch.setattr(sent_pieces.clock, "monotonic_s", lambda: time_s[0])
    monkeypatch.setattr(host_record.clock, "monotonic_ns", lambda: int(time_s[0] * 1e9))
    return time_s


class FakeRay:
    """Calls end when a test says so."""

    def __init__(self) -> None:
        self.done: set[Any] = set()

    def put(self, content: Any) -> Any:
        return content

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Any], list[Any]]:
        return [call for call in calls if call in self.done], [call for call in calls if call not in self.done]


def test_a_host_that_a_piece_does_not_reach_is_given_up(now: list[float]) -> None:
    ray, ended, lost = FakeRay(), set[int](), list[tuple[int, str]]()
    pieces = SentPieces(ray, 10.0, ended.__contains__, lambda *news: lost.append(news))
    for host, call in enumerate(("first", "second", "third"), 1):
        pieces.sent(call, host)
    ray.done.add("first")
    ended.add(3)
    pieces.look()
    assert len(pieces) == 1 and not lost
    now[0] += 9.9
    pieces.look()
    assert not lost
    now[0] += 0.2
    pieces.look()
    assert lost == [(2, "function and data have not come there within 10 s")] and not len(pieces)


def test_they_are_cut_and_a_few_are_under_way(now: list[float]) -> None:
    ray, content = FakeRay(), bytes(range(100))
    pieces = SentPieces(ray, 10.0, lambda host: False, lambda host, why: None)
    sent = []
    for at, piece in pieces.objects(1, iter([(0, content[:50]), (64, content[50:])]), 40):
        sent.append((at, bytes(piece)))
        pieces.sent(at, 1)
        assert len(pieces) <= 4
        if len(pieces) == 4:
            ray.done |= {at for at, _ in sent}
    assert [at for at, _ in sent] == [*range(0, 50, 10), *range(64, 114, 10)]
    assert b"".join(piece for _, piece in sent) == content


def test_none_is_sent_to_a_host_that_has_ended() -> None:
    pieces = SentPieces(FakeRay(), 10.0, lambda host: True, lambda host, why: None)
    assert not list(pieces.objects(1, iter([(0, b"x")]), 40))


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
