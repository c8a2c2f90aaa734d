"""Iterators of one loader side by side, in any order of events: none waits for ever, none misses or repeats a batch."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.errors import MemoryLimitError
from tests.support.hand_pool import check_all_slots_free, hand_pool, read_in_any_order

BATCHES, ROWS = 60, 2


def growing(index: int) -> Any:
    return np.full(50 if index < 30 else 700 + 30 * index, index)


def tiny(index: int) -> Any:
    return np.int64(index)


def number_of(batch: Any) -> int:
    return int(np.ravel(batch)[0]) // ROWS


@settings(max_examples=120)
@given(
    seed=st.integers(0, 1000),
    workers=st.integers(1, 3),
    deterministic=st.booleans(),
    fn=st.sampled_from([growing, tiny]),
    limit=st.sampled_from(["200KiB", "500KiB", "20MiB"]),
    kept=st.integers(0, 6),
    iterators=st.integers(1, 3),
)
def test_no_iterator_waits_for_ever_or_misses_a_batch(
    seed: int, workers: int, deterministic: bool, fn: Any, limit: str, kept: int, iterators: int
) -> None:
    choice = random.Random(seed)
    with hand_pool(
        workers, seed, source=range(BATCHES * ROWS), fn=fn, batch_size=ROWS, pad=fn is growing,
        limits=lp.Limits(memory=limit), deterministic=deterministic,
    ) as pool:  # fmt: skip

        def meddle(event: float) -> None:
            if event < 0.02:  # another thread begins a pass and drops it
                with contextlib.suppress(MemoryLimitError):
                    assert 0 <= number_of(next(pool.batches())) < BATCHES
            elif event < 0.03:
                pool.session.workers_wanted = choice.randint(1, 6)
                with pool.session.lock:
                    pool.sharing.fit_to_workers()
            elif event < 0.05:  # as a new supervisor will have it, whatever the reason
                with pool.session.lock:
                    pool.sharing.restart_all()
            elif event < 0.3:
                pool.session.step()

        for got in read_in_any_order(pool, iterators, number_of, choice, kept, meddle):
            assert (got if deterministic else sorted(got)) == list(range(BATCHES))
        check_all_slots_free(pool)
