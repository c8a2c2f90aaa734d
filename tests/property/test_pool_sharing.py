"""Iterators of one loader side by side, in any order of events: none waits for ever, none misses or repeats a batch."""

from __future__ import annotations

import collections
import contextlib
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.errors import MemoryLimitError
from tests.support.hand_pool import HandPool, hand_pool

BATCHES, ROWS = 60, 2


def growing(index: int) -> Any:
    return np.full(50 if index < 30 else 700 + 30 * index, index)


def tiny(index: int) -> Any:
    return np.int64(index)


def number_of(batch: Any) -> int:
    return int(np.ravel(batch)[0]) // ROWS


def check_all_slots_free(pool: HandPool) -> None:
    """After everything ended: no slot is lost, none is held by a run, no stretch is left."""
    pool.session.settle()
    state = pool.session.state
    assert not state.ledger.runs and not pool.engine.stretches
    assert (
        sorted(state.ledger.slots)
        == sorted(pool.ring.extents)
        == sorted(next(iter(state.ledger.loaders.values())).free)
    )
    assert not pool.ring.lender.lent


@settings(max_examples=120)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    workers=st.integers(1, 3),
    deterministic=st.booleans(),
    fn=st.sampled_from([growing, tiny]),
    limit=st.sampled_from(["200KiB", "500KiB", "20MiB"]),
    kept=st.integers(0, 6),
)
def test_no_iterator_waits_for_ever_or_misses_a_batch(
    data: st.DataObject, seed: int, workers: int, deterministic: bool, fn: Any, limit: str, kept: int
) -> None:
    choice = random.Random(seed)
    with hand_pool(
        workers, seed, source=range(BATCHES * ROWS), fn=fn, batch_size=ROWS, pad=fn is growing, memory_limit=limit,
        deterministic=deterministic,
    ) as pool:  # fmt: skip
        iterators = [pool.batches() for _ in range(data.draw(st.integers(1, 3), label="iterators"))]
        seen: dict[int, list[int]] = {at: [] for at in range(len(iterators))}
        keep: collections.deque[Any] = collections.deque(maxlen=kept)
        live = list(seen)
        while live:
            at = choice.choice(live)
            try:
                batch = next(iterators[at])
            except StopIteration:
                live.remove(at)
                continue
            except MemoryLimitError:  # so tight a budget has no slot for it
                assert not seen.pop(at)
                live.remove(at)
                continue
            if kept:
                keep.append((batch, number_of(batch)))
            seen[at].append(number_of(batch))
            del batch
            event = choice.random()
            if event < 0.02:  # another thread begins a pass and drops it
                with contextlib.suppress(MemoryLimitError):
                    assert 0 <= number_of(next(pool.batches())) < BATCHES
            elif event < 0.03:
                pool.session.workers_wanted = choice.randint(1, 6)
                with pool.session.lock:
                    pool.engine.sharing.fit_to_workers()
            elif event < 0.05:  # as a new supervisor will have it, whatever the reason
                with pool.session.lock:
                    pool.engine.sharing.restart_all()
            elif event < 0.3:
                pool.session.step()
            assert all(number_of(old) == number for old, number in keep)
        for numbers in seen.values():
            assert (numbers if deterministic else sorted(numbers)) == list(range(BATCHES))
        keep.clear()
        iterators.clear()
        pool.book.drop_parked()
        check_all_slots_free(pool)
