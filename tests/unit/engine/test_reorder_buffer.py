"""Batches that arrive in any order are delivered once, also if some were taken before a new
begin.
"""

from __future__ import annotations

import pytest

from loaderpool.engine.buffers import LaneBuffer, UnorderedBuffer
from loaderpool.engine.delivery import Delivery, OrderedBuffer


def test_a_stream_without_end_keeps_nothing_of_the_epochs_behind_it() -> None:
    shelf = UnorderedBuffer(0, 2)
    for batch in range(1000):
        shelf.put(Delivery(batch, 1, 2, 1))
        shelf.drop_front()
    assert not shelf._by_epoch and not shelf._taken


@pytest.mark.parametrize(
    "buffer", [OrderedBuffer(0), UnorderedBuffer(0, 10), LaneBuffer(0, 2, in_order=True)]
)
def test_it_tells_how_many_slots_wait_in_it(buffer: OrderedBuffer) -> None:
    for first in (2, 0, 1):
        buffer.put(Delivery(first, 1, 2, first))
    assert buffer.waiting == 3
    buffer.drop_front()
    assert buffer.waiting == 2
    buffer.drop_front()
    buffer.drop_front()
    assert buffer.waiting == 0
