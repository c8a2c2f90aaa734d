"""Orders of a source's items: drawn by weights, and shuffled in blocks."""

from __future__ import annotations

import numpy as np
import pytest

from loaderpool.plan.alias_table import alias_table
from loaderpool.plan.block_order import BlockOrder
from loaderpool.plan.order import Order
from loaderpool.plan.permutation import random_bits, stream_key
from loaderpool.plan.weighted_order import WeightedOrder, uniform, without_replacement
from loaderpool.system.hashes import checksum

# Random numbers at positions 0, 5 and 2**60, as they were when they were defined.
RECORDED = [0x94E63B3F3CC78E7A, 0xC480299576458C28, 0xCF780E348AD26F8]
# Items at positions 0 to 9, and a checksum of tables, as they were when they were defined.
RECORDED_WEIGHTED = [2, 1, 1, 3, 1, 2, 3, 1, 1, 3]
RECORDED_TABLES = "f907c8ddead09c62"
RECORDED_BLOCKS = [[19, 6, 18, 7, 12], [3351, 6362, 732, 3823, 5873]]
WEIGHTS = {
    "random": lambda rng, items: rng.random(items),
    "few values": lambda rng, items: rng.integers(0, 4, items),
    "wide": lambda rng, items: rng.lognormal(0, 4, items),
    "equal": lambda rng, items: np.full(items, 0.1),
    "one": lambda rng, items: np.eye(1, items)[0],
    "tiny": lambda rng, items: rng.random(items) * 1e-310,
    "large": lambda rng, items: rng.random(items) * 1e308,
    "float32": lambda rng, items: rng.random(items, np.float32),
    "bool": lambda rng, items: rng.random(items) < 0.5,
}


def weighted(weights, size=10_000, seed=3):
    return WeightedOrder(size, seed=seed, table=alias_table(np.array(weights)))


def blocks(starts, size, window, seed=3):
    return BlockOrder(size, seed=seed, starts=np.array(starts, np.int64), window=window)


def whole(order: Order, epoch: int = 0) -> list[int]:
    return order.indices(epoch, np.arange(order.size, dtype=np.int64))


# ---- weights ----


def test_items_are_drawn_in_proportion_to_their_weights():
    weights = np.array([1, 0, 2, 5, 0])
    counts = np.bincount(whole(weighted(weights, 40_000)), minlength=5)
    assert counts[[1, 4]].tolist() == [0, 0]
    expected = 40_000 * weights / weights.sum()
    assert (abs(counts - expected) <= 5 * np.sqrt(expected)).all()


def test_weights_of_zero_at_both_ends_are_never_drawn():
    assert set(whole(weighted([0, 0, 1e-300, 0]))) == {2}


def test_a_position_has_the_same_item_in_any_batch():
    order = weighted(np.arange(1, 100))
    everything = whole(order)
    chosen = np.array([9999, 0, 1, 2, 5, 6, 4097, 4098, 7, 3])
    assert order.indices(0, chosen) == [everything[at] for at in chosen]
    assert order.indices(0, np.empty(0, np.int64)) == []


