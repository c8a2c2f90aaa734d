"""For any mix: weights are kept, all records of a source come before one is repeated, and an item
never changes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.plan import shares
from loaderpool.plan.order import Order
from loaderpool.plan.shares import BLOCK, Shares
from tests.support.batches import calls_of

whole_weights = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)
any_weights = st.lists(st.integers(0, 9) | st.floats(0.01, 9), min_size=1, max_size=6).filter(any)


@st.composite
def mixes(draw: st.DrawFn, stops: Any = ("first", "all", None)) -> Any:
    """Return a mix of a few hundred items, and its arguments."""
    weights = draw(st.none() | any_weights)
    count = len(weights) if weights else draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 120), min_size=count, max_size=count))
    stop = draw(st.sampled_from(stops)) or draw(st.integers(1, 900))
    seed = draw(st.integers(0, 2**70))
    mixed = lp.mix([range(size) for size in sizes], weights, seed, stop)
    assume(len(mixed) < 5000)
    return mixed, weights or sizes, sizes, stop


def item_of(mixed: Any, epoch: int, index: int) -> object:
    """Return an item of a mix as a loader reads it."""
    return mixed.records[mixed.order.record(epoch, index)]


@given(whole_weights, st.integers(0, 2**70), st.integers(0, 2000), st.integers(0, 400))
@settings(max_examples=150)
def test_shares_sum_up_never_fall_and_stay_near_their_weights(
    weights: list[int], seed: int, start: int, more: int
) -> None:
    shares, total = Shares(weights, seed), sum(weights)
    before, after = shares.counts(start), shares.counts(start + more)
    assert (sum(before), sum(after)) == (start, start + more)
    for source, weight in enumerate(weights):
        growth = after[source] - before[source]
        assert 0 <= growth <= more
        assert (
            abs(before[source] - Fraction(start * weight, total)) < 4
        )  # at most one for each fork above it
        assert weight or not growth
    assert shares.counts(total * start) == [weight * start for weight in weights]


@given(mixes())
@settings(max_examples=100)
def test_each_sources_records_come_in_order_and_all_before_any_comes_again(made: Any) -> None:
    mixed, weights, sizes, stop = made
    taken: Counter[int] = Counter()
    for index in range(len(mixed)):
        source, record = mixed.origin(index)
        assert record == taken[source] % sizes[source] == mixed[index]
        taken[source] += 1
    drawn = [source for source, weight in enumerate(weights) if weight]
    assert set(taken) <= set(drawn)
    if stop == "first":
        assert all(taken[source] <= sizes[source] for source in drawn)
    elif stop == "all":
        assert all(taken[source] >= sizes[source] for source in drawn)
    else:
        assert len(mixed) == stop


@given(mixes(), st.integers(1, 4))
@settings(max_examples=100)
def test_each_epoch_goes_on_where_the_last_one_stopped(made: Any, epochs: int) -> None:
    mixed, weights, sizes, stop = made
    assume(len(mixed) < 1500)
    taken: Counter[int] = Counter()
    for epoch in range(epochs):
        before, seen = taken.copy(), set()
        for index in range(len(mixed)):
            source, record = mixed.origin(index, epoch)
            assert record == taken[source] % sizes[source] == item_of(mixed, epoch, index)
            taken[source] += 1
            seen.add(mixed.order.record(epoch, index))
        of_epoch = taken - before
        shares = [Fraction(weight) for weight in weights]
        for source, weight in enumerate(shares):
            if stop == "first":
                assert of_epoch[source] <= sizes[source]
            elif stop == "all" and weight:
                assert of_epoch[source] >= sizes[source]
            elif stop not in ("first", "all"):
                assert abs(taken[source] - (epoch + 1) * stop * weight / sum(shares)) < 4
        assert seen <= set(range(sum(sizes))) and len(mixed.records) == sum(sizes)


@given(mixes(stops=("first", "all")), st.integers(1, 3))
@settings(max_examples=60)
def test_an_epoch_of_whole_sources_is_repeated(made: Any, epoch: int) -> None:
    mixed, _, sizes, _ = made
    taken = Counter(mixed.origin(index)[0] for index in range(len(mixed)))
    indices = np.arange(len(mixed))
    first, later = (mixed.order.records(each, indices).tolist() for each in (0, epoch))
    if not any(count % sizes[source] for source, count in taken.items()):
        assert first == later
    elif epoch == 1:
        assert first != later


@given(mixes(), st.data())
@settings(max_examples=60)
def test_an_item_is_the_same_however_it_is_reached(made: Any, data: st.DataObject) -> None:
    mixed = made[0]
    expected = [mixed.origin(index) for index in range(len(mixed))]
    indices = data.draw(st.lists(st.integers(-len(mixed), len(mixed) - 1), max_size=20))
    for index in indices:
        assert pickle.loads(pickle.dumps(mixed)).origin(index) == expected[index]
    there = pickle.loads(pickle.dumps(mixed))
    assert [there.origin(index) for index in indices] == [expected[index] for index in indices]


@given(mixes(), st.integers(0, 3), st.data())
@settings(max_examples=60)
def test_records_are_the_same_in_any_order_and_in_small_tables(
    made: Any, epoch: int, data: st.DataObject
) -> None:
    order = made[0].order
    indices = data.draw(st.lists(st.integers(0, order.size - 1), max_size=20))
    expected = [order.record(epoch, index) for index in indices]
    with mock.patch.object(shares, "_WINDOW", 2 * BLOCK):
        there = pickle.loads(pickle.dumps(order))
        for _ in range(2):
            found = there.records(epoch, np.array(indices, np.int64))
            assert found.tolist() == expected
        assert [there.record(epoch, index) for index in indices] == expected


@pytest.mark.parametrize("weights", [None, [2, 1]])
def test_later_epochs_make_no_block_again(weights: Any) -> None:
    order = lp.mix([range(100_000), range(100_000)], weights).order
    order.records(0, np.arange(order.size))
    assert calls_of(lambda: order.records(1, np.arange(order.size))) < 60


def test_epochs_that_differ_draw_the_orders_of_blocks_once() -> None:
    made, there = (lp.mix([range(600), range(900)], [2, 1], stop=1000).order for _ in range(2))
    first, later = (there.records(epoch, np.arange(1000)).tolist() for epoch in (0, 3))
    assert made.records(0, np.arange(1000)).tolist() == first != later
    with mock.patch.object(shares, "orders_by_hash", side_effect=AssertionError):
        assert made.records(3, np.arange(1000)).tolist() == later


def test_shuffled_rows_of_a_large_mix_make_each_block_once() -> None:
    order = lp.mix([range(100_000), range(100_000)]).order
    indices = Order(order.size, True).take(0, np.arange(order.size))
    found = order.records(0, indices)
    assert sorted(found) == [*range(order.size)]
    more = []
    assert calls_of(lambda: more.extend(order.records(0, indices))) < 40
    assert more == [*found]
