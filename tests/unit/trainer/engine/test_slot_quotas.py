"""Passes side by side share the slots; no process (tests/support/hand_pool.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import MemoryLimitError
from loaderpool.transport.messages import Control
from tests.support.hand_pool import FIRSTS, HandPool, check_all_slots_free, consume, first, hand_pool, small_pool


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_passes_outgrow_their_slots(deterministic: bool) -> None:
    def grow(index: int) -> Any:
        return np.full(2000 if index < 40 else 5000 + index, index)

    with hand_pool(
        2,
        source=range(400),
        fn=grow,
        batch_size=4,
        pad=True,
        limits=lp.Limits(memory="2MiB"),
        deterministic=deterministic,
    ) as pool:
        ahead, behind = pool.batches(), pool.batches()
        slot_bytes = pool.engine.form().slot_bytes
        firsts = first(ahead, 1), first(behind, 1)
        for numbers, one_pass in zip(firsts, (ahead, behind), strict=True):  # one reads to its end, and the other waits
            for batch in one_pass:
                numbers.append(int(batch[0, 0]))
                del batch
        assert [sorted(numbers) for numbers in firsts] == [list(range(0, 400, 4))] * 2
        assert pool.ring.slot_bytes > 2 * slot_bytes
        check_all_slots_free(pool)


def test_more_passes_than_slots_are_refused_and_leave_the_others_as_they_are(small: HandPool) -> None:
    begun = []
    with pytest.raises(MemoryLimitError, match="iterators of this loader are active"):
        while True:
            begun.append(small.batches())
            assert first(begun[-1], 1) == [0]
    epoch = small.book.epoch
    assert epoch == len(begun) - 1 == 5  # the refused one does not count
    for one_pass in begun[:-1]:
        assert consume(one_pass) == FIRSTS[1:]
    check_all_slots_free(small)


def test_more_workers_get_more_slots_in_the_middle_of_a_pass() -> None:
    with small_pool(
        limits=lp.Limits(memory="16MiB"), fn=lambda index: np.int64(index), batch_size=1, source=range(80)
    ) as pool:
        begun = pool.batches()
        assert first(begun, 1) == [0]
        before = pool.ring.count
        pool.session.workers_wanted = 32
        pool.session.send(Control.RESIZE, 32)
        assert consume(begun) == list(range(1, 80))
        assert pool.ring.count == pool.quotas()[0] > before
        assert consume(pool.batches()) == list(range(80))
