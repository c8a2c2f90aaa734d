"""Answers of a host: which travel together, when, and in what parts."""

from __future__ import annotations

import numpy as np
import pytest

from loaderpool.ray import host
from loaderpool.ray.host import WaitingAnswers
from loaderpool.ray.host_messages import HostReport, Message, Piece
from loaderpool.supervisor.scheduler import GROUP_BYTES, group_of, room_of, travelling
from loaderpool.transport.messages import Status

NOW = 1_000_000_000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock's time, to be set."""
    time_ns = [NOW]
    monkeypatch.setattr(host.clock, "monotonic_ns", lambda: time_ns[0])
    return time_ns


def answer(ticket: int, *sizes: int, first: int = 0) -> Message:
    pieces, at = [], first
    for size in sizes:
        pieces.append(Piece(at, np.arange(at, at + size, dtype=np.int64).astype(np.uint8)))
        at += size
    return (HostReport.TICKET, ticket, Status.FINISHED, 0), (pieces, b"")


def waiting(slot_bytes: int, tickets: int) -> WaitingAnswers:
    answers = WaitingAnswers()
    answers.slot_bytes, answers.tickets = slot_bytes, tickets
    answers.set_pace(10 * slot_bytes, 50_000_000)
    return answers


def test_answers_wait_for_a_group(now: list[int]) -> None:
    answers = waiting(slot_bytes=100, tickets=20)
    for ticket in range(9):
        answers.add(answer(ticket, 50))
    assert not answers.are_worth_it(workers=2)
    answers.add(answer(9, 50))
    assert answers.are_worth_it(workers=2)
    assert [said[1] for said, _ in answers.take()] == list(range(10))
    assert not answers
    assert not answers.are_worth_it(workers=2)


def test_answers_do_not_wait_while_a_worker_has_nothing_to_do(now: list[int]) -> None:
    answers = waiting(slot_bytes=100, tickets=3)
    answers.add(answer(1, 50))
    assert not answers.are_worth_it(workers=2)
    answers.add(answer(2, 50))
    assert answers.are_worth_it(workers=2)


def test_no_answer_waits_longer_than_it_may(now: list[int]) -> None:
    answers = waiting(slot_bytes=100, tickets=20)
    answers.add(answer(1, 50))
    now[0] += 50_000_001
    assert answers.are_worth_it(workers=2)


def test_a_first_batch_and_what_is_no_batch_wait_for_nothing(now: list[int]) -> None:
    answers = waiting(slot_bytes=100, tickets=20)
    answers.urgent = 1
    answers.add(answer(1, 50))
    assert answers.are_worth_it(workers=2)
    answers.take()
    answers.add(((HostReport.LOAD_FAILED, 1), b"x" * 5000))
    assert answers.are_worth_it(workers=2)
    answers.take()
    answers.add(answer(2, 50))
    assert not answers.are_worth_it(workers=2)


def test_no_more_travels_at_once_than_an_object_may_have(now: list[int]) -> None:
    answers = waiting(slot_bytes=100, tickets=50)
    for ticket in range(15):
        answers.add(answer(ticket, 60, 35))
    assert [said[1] for said, _ in answers.take()] == list(range(10))
    assert [said[1] for said, _ in answers.take()] == list(range(10, 15))


def test_an_answer_that_is_larger_travels_in_parts(now: list[int]) -> None:
    answers = WaitingAnswers()
    answers.set_pace(100, 0)
    answers.add(answer(1, 30))
    answers.add(answer(7, 90, 120, 45, first=5))
    answers.add(answer(2, 30))
    journeys = []
    while answers:
        journeys.append(answers.take())
    assert [[(HostReport(said[0]).name, said[1]) for said, _ in each] for each in journeys] == [
        [("TICKET", 1)],
        [("PART", 7)],
        [("PART", 7)],
        [("TICKET", 7), ("TICKET", 2)],
    ]
    parts = [piece for _, each in (journeys[1] + journeys[2]) for piece in each] + journeys[3][0][1][0]
    found = np.zeros(260, np.uint8)
    for at, content in parts:
        found[at : at + content.nbytes] = content
    assert np.array_equal(found[5:], np.arange(5, 260, dtype=np.int64).astype(np.uint8))
    assert journeys[3][0][0] == (HostReport.TICKET, 7, Status.FINISHED, 0)


def test_room_is_for_what_workers_are_at_and_for_what_travels() -> None:
    assert group_of(GROUP_BYTES * 2) == 1
    assert group_of(GROUP_BYTES // 4) == 4
    assert group_of(GROUP_BYTES // 4, object_bytes=GROUP_BYTES // 2) == 2
    assert group_of(0) == group_of(1) == group_of(4096)
    assert room_of(3, GROUP_BYTES // 4) == 3 * 2 + 2 * 4
    assert travelling(0, 4096) == 0
    assert travelling(5, GROUP_BYTES) == 10
