"""A lane gives the same items and random states for any order of requests, and when it is run again
elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.memory.board import BOARD_BYTES, Board
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.transport.messages import Ticket
from loaderpool.worker.lanes import Generators, LaneItems
from loaderpool.worker.tickets import Abandoned, Progress

ROWS = 3
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def quiet(length: int) -> Iterator[Any]:
    yield from range(length)


def drawing(length: int) -> Iterator[Any]:
    random.random()
    for number in range(length):
        yield number, random.random(), np.random.rand()


def drawing_late(length: int) -> Iterator[Any]:
    for number in range(length):
        yield number, np.random.normal() if number > 4 else 0.0


def with_rng(length: int, rng: np.random.Generator) -> Iterator[Any]:
    for number in range(length):
        yield number, rng.random()


def one_buffer(length: int) -> Iterator[Any]:
    buffer = np.zeros(2)
    for number in range(length):
        buffer[:] = number
        yield {"buffer": buffer, "view": buffer[:1]}, [number]


def one_dict(length: int) -> Iterator[Any]:
    filled: dict[str, Any] = {}
    for number in range(length):
        filled["number"] = number
        yield filled


def a_list(length: int) -> list[int]:
    return list(range(length))


MAKERS = [quiet, drawing, drawing_late, with_rng, one_buffer, one_dict, a_list]


def items_of(
    make: Any, lengths: list[int], lanes: int, window: int = 0, seed_globals: Any = "auto"
) -> LaneItems:
    plan = Plan(Order(1 << 62), ROWS, lanes=lanes, is_open=True)
    takes = frozenset({"rng"} if make is with_rng else ())
    generators = Generators(make, takes, list(lengths), plan, window > 0, window)
    items = LaneItems(generators, seed_globals)
    items.attend(
        Progress(memoryview(bytearray(BOARD_BYTES)).cast("Q"), 0, 0, BaseException),
        times_items=False,
    )
    return items


def batch_of(items: LaneItems, number: int, epoch: int = 0) -> list[Any]:
    positions = items.open(
        Ticket(run=1, epoch=epoch, batch=number, stop=ROWS), items.generators.plan
    ).indices
    return [(position, plain(items[position])) for position in positions]


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


@settings(max_examples=300)
@given(
    make=st.sampled_from(MAKERS), lengths=LENGTHS, lanes=st.integers(1, 3), window=st.sampled_from([0, 0, 1, 4]),
    data=st.data(),
)  # fmt: skip
def test_any_batch_in_any_order_is_that_of_one_straight_run(
    make: Any, lengths: list[int], lanes: int, window: int, data: st.DataObject
) -> None:
    most = lanes * (sum(lengths) // ROWS + 2)
    straight = items_of(make, lengths, lanes, window)
    expected = [batch_of(straight, number) for number in range(most)]
    assert sum(map(len, expected)) == sum(lengths)
    there = items_of(make, lengths, lanes, window)
    for _ in range(data.draw(st.integers(1, 12))):
        number = data.draw(st.integers(0, most - 1))
        event = data.draw(
            st.sampled_from(["", "", "", "elsewhere", "forgotten", "another epoch", "twice"])
        )
        if event == "elsewhere":  # the worker died, or another one has taken over
            there = items_of(make, lengths, lanes, window)
        elif event == "forgotten":
            there.forget(0)
        elif event == "another epoch":
            batch_of(there, number, epoch=1)
        elif event == "twice":
            batch_of(there, number)
        assert batch_of(there, number) == expected[number]


@given(lengths=LENGTHS)
def test_the_processs_own_generators_stay_as_they_are(lengths: list[int]) -> None:
    items = items_of(drawing, lengths, 1, seed_globals=True)
    random.seed(1)
    np.random.seed(1)
    for number in range(4):
        batch_of(items, number)
    drawn = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    assert drawn == (random.random(), np.random.rand())


def test_nobody_reads_on_for_a_run_that_was_abandoned() -> None:
    read = []

    def make(length: int) -> Iterator[int]:
        for number in range(length):
            read.append(number)
            if number == 100:
                mark()
            yield number

    words = memoryview(bytearray(BOARD_BYTES)).cast("Q")

    def mark() -> None:
        words[Board.mark(1)] = 1

    items = items_of(make, [100_000], 1)
    items.attend(Progress(words, 0, 0, BaseException), times_items=False)
    with pytest.raises(Abandoned):
        batch_of(items, 30_000)
    assert len(read) < 200
