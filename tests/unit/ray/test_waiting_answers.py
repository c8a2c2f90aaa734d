"""Answers of a host: which travel together, and when."""

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


def answer(ticket: int, *sizes: int) -> Message:
    pieces = [Piece(0, np.broadcast_to(np.uint8(0), size)) for size in sizes]
    return (HostReport.TICKET, ticket, Status.FINISHED, 0), (pieces, b"")


def waiting(tickets: int) -> WaitingAnswers:
    answers = WaitingAnswers()
    answers.slot_bytes, answers.tickets = GROUP_BYTES // 10, tickets
    return answers


def test_answers_wait_for_a_group(now: list[int]) -> None:
    answers = waiting(tickets=20)
    for ticket in range(9):
        answers.add(answer(ticket, 50))
    assert not answers.are_worth_it(workers=2)
    answers.add(answer(9, 50))
    assert answers.are_worth_it(workers=2)
    assert [said[1] for said, _ in answers.take()] == list(range(10))
    assert not answers
    assert not answers.are_worth_it(workers=2)


def test_answers_do_not_wait_while_a_worker_has_nothing_to_do(now: list[int]) -> None:
    answers = waiting(tickets=3)
    answers.add(answer(1, 50))
    assert not answers.are_worth_it(workers=2)
    answers.add(answer(2, 50))
    assert answers.are_worth_it(workers=2)


def test_no_answer_waits_longer_than_it_may(now: list[int]) -> None:
    answers = waiting(tickets=20)
    answers.add(answer(1, 50))
    now[0] += 300_000_000
    assert answers.are_worth_it(workers=2)


def test_a_first_batch_and_what_is_no_batch_wait_for_nothing(now: list[int]) -> None:
    answers = waiting(tickets=20)
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
    answers = waiting(tickets=50)
    for ticket in range(15):
        answers.add(answer(ticket, GROUP_BYTES // 20, GROUP_BYTES // 24))
    assert [said[1] for said, _ in answers.take()] == list(range(10))
    assert [said[1] for said, _ in answers.take()] == list(range(10, 15))


def test_a_larger_one_travels_alone(now: list[int]) -> None:
    answers = waiting(tickets=50)
    for ticket, nbytes in ((1, 30), (7, 2 * GROUP_BYTES), (2, 30)):
        answers.add(answer(ticket, nbytes))
    assert [[said[1] for said, _ in answers.take()] for _ in range(3)] == [[1], [7], [2]]
    assert not answers


def test_room_is_for_what_workers_are_at_and_for_what_travels() -> None:
    assert group_of(GROUP_BYTES * 2) == 1
    assert group_of(GROUP_BYTES // 4) == 4
    assert group_of(0) == group_of(1) == group_of(4096)
    assert room_of(3, GROUP_BYTES // 4) == 3 * 2 + 2 * 4
    assert travelling(0, 4096) == 0
    assert travelling(5, GROUP_BYTES) == 10
