"""A permutation is a bijection, the same on every machine, and well mixed at every size. No size
takes memory.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from loaderpool.plan.permutation import MAX_SIZE, TABLE_SIZE, Permutation

NETWORK_SIZE = 3 * TABLE_SIZE + 1
"""Larger than the table, and not a power of two, so that the network has to walk."""


def z_score(counts: list[int], expected: float) -> float:
    """Return the chi-squared value of equally likely outcomes, as standard deviations from its
    expectation.
    """
    freedom = len(counts) - 1
    return float(
        (sum((count - expected) ** 2 for count in counts) / expected - freedom)
        / math.sqrt(2 * freedom)
    )


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_few_items_is_equally_likely(size: int) -> None:
    orders = list(itertools.permutations(range(size)))
    keys = 60 * len(orders)
    counts = Counter(
        tuple(Permutation(size, key).take(np.arange(size)).tolist()) for key in range(keys)
    )
    assert set(counts) == set(orders)
    assert z_score([counts[order] for order in orders], keys / len(orders)) < 4


@pytest.mark.parametrize("size", [TABLE_SIZE, TABLE_SIZE + 1, NETWORK_SIZE])
def test_two_items_land_anywhere_independently(size: int) -> None:
    cells, keys = 6, 3600
    counts: Counter[tuple[int, ...]] = Counter()
    for key in range(keys):
        first, second = Permutation(size, key).take(np.array([0, 1])).tolist()
        counts[first * cells // size, second * cells // size] += 1
    assert (
        z_score(
            [counts[cell] for cell in itertools.product(range(cells), repeat=2)], keys / cells**2
        )
        < 4
    )


@pytest.mark.parametrize("size", [TABLE_SIZE, NETWORK_SIZE, 10**6, 10**12])
@pytest.mark.parametrize("stride", [1, 2, 64, 1024])
def test_neighbours_are_not_correlated(size: int, stride: int) -> None:
    """For many keys, numbers `stride` apart do not follow each other, and are not close to each
    other.
    """
    count = 1024
    values, partners = [], []
    starts = np.arange(count) % (size - stride)
    for key in range(20):
        permutation = Permutation(size, key)
        values.append(permutation.take(starts))
        partners.append(permutation.take(starts + stride))
    first, second = np.concatenate(values), np.concatenate(partners)
    pairs = first.size
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(pairs)
    gaps = np.minimum((first - second) % size, (second - first) % size)
    near = np.count_nonzero(gaps < size // 64)
    assert abs(near - pairs / 32) < 4 * math.sqrt(pairs / 32)
    for gap in (1, stride):
        # 2 in `size` pairs have this distance by chance. The bound is 4 deviations above that, and
        # 3 for the tail of rare events.
        chance = 2 * pairs / size
        assert np.count_nonzero(gaps == gap) < chance + 4 * math.sqrt(chance) + 3


@pytest.mark.parametrize("size", [5, TABLE_SIZE, NETWORK_SIZE, 10**9])
def test_nearby_keys_give_unrelated_orders(size: int) -> None:
    positions = np.arange(min(size, 2000))
    orders = [tuple(Permutation(size, key).take(positions)) for key in (0, 1, 2, 1 << 64, 1 << 127)]
    assert len(set(orders)) == len(orders)
    if size >= TABLE_SIZE:
        assert (
            np.count_nonzero(np.array(orders[0]) == np.array(orders[1])) < 12
        )  # one in `size` by chance


def test_the_same_numbers_for_ever() -> None:
    """Recorded from the first version, because a changed order would silently break every saved
    state.
    """
    assert Permutation(8, 2024).take(np.arange(8)).tolist() == [5, 1, 2, 0, 4, 6, 3, 7]
    assert Permutation(10**6, 2024).take(np.arange(4)).tolist() == [24049, 344661, 324208, 269955]
    largest = Permutation(MAX_SIZE, (1 << 128) - 1)
    assert largest.take(np.array([0, MAX_SIZE - 1])).tolist() == [
        2113884591116541297,
        648363666987153538,
    ]
