"""Generators through a pool moved by hand: iterators side by side, batches that are kept, and none waits for ever."""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.errors import MemoryLimitError
from loaderpool.sources.stream import ReplicatedSource
from loaderpool.trainer.engine.ring import Ring
from loaderpool.transport.messages import Control
from tests.support.hand_pool import check_all_slots_free, hand_pool, read_in_any_order

ROWS = 2


def numbers(shard: tuple[int, int]) -> Iterator[Any]:
    first, count = shard
    yield from range(first, first + count)


def growing(shard: tuple[int, int]) -> Iterator[Any]:
    first, count = shard
    for number in range(first, first + count):
        yield np.full(40 + 200 * (number % 100), number)


def whole(batch: Any) -> list[int]:
    return [int(row) for row in (batch if batch.ndim == 1 else batch[:, 0])]


@pytest.mark.slow
@settings(max_examples=150)
@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any),
    cycle=st.integers(1, 6),
    make=st.sampled_from([numbers, growing]),
    seed=st.integers(0, 1000),
    workers=st.integers(1, 3),
    deterministic=st.booleans(),
    limit=st.sampled_from(["60KiB", "200KiB", "20MiB"]),
    kept=st.sampled_from([0, 1, 3, 50]),
    iterators=st.integers(1, 3),
    slow_one=st.booleans(),
)
def test_no_iterator_waits_for_ever_or_misses_a_batch(
    counts: list[int], cycle: int, make: Any, seed: int, workers: int, deterministic: bool, limit: str, kept: int,
    iterators: int, slow_one: bool,
) -> None:  # fmt: skip
    choice = random.Random(seed)
    shards = [(100 * number, count) for number, count in enumerate(counts)]
    expected = expected_of(shards, cycle)
    with hand_pool(
        workers, seed, source=ReplicatedSource(make, shards, cycle), batch_size=ROWS, pad=make is growing,
        limits=lp.Limits(memory=limit), deterministic=deterministic,
    ) as pool:  # fmt: skip
        pool.session.slow_one = slow_one

        def meddle(event: float) -> None:
            if event < 0.03:  # another thread begins a pass and drops it
                with contextlib.suppress(MemoryLimitError):
                    next(pool.batches())
            elif event < 0.06:
                pool.session.workers_wanted = choice.randint(1, 4)
                with pool.session.lock:
                    pool.session.send(Control.RESIZE, pool.session.workers_wanted)
                    pool.sharing.fit_to_workers()
            elif event < 0.1:  # as a new supervisor will have it, whatever the reason
                with pool.session.lock:
                    pool.sharing.restart_all()
            elif event < 0.4:
                pool.session.step()

        for got in read_in_any_order(pool, iterators, whole, choice, kept, meddle):
            assert got == expected if deterministic else sorted(got) == sorted(expected)
        check_all_slots_free(pool)


def expected_of(shards: list[tuple[int, int]], cycle: int) -> list[list[int]]:
    """By the words of the documentation: every n-th shard makes up a lane, and the lanes' batches take turns."""
    count = min(len(shards), cycle)
    lanes = []
    for lane in range(count):
        items = [number for first, length in shards[lane::count] for number in range(first, first + length)]
        lanes.append([items[at : at + ROWS] for at in range(0, len(items), ROWS)])
    return [lane[turn] for turn in range(max(map(len, lanes))) for lane in lanes if turn < len(lane)]


@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_slots_made_for_another_iterator_are_not_counted_as_kept_back(seed: int) -> None:
    """RING-4: what may be made ahead hangs on a run's own slots, not on all that there are by now."""
    shards = [(1000 * number, 200) for number in range(6)]
    with hand_pool(
        3, seed, source=ReplicatedSource(numbers, shards, 6), batch_size=ROWS, limits=lp.Limits(memory="20MiB")
    ) as pool:
        one = pool.batches()
        kept = [next(one) for _ in range(30)]
        other = pool.batches()
        kept += [next(other)]
        pool.session.slow_one = True
        kept += [next(one) for _ in range(200)]
        assert len(kept) == 231


def test_a_pass_does_not_wait_for_batches_that_are_kept_of_earlier_ones() -> None:
    """RING-4, where the slots that are not kept are fewer than a pass alone would keep back for itself."""
    shards = [(100 * number, 20) for number in range(3)]
    with hand_pool(
        3, source=ReplicatedSource(numbers, shards, 3), batch_size=ROWS, limits=lp.Limits(memory=6 * mmap.PAGESIZE)
    ) as pool:
        pool.session.slow_one = True
        earlier = [pool.batches(), pool.batches()]
        kept = [next(one) for one in [*earlier, *earlier]]
        for one in earlier:
            one.close()
        assert pool.ring.count == 6 and pool.ring.lent_count(but=()) == len(kept) == 4
        # The slow worker is still at what nobody wants any more, so its generator is behind the others.
        assert list(map(whole, pool.batches())) == expected_of(shards, 3)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_pass_goes_on_where_the_machine_has_room_for_few_larger_slots(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RING-4, where slots become fewer all the same."""
    shards = [(100 * number, 40) for number in range(3)]
    make_slot, left = Ring._take_extent, room

    def widening(shard: tuple[int, int]) -> Iterator[Any]:
        for number in numbers(shard):
            yield np.full(40 if number % 100 < 20 else 3000, number)

    def take_one_of_few(ring: Ring) -> Any:
        nonlocal left
        if not left:
            raise MemoryLimitError("full")
        left -= 1
        return make_slot(ring)

    with hand_pool(
        3, source=ReplicatedSource(widening, shards, 3), batch_size=ROWS, pad=True, limits=lp.Limits(memory="20MiB")
    ) as pool:
        pool.session.slow_one = True
        batches = pool.batches()
        got = [whole(next(batches))]
        monkeypatch.setattr(Ring, "_take_extent", take_one_of_few)
        got += map(whole, batches)
        assert got == expected_of(shards, 3)
        assert pool.ring.count == room
