"""Items of a stream in bundles: arrays get their own memory, and an error names an item that cannot
be pickled.
"""

from __future__ import annotations

import mmap
import signal
import threading
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import UnpicklableError
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.system.interrupts import gate_handlers
from loaderpool.transport.messages import Ticket
from loaderpool.worker.bundles import FEED_TABLE_BYTES, Bundle, FeedTable, Frame, frames
from loaderpool.worker.tickets import Abandoned, StreamedItems
from tests.support.batches import assert_same

_ROOM = 8 << 20
_PLAN = Plan(Order(1 << 62), 1, is_open=True)


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
    positions = source.open(Ticket(run=1, batch=3, stop=len(items)), _PLAN).indices
    assert positions == list(range(first, first + len(items)))
    return frame, [source[position] for position in positions]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(0,), (10,), (300, 400), (5, 70, 71)])
def test_arrays_large_and_small_arrive_writable_and_apart(
    shape: tuple[int, ...], order: Any
) -> None:
    array = np.asarray(np.random.default_rng(0).random(shape), order=order)
    frozen = array.copy(order)
    frozen.flags.writeable = False
    frame, (one, two, locked) = bundled([{"a": array}, (array.copy(order),), frozen])
    assert bool(frame.buffers) == (array.nbytes > 1 << 16)
    assert_same([one["a"], two[0], locked], [array, array, frozen])
    assert one["a"].flags.f_contiguous == array.flags.f_contiguous
    assert one["a"].flags.writeable and one["a"].flags.aligned and not locked.flags.writeable
    one["a"][...] = -1
    assert_same(two[0], array)


def test_an_item_that_cannot_travel_is_told_of() -> None:
    with pytest.raises(UnpicklableError, match=r"batch from position 100 on .*lock"):
        bundled([1, 2, {"lock": threading.Lock()}, 4], first=100)


def test_a_handler_that_raises_while_an_item_is_pickled_stays_its_own_error() -> None:
    class Slow:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return int, ()

    def bark(*_: object) -> None:
        raise TimeoutError("the storage is slow")

    before = signal.signal(signal.SIGUSR1, bark)
    try:
        gate_handlers()
        with pytest.raises(TimeoutError, match="the storage is slow"):
            bundled([Slow()])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_bytes_that_are_no_longer_the_batchs_are_not_looked_at() -> None:
    shared = mmap.mmap(-1, FEED_TABLE_BYTES + _ROOM)
    source = StreamedItems()
    source.shared = shared
    table = FeedTable(shared, 0)
    table.write(0, Bundle(FEED_TABLE_BYTES, 64, 3, 0))
    shared[FEED_TABLE_BYTES : FEED_TABLE_BYTES + 64] = b"\xff" * 64  # sizes that nothing has
    for batch in (0, 1):
        with pytest.raises(Abandoned):
            source.open(Ticket(run=1, batch=batch, stop=1), _PLAN)
