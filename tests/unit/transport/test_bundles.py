"""Items of a stream as they travel: of the classes that they were, in memory of their own, none of them unnamed."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import mmap
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from loaderpool.errors import UnpicklableError
from loaderpool.plan.order import Ticket
from loaderpool.worker.bundles import FEED_TABLE_BYTES, Bundle, FeedTable, Frame, frames
from loaderpool.worker.tickets import Abandoned, StreamedItems

_ROOM = 8 << 20


class Colour(enum.Enum):
    RED = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Point:
    x: float
    colour: Colour
    more: tuple[Any, ...] = ()


Old = collections.namedtuple("Old", "a b")  # noqa: PYI024

ITEMS: list[Any] = [
    None,
    {"a": [1, (2, b"3")], "b": {"c": "ü", 4: {5}}},
    Pair(1, Old(2, "x")),
    Point(1.5, Colour.RED, (Flags.A | Flags.B,)),
    datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc),
    datetime.timedelta(3),
    decimal.Decimal("1.10"),
    pathlib.PurePosixPath("a/b"),
    np.float32(1.5),
    np.datetime64("2024-02-29"),
    np.arange(6).reshape(2, 3)[:, ::2],
    np.array(["a", None], object),
    np.zeros(3, [("x", "i4"), ("y", "f8")]),
    collections.OrderedDict(z=1, a=2),
    len,
    Point,
    10**40,
    float("inf"),
]


def bundled(items: list[Any], first: int = 0) -> tuple[Frame, list[Any]]:
    """The frame of one batch, and its items as a worker finds them."""
    (frame,) = frames(iter([(first, items)]))
    shared = mmap.mmap(-1, FEED_TABLE_BYTES + _ROOM)
    at = FEED_TABLE_BYTES + 24
    frame.write_into(memoryview(shared)[at : at + frame.nbytes])
    bundle = Bundle(at, frame.nbytes, frame.buffers, frame.first)
    FeedTable(shared, 0).write(3, bundle)
    source = StreamedItems()
    source.shared = shared
    positions = source.positions(Ticket(run=1, batch=3, stop=len(items))).tolist()
    assert positions == list(range(first, first + len(items)))
    return frame, [source[position] for position in positions]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(
            type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape) and np.all(one == other)
        )
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_plain_items_arrive_as_they_are(item: Any) -> None:
    _, (found,) = bundled([item], first=10**12)
    assert same(item, found)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(0,), (10,), (300, 400), (5, 70, 71)])
def test_arrays_large_and_small_arrive_writable_and_apart(shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.random.default_rng(0).random(shape), order=order)
    frozen = array.copy(order)
    frozen.flags.writeable = False
    frame, (one, two, locked) = bundled([{"a": array}, (array.copy(order),), frozen])
    assert bool(frame.buffers) == (array.nbytes > 1 << 16)
    assert same(one["a"], array) and same(two[0], array) and same(locked, frozen)
    assert one["a"].flags.f_contiguous == array.flags.f_contiguous
    assert one["a"].flags.writeable and one["a"].flags.aligned and not locked.flags.writeable
    one["a"][...] = -1
    assert same(two[0], array)


def test_an_item_that_cannot_travel_is_named() -> None:
    with pytest.raises(UnpicklableError, match="position 102 of the stream, a dict"):
        bundled([1, 2, {"lock": threading.Lock()}, 4], first=100)


def test_bytes_that_are_no_longer_the_batchs_are_not_looked_at() -> None:
    shared = mmap.mmap(-1, FEED_TABLE_BYTES + _ROOM)
    source = StreamedItems()
    source.shared = shared
    table = FeedTable(shared, 0)
    table.write(0, Bundle(FEED_TABLE_BYTES, 64, 3, 0))
    shared[FEED_TABLE_BYTES : FEED_TABLE_BYTES + 64] = b"\xff" * 64  # sizes that nothing has
    for batch in (0, 1):
        with pytest.raises(Abandoned):
            source.positions(Ticket(run=1, batch=batch, stop=1))
