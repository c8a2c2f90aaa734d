"""The return pipe never blocks and loses nothing; a lent slot returns with the last array that looks at it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool.memory.arena import Arena
from loaderpool.trainer.session.lease import Lender, ReturnPipe
from loaderpool.transport.messages import MESSAGE_BYTES, Control, encode
from tests.support.return_pipe import Pipe

# ---- the return pipe ----


def test_messages_arrive_in_their_order(ends: Pipe) -> None:
    for number in range(10):
        ends.pipe.send(encode(Control.RELEASE, number))
    assert ends.numbers() == list(range(10))
    assert not ends.pipe.has_unsent


def test_a_full_pipe_blocks_nobody_and_keeps_the_order_of_messages(ends: Pipe) -> None:
    count = 3 * ends.room
    for number in range(count):
        ends.pipe.send(encode(Control.RESIZE, number))
    assert ends.pipe.has_unsent and not ends.pipe.flush()
    seen = ends.numbers()
    ends.pipe.send(encode(Control.RESIZE, count))  # behind what waits, though there is room now
    while ends.pipe.has_unsent:
        ends.pipe.flush()
        seen += ends.numbers()
    assert seen + ends.numbers() == list(range(count + 1))


def test_releases_into_a_full_pipe_are_not_lost(ends: Pipe) -> None:
    count = 2 * ends.room + 5
    for number in range(count):
        ends.pipe.release(encode(Control.RELEASE, number))
    seen = ends.numbers()
    while not ends.pipe.flush():
        seen += ends.numbers()
    assert sorted(seen + ends.numbers()) == list(range(count))


def test_a_pipe_that_nobody_reads_any_more_takes_everything_in_silence(ends: Pipe) -> None:
    ends.close()
    for _ in range(3):
        ends.pipe.release(encode(Control.RELEASE, 1))
        ends.pipe.send(encode(Control.RELEASE, 2))
    assert not ends.pipe.has_unsent


def test_a_dropped_pipe_closes_its_descriptor_and_nobody_elses() -> None:
    read_end, write_end = os.pipe()
    pipe = ReturnPipe(write_end)
    release = pipe.release  # as a lease holds it
    del pipe
    release(encode(Control.RELEASE, 1))
    assert len(os.read(read_end, 100)) == MESSAGE_BYTES
    del release
    gc.collect()
    assert os.read(read_end, 100) == b""  # end of file: it was the last
    os.close(read_end)


# ---- leases ----


class LentSlots:
    """An arena with a lender."""

    def __init__(self, ends: Pipe) -> None:
        self.arena = Arena.create()
        self.lender = Lender(self.arena, ends.pipe)
        self.ends = ends
        self.by_run: dict[int, None] = {}

    def lend(self, slot: int, nbytes: int = 1000) -> Any:
        extent = self.arena.take(nbytes, "a test")
        return self.lender.lend(slot, 1, extent.offset, extent.nbytes, self.by_run)


@pytest.fixture
def slots(ends: Pipe) -> Iterator[LentSlots]:
    slots = LentSlots(ends)
    yield slots
    slots.arena.close_descriptor()


def test_a_slot_returns_with_the_last_view_of_its_anchor(slots: LentSlots) -> None:
    anchor = slots.lend(7)
    array = np.ndarray((10, 5), np.float32, anchor, 128)
    part = array[2:5, ::2].T
    del anchor, array
    assert slots.ends.read() == [] and set(slots.lender.lent) == {7} == set(slots.by_run)
    part[...] = 3  # still there to be written
    del part
    assert slots.ends.numbers() == [7]
    assert not slots.lender.lent and not slots.by_run


def test_a_cast_view_and_a_memoryview_keep_the_slot(slots: LentSlots) -> None:
    anchor = slots.lend(3)
    kept: Any = memoryview(anchor.view(np.int16)[4:9])
    del anchor
    assert slots.ends.read() == []
    del kept
    assert slots.ends.numbers() == [3]


def test_a_return_that_ctrl_c_breaks_off_is_made_good(slots: LentSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = slots.lend(7)

    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(slots.ends.pipe, "release", interrupt)
        del anchor
    assert slots.ends.read() == []
    with pytest.raises(KeyboardInterrupt):  # it was not lost either, but is sent again in a moment
        time.sleep(10)
    slots.lender.settle()
    assert slots.ends.numbers() == [7]
    assert not slots.lender.lent and not slots.lender.returned


def test_a_pipe_that_is_renewed_keeps_its_number(ends: Pipe) -> None:
    number = ends.pipe.fileno()
    read_end, write_end = os.pipe()
    ends.pipe.renew(write_end)
    assert ends.pipe.fileno() == number
    ends.pipe.release(encode(Control.RELEASE, 5))
    assert ends.read() == []
    assert len(os.read(read_end, 100)) == MESSAGE_BYTES
    os.close(read_end)


def test_leases_in_a_cycle_return_when_it_is_collected(slots: LentSlots) -> None:
    cycle: list[Any] = [slots.lend(1), slots.lend(2)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert sorted(slots.ends.numbers()) == [1, 2]


def test_who_wants_to_know_is_told_of_each_return(slots: LentSlots) -> None:
    told: list[int] = []
    slots.lender.on_return.append(told.append)
    anchors = [slots.lend(slot) for slot in (4, 5)]
    del anchors[0]
    assert told == [4]
    anchors.clear()
    assert told == [4, 5]
