"""Slots with views: a slot is released after its last view, once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from loaderpool.engine.session import Lender
from loaderpool.memory.arena import SlotFile
from loaderpool.transport.messages import Release


@pytest.fixture
def slots() -> Iterator[SlotFile]:
    slots = SlotFile.create()
    yield slots
    slots.close_descriptor()


def test_two_threads_that_settle_at_once_say_each_release(slots: SlotFile) -> None:
    said: list[Release] = []

    def send(message: Release) -> None:
        said.append(message)
        if len(said) == 1:  # another thread settles during this call
            other = threading.Thread(target=lender.settle)
            other.start()
            other.join()

    lender, lent = Lender(slots, send), dict[int, None]()
    views = [lender.lend(1, ticket, 4096 * ticket, 4096, lent) for ticket in (1, 2, 3)]
    lender._on_death = lambda _: None  # type: ignore[method-assign]
    del views
    gc.collect()
    lender.settle()
    assert sorted(set(said)) == [
        Release(1, 4096 * ticket, ticket) for ticket in (1, 2, 3)
    ]  # one of them may come twice
    assert not lent and not len(lender) and not lender.returned


def test_what_an_interrupt_has_broken_off_is_settled_again(slots: SlotFile) -> None:
    said: list[Release] = []

    def send(message: Release) -> None:
        said.append(message)
        if len(said) == 1:
            raise KeyboardInterrupt

    lender, lent = Lender(slots, send), dict[int, None]()
    view = lender.lend(1, 5, 4096, 4096, lent)
    lender.returned.append(lender._leases[4096][0])  # as when its last view is deleted
    with pytest.raises(KeyboardInterrupt):
        lender.settle()
    lender.settle()
    assert said == [Release(1, 4096, 5)] * 2 and not lender.returned
    del view