def test_epochs_and_seeds_have_unrelated_draws():
    draws = [whole(weighted([1, 1], seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    for one in range(4):
        for other in range(one):
            same = np.mean(np.equal(draws[one], draws[other]))
            assert 0.45 < same < 0.55


def levels_of(table):
    """Return the number of levels that draw each item, and the number of levels in a cell."""
    shift, levels = (len(table) - 1).bit_length(), 2**62 // len(table)
    entries = table.tolist()
    found = [entry >> shift for entry in entries]
    for entry in entries:
        found[entry & (1 << shift) - 1] += levels - (entry >> shift)
    return found, levels


@pytest.mark.parametrize("kind", WEIGHTS)
def test_an_alias_table_has_the_probabilities_of_the_weights(kind):
    rng = np.random.default_rng(0)
    for items in (1, 2, 3, 8, 57, 64, 1000):
        weights = WEIGHTS[kind](rng, items)
        weights[rng.integers(items)] = weights.max() or 1
        table = alias_table(weights)
        found, levels = levels_of(table)
        assert sum(found) == items * levels
        scaled = weights.astype(np.longdouble) / weights.max()
        expected = scaled / scaled.sum()
        assert abs(np.array(found, np.longdouble) / (items * levels) - expected).max() < 1e-14
        assert not np.array(found, object)[weights == 0].any()
        for chunk in (1, 2, 7, 100):
            assert alias_table(weights, chunk).tolist() == table.tolist()


def test_tables_never_change():
    tables = []
    for items in (1, 3, 7, 57, 1000, 100_003):
        numbers = np.arange(items) * 7919 % 101 + 1
        for weights in (
            numbers,
            1 / numbers**3,
            numbers % 2 == 1,
            np.ones(items),
            2.0 ** -(numbers * 9),
        ):
            tables.append(alias_table(weights))
    assert checksum(tables) == RECORDED_TABLES


def test_draws_of_a_table_never_change():
    assert weighted([1, 2, 3, 4.5, 0, 0.25]).indices(1, np.arange(10)) == RECORDED_WEIGHTED
    key = stream_key("weights", 1, 2)
    assert random_bits(key, np.array([0, 5, 1 << 60])).tolist() == RECORDED


def test_random_numbers_are_uniform():
    numbers = uniform(1, 2, 1 << 16)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(np.histogram(numbers, 64, (0, 1))[0] - 1024).max() < 6 * 32


# ---- blocks ----


def test_the_smallest_weights_shuffle_items_as_others_do():
    weights = np.random.default_rng(0).integers(1, 9, 1000).astype(float)
    tiny = np.ldexp(weights, -1074)
    assert (without_replacement(3, 0, tiny) == without_replacement(3, 0, weights)).all()


def test_each_item_comes_once_in_every_epoch():
    order = blocks([0, 10, 10, 25, 26, 90], 97, window=3)
    epochs = [whole(order, epoch) for epoch in range(3)]
    assert all(sorted(each) == [*range(97)] for each in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("window", [1, 4, 100])
def test_rows_between_two_others_come_from_few_blocks(window):
    starts = range(0, 640, 16)
    indices = np.array(whole(blocks(starts, 640, window)))
    width = 16 * min(window, 40)
    for first in range(0, 640, width):
        found = np.unique(indices[first : first + width] // 16)
        assert len(found) <= window


def test_rows_of_a_window_are_mixed():
    indices = np.array(whole(blocks(range(0, 6400, 16), 6400, 8)))
    assert np.mean(indices[1:] // 16 == indices[:-1] // 16) < 0.25  # by chance 1 of 8


def test_short_last_block_has_no_fixed_place():
    places = {whole(blocks([0, 8, 16, 24], 25, 1), epoch).index(24) for epoch in range(40)}
    assert places == {0, 8, 16, 24}


def test_any_part_of_a_shuffle_in_blocks_is_that_of_the_whole():
    order = blocks([0, 100, 101, 350, 351, 700], 1000, window=2)
    everything = whole(order, 7)
    chosen = np.random.default_rng(0).permutation(1000)[:300]
    assert order.indices(7, chosen) == [everything[at] for at in chosen]


def test_shuffles_in_blocks_never_change():
    small, large = blocks([0, 7, 20], 31, window=2), blocks([0, 5000, 9000], 15_000, window=2)
    found = [order.indices(4, np.arange(5)) for order in (small, large)]
    assert found == RECORDED_BLOCKS


def test_ranks_are_the_places_of_blocks():
    order = blocks(range(0, 60, 4), 60, window=1)
    for epoch in range(3):
        ranks = [order.rank(epoch, block) for block in range(15)]
        assert sorted(ranks) == list(range(15))
        assert [ranks[index // 4] for index in whole(order, epoch)] == sorted(ranks * 4)
