"""Orders by the lengths of items: batches of a token budget, and rows of packed items."""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest

from loaderpool.plan.buckets import BucketPlan, ItemBuckets
from loaderpool.plan.drawn import DrawnBatches
from loaderpool.plan.lengths import fewest_rows, packed_rows, token_batches
from loaderpool.plan.order import DrawnOrder, Order
from loaderpool.plan.packed import PackedPlan
from tests.support.batches import calls_of

WAY = {"seed": 3, "epoch": 0, "shuffle": True}
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 0.9, 5000), 1, 1000).astype(np.int64)


def groups(items, stops):
    return [items[start:stop].tolist() for start, stop in pairwise([0, *stops.tolist()])]


def padding(batches, lengths=LENGTHS):
    cost = sum(len(batch) * lengths[batch].max() for batch in batches)
    return 1 - lengths.sum() / cost


# ---- token budgets ----


def test_batches_of_a_window_are_cut_from_the_longest_on():
    lengths = np.array([5, 2, 9, 1, 7, 3, 8, 3])
    found = token_batches(lengths, 12, None, 4, seed=0, epoch=0, shuffle=False)
    assert groups(*found) == [[2], [0, 1], [3], [6], [4], [5, 7]]


def test_zeros_cost_nothing_but_a_row():
    lengths = np.array([0, 0, 0, 2])
    found = token_batches(lengths, 2, None, 9, seed=0, epoch=0, shuffle=False)
    assert groups(*found) == [[3], [0, 1], [2]]


def test_a_larger_window_pads_less():
    shares = [
        padding(groups(*token_batches(LENGTHS, 8000, None, window, **WAY)))
        for window in (100, 1000, 5000)
    ]
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.05


def test_lengths_of_batches_do_not_come_sorted():
    batches = groups(*token_batches(LENGTHS, 8000, None, 5000, **WAY))
    longest = np.array([LENGTHS[batch].max() for batch in batches])
    steps = np.diff(longest)
    assert min((steps > 0).mean(), (steps < 0).mean()) > 0.3


def test_the_first_batch_is_a_full_one():
    for epoch in range(20):
        items, stops = token_batches(LENGTHS, 8000, None, 1000, **{**WAY, "epoch": epoch})
        first = items[: stops[0]]
        assert (len(first) + 1) * LENGTHS[first].max() > 8000


def test_epochs_and_seeds_have_other_batches_of_the_same_number():
    found = [
        groups(*token_batches(LENGTHS, 8000, None, 5000, seed=seed, epoch=epoch, shuffle=True))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({len(batches) for batches in found}) == 1  # a window of all items
    assert len({tuple(map(tuple, batches)) for batches in found}) == 4


# ---- packing ----


def test_items_of_a_row_and_rows_keep_the_order_of_the_source():
    lengths = np.array([3, 5, 1, 2, 6, 1])
    found = packed_rows(lengths, 6, 9, seed=0, epoch=0, shuffle=False)
    assert groups(*found) == [[0, 2, 3], [1, 5], [4]]


def test_a_shuffle_takes_the_windows_of_a_uniform_one():
    items, stops = packed_rows(LENGTHS, 1000, 500, **WAY)
    uniform = Order(len(LENGTHS), True, 3).indices(0, np.arange(len(LENGTHS)))
    for start in range(0, len(LENGTHS), 500):
        assert sorted(items[start : start + 500]) == sorted(uniform[start : start + 500])
    assert set(range(500, len(LENGTHS) + 1, 500)) <= set(stops.tolist())


def test_rows_do_not_come_sorted_by_their_items():
    rows = groups(*packed_rows(LENGTHS, 1000, 5000, **WAY))
    longest = np.array([LENGTHS[row].max() for row in rows])
    assert abs(np.corrcoef(longest, np.arange(len(rows)))[0, 1]) < 0.15
    firsts = np.mean([LENGTHS[row[0]] == LENGTHS[row].max() for row in rows if len(row) > 1])
    assert firsts < 0.6  # by chance, as rows have two items or more


def test_padding_is_small_and_shrinks_with_the_window():
    shares = [
        1 - LENGTHS.sum() / 4096 / len(packed_rows(LENGTHS, 4096, window, **WAY)[1])
        for window in (100, 1000, 5000)
    ]
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.003


def test_a_bound_knows_items_that_share_no_row():
    assert fewest_rows(np.array([6, 6, 6]), 10) == 3
    assert fewest_rows(np.array([6, 6, 4, 4]), 10) == 2
    assert fewest_rows(np.array([7, 7, 4, 4]), 10) == 3
    assert fewest_rows(np.array([1] * 21), 10) == 3
    assert fewest_rows(np.array([0, 0]), 10) == 0


def test_first_fit_is_used_where_it_needs_fewer_rows():
    # Best-fit-decreasing needs a row more for these.
    for capacity, lengths, fewest in (
        (31, [13, 11, 11, 10, 9, 9, 8, 8, 8, 8, 8, 5, 4, 4, 3, 2, 2], 4),
        (72, [39, 36, 35, 35, 35, 33, 31, 25, 23, 18, 17, 10, 9, 5, 5], 5),
    ):
        found = packed_rows(np.array(lengths), capacity, 99, **WAY)
        assert len(found[1]) == fewest


# ---- rows of several batches at once ----


@pytest.mark.parametrize("kind", ["packed", "budget", "buckets"])
def test_more_batches_cost_no_more_calls(kind):
    if kind == "buckets":
        order, buckets = Order(len(LENGTHS), True), ItemBuckets.of(LENGTHS, (90, 200))
        plan = BucketPlan(order, 4, buckets=buckets, batch_sizes=(4, 3, 2))
    else:
        empty = {
            "packed": PackedPlan(DrawnOrder(len(LENGTHS)), 4, length=1000),
            "budget": DrawnBatches(DrawnOrder(len(LENGTHS)), 4),
        }[kind]
        items, stops = packed_rows(LENGTHS, 1000, 5000, **WAY)
        plan = empty.drawn(items, len(items), stops, LENGTHS[items])
    plan.batch_rows(0, 0, 1)  # makes the tables of the epoch
    for look_up in (plan.batch_rows, plan.positions):
        calls = [calls_of(partial(look_up, 0, 3, count)) for count in (2, 200)]
        assert calls[1] <= calls[0], look_up
    each = [plan.positions(0, batch).tolist() for batch in range(3, 203)]
    assert plan.batch_rows(0, 3, 200) == tuple(map(len, each))
    assert plan.positions(0, 3, 200).tolist() == [*chain.from_iterable(each)]


# ---- plans before an epoch was drawn ----


def test_a_plan_without_an_order_counts_its_items():
    plan = PackedPlan(DrawnOrder(10), 4, length=8)
    assert (plan.batches_per_epoch, plan.rows_per_epoch, plan.most_rows) == (3, 10, 4)
    budget = DrawnBatches(DrawnOrder(10), 4, num_shards=3)
    assert sum(budget.rows(0, batch) for batch in range(budget.batches_per_epoch)) == 3
