"""How a loader in a pool begins and ends: without room, without a way to say so, and with arrays still looked at."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ClosedError, MemoryLimitError
from loaderpool.trainer.engine.pool_engine import LoadMessage, PoolEngine
from tests.support.hand_pool import FIRSTS, HandPool, consume, first, hand_pool, small_pool


def test_a_loader_that_cannot_be_told_of_leaves_nothing_in_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_pool() as pool:
        session: Any = pool.session
        before = session.arena.extents.taken_bytes, dict(session.routing.by_loader)
        monkeypatch.setattr(LoadMessage, "_words", lambda *_: (2**64,))
        with pytest.raises(struct.error):
            PoolEngine(session, pool.checked, 0)
        assert (session.arena.extents.taken_bytes, session.routing.by_loader) == before


def test_a_ring_without_room_is_tried_again_by_the_next_who_asks(
    small: HandPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.session.settle()
    before = small.session.arena.extents.taken_bytes
    with monkeypatch.context() as full:
        full.setattr("loaderpool.trainer.engine.ring.Ring._take_extent", lambda self: full_machine())
        for _ in range(3):
            with pytest.raises(MemoryLimitError, match="full"):
                small.engine.form()
            assert small.ring is None and small.session.arena.extents.taken_bytes == before
    assert consume(small.batches()) == FIRSTS


def full_machine() -> Any:
    raise MemoryLimitError("full")


def test_slots_that_cannot_be_replaced_end_the_wait_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(index: int) -> Any:
        return np.full(20_000 if index < 400 else 100_000, index)

    with hand_pool(2, source=range(500), fn=grow, batch_size=2, pad=True, limits=lp.Limits(memory="16MiB")) as pool:
        begun = pool.batches()
        assert first(begun, 1) == [0]
        slot_bytes = pool.ring.plan.slot_bytes
        assert slot_bytes < 2 * 100_000 * 8, "none of the large ones was made so far"
        monkeypatch.setattr("loaderpool.trainer.engine.ring.Ring._take_extent", lambda self: full_machine())
        with pytest.raises(MemoryLimitError, match="full"):
            consume(begun)
        with pytest.raises(MemoryLimitError, match="full"):
            consume(pool.batches())


def test_a_closed_engine_holds_no_memory_but_what_is_looked_at(small: HandPool) -> None:
    begun = small.batches()
    kept = next(begun)
    extents = small.session.arena.extents
    small.session.is_closed = True
    small.session.arena.close_descriptor()
    small.engine.close()
    small.engine.close()
    assert extents.taken_bytes == small.ring.slot_bytes
    assert (kept[0] == 0).all() and (kept[1] == 1).all()
    with pytest.raises(ClosedError):
        next(begun)
    del kept
    assert extents.taken_bytes == 0 and small.ring.count == 0
