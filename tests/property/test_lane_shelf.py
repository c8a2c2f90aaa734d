"""Batches of generators arrive in any order. Each is delivered once, those of a lane in their
order, and ends are found.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.engine.buffers import LaneBuffer
from loaderpool.engine.delivery import Delivery
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.plan.permutation import MAX_SIZE
from loaderpool.plan.places import LanePlaces, Position
from loaderpool.trainer.pass_log import PassLog

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)


def in_turn(lengths: list[int]) -> list[int]:
    """Return the numbers of all batches."""
    lanes = len(lengths)
    return sorted(
        batch * lanes + lane for lane, length in enumerate(lengths) for batch in range(length)
    )


def is_empty(number: int, lengths: list[int]) -> bool:
    batch, lane = divmod(number, len(lengths))
    return batch >= lengths[lane]


def log_of(lanes: int) -> PassLog:
    return PassLog(Position(0), Plan(Order(MAX_SIZE), 2, lanes=lanes, is_open=True), in_order=True)


def note(log: PassLog, number: int, ended: Any) -> None:
    delivery: Any = SimpleNamespace(numbers=lambda: [number])
    log.delivered += 1
    assert log.numbers is not None
    log.numbers.note(delivery, cast(Any, SimpleNamespace(ended_lanes=ended)))


@settings(max_examples=150)
@given(lengths=LENGTHS, in_order=st.booleans(), beyond=st.integers(1, 3), data=st.data())
def test_each_batch_comes_once_and_a_lanes_in_their_order(
    lengths: list[int], in_order: bool, beyond: int, data: st.DataObject
) -> None:
    lanes = len(lengths)
    shelf, log = LaneBuffer(0, lanes, in_order), log_of(lanes)
    taken: list[int] = []
    places: list[LanePlaces | None] = [None]

    def take_all() -> None:
        while (front := shelf.front) is not None:
            shelf.drop_front()
            taken.append(front.first)
            note(log, front.first, shelf.ended)
            places.append(log.position(len(taken)).lanes)
            assert shelf.taken == len(taken)

    slot = 0
    while not shelf.is_over:
        # Messages that may arrive: batches of each lane that are not taken, and a few after its
        # end. Some come twice.
        upcoming = [
            batch * lanes + lane
            for lane, length in enumerate(lengths)
            for batch in range(shelf.places.taken[lane], length + beyond)
        ]
        for number in data.draw(
            st.lists(st.sampled_from(upcoming), min_size=1, max_size=4, unique=True)
        ):
            is_end = is_empty(number, lengths)  # an end has no slot
            if shelf.put(Delivery(number, 1, 2, None if is_end else slot)):
                slot += not is_end
            else:
                assert number % lanes in shelf.ended or number in taken
            take_all()
        if data.draw(st.booleans(), label="begins anew"):
            shelf = shelf.rest()
            assert shelf.front is None
    assert sorted(taken) == in_turn(lengths)
    assert not in_order or taken == sorted(taken)
    for lane in range(lanes):
        assert [number // lanes for number in taken if number % lanes == lane] == list(
            range(lengths[lane])
        )
    assert not shelf.put(Delivery(data.draw(st.integers(0, 99)), 1, 2, 0)), (
        "nothing is wanted any more"
    )
    # At any later place, the rest is all that was not taken.
    for consumed, place in enumerate(places):
        # When the place was saved, fewer ends may have been known, but the counts were the same.
        assert (place and place.taken) == ((later := log.position(consumed).lanes) and later.taken)
        assert place is None or place.over <= later.over
        rest = LaneBuffer(0, lanes, in_order, log.position(consumed).lanes)
        for number in in_turn(lengths):
            assert rest.put(Delivery(number, 1, 2, 0)) == (number not in taken[:consumed])
        if in_order and consumed < len(taken):
            assert rest.begin_at <= taken[consumed]
