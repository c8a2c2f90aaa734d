"""A sample's streams depend on (seed, epoch, position) alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool.plan.permutation import stream_key
from loaderpool.plan.sample_streams import SampleStreams
from loaderpool.plan.stream_kinds import BATCH, ITEM, SAMPLE
from loaderpool.worker.own_process import SavedGlobals
from tests.support.draws import global_draws


@pytest.fixture(autouse=True)
def tests_leave_the_global_generators_alone() -> Iterator[None]:
    with SavedGlobals():
        yield


@pytest.mark.parametrize("kind", [SAMPLE, BATCH, ITEM])
def test_the_generator_is_the_documented_philox(kind: int) -> None:
    streams = SampleStreams(seed=11)
    for epoch, position in [(0, 0), (3, 10**12), (2**40, 2**62 - 1)]:
        words = np.array([0, 0, position, kind], np.uint64)
        fresh = np.random.Generator(
            np.random.Philox(key=stream_key("rng", 11, epoch), counter=words)
        )
        ours = streams.generator(epoch, position, kind)
        for dtype, size in (
            (np.uint32, 9),
            (np.uint64, 8),
        ):  # 17 halves of words, so that one is left over
            drawn, expected = (
                each.integers(1 << 32, size=size, dtype=dtype) for each in (ours, fresh)
            )
            assert drawn.tolist() == expected.tolist()
        assert ours.random(100).tolist() == fresh.random(100).tolist()
        assert ours.normal(size=50).tolist() == fresh.normal(size=50).tolist()


@pytest.mark.skipif(not hasattr(np.random.Generator, "spawn"), reason="came with NumPy 1.25")
def test_spawned_generators_are_keyed_by_the_sample() -> None:
    def spawned(streams: SampleStreams, epoch: int, position: int) -> list[float]:
        rng = streams.generator(epoch, position)
        return [child.random() for count in (2, 1) for child in rng.spawn(count)]

    streams = SampleStreams(seed=1)
    first = spawned(streams, 0, 5)
    assert len({*first, *spawned(streams, 0, 6), *spawned(streams, 1, 5)}) == 9
    assert spawned(streams, 0, 5) == first


def correlation(first: Any, second: Any) -> float:
    return float(abs(np.corrcoef(first, second)[0, 1]))


def test_neighbouring_positions_are_not_correlated() -> None:
    streams, count = SampleStreams(seed=5), 4000
    draws = np.array([streams.generator(0, position).random(3) for position in range(count + 64)])
    limit = 4.5 / math.sqrt(count)
    for stride in (1, 2, 64):
        for column in range(3):
            assert correlation(draws[:count, 0], draws[stride : stride + count, column]) < limit
    next_epoch = np.array([streams.generator(1, position).random() for position in range(count)])
    assert correlation(draws[:count, 0], next_epoch) < limit
    assert abs(draws.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / draws.size)


def test_seeded_globals_are_not_correlated() -> None:
    streams, count = SampleStreams(seed=5), 2000
    rows = []
    for position in range(count + 1):
        streams.seed_globals(0, position)
        rows.append((random.random(), np.random.rand(), streams.generator(0, position).random()))
    draws = np.array(rows)
    limit = 4.5 / math.sqrt(count)
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert correlation(draws[:, one], draws[:, other]) < limit
    for column in range(3):
        assert correlation(draws[:-1, column], draws[1:, column]) < limit


def test_seeded_globals_repeat_whatever_was_drawn_before() -> None:
    streams = SampleStreams(seed=1)
    streams.seed_globals(2, 7)
    expected = global_draws()
    random.gauss(0, 1)  # each caches a second Gaussian
    np.random.normal()
    np.random.rand(1000)
    SampleStreams(seed=1).seed_globals(2, 7)
    assert global_draws() == expected


def test_seeded_globals_differ_by_seed_epoch_position_and_kind() -> None:
    draws = []
    for seed, epoch, position in [(1, 2, 7), (2, 2, 7), (1, 3, 7), (1, 2, 8), (1, 2, 7 + 2**32)]:
        for kind in (SAMPLE, BATCH, ITEM):
            SampleStreams(seed).seed_globals(epoch, position, kind)
            draws.append(global_draws())
    for same_call in zip(*draws, strict=True):
        assert len(set(same_call)) == len(draws)
    state: Any = np.random.get_state(legacy=False)
    assert state["bit_generator"] == "MT19937", "they stay what they were"
