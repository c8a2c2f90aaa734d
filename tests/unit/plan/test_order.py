"""The order of batches: who gets which rows, what happens to the tail, how epochs and seeds change it."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from loaderpool.errors import ArgumentError
from loaderpool.plan.order import Plan


def batches_of(plan: Plan) -> list[list[int]]:
    return [plan.positions(0, batch).tolist() for batch in range(plan.batches_per_epoch)]


def test_one_shard_goes_through_the_source_and_ends_with_a_short_batch() -> None:
    plan = Plan(size=10, batch_size=4)
    assert batches_of(plan) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (plan.batches_per_epoch, plan.last_rows, plan.repeated_rows) == (3, 2, 0)


def test_drop_remainder_leaves_the_short_batch_out() -> None:
    plan = Plan(size=10, batch_size=4, drop_remainder=True)
    assert batches_of(plan) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (plan.batches_per_epoch, plan.last_rows) == (2, 4)


def test_a_tail_shorter_than_the_shards_is_dealt_again() -> None:
    shards = [Plan(size=14, batch_size=3, num_shards=4, shard_index=shard) for shard in range(4)]
    assert [batches_of(plan)[-1] for plan in shards] == [[12], [13], [12], [13]]
    assert [plan.repeated_rows for plan in shards] == [2] * 4


def test_an_epoch_shorter_than_the_shards_gives_each_a_batch() -> None:
    shards = [Plan(size=1, batch_size=8, num_shards=3, shard_index=shard) for shard in range(3)]
    assert [batches_of(plan) for plan in shards] == [[[0]]] * 3
    assert shards[0].repeated_rows == 2


def test_without_a_batch_size_each_item_is_a_batch() -> None:
    plan = Plan(size=5, batch_size=None, num_shards=2)
    assert batches_of(plan) == [[0], [2], [4]]
    assert [plan.rows(0, batch) for batch in range(3)] == [1, 1, 1]
    assert plan.repeated_rows == 1


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_an_empty_source_has_no_batches(drop_remainder: bool) -> None:
    plan = Plan(size=0, batch_size=4, shuffle=True, drop_remainder=drop_remainder)
    assert (plan.batches_per_epoch, plan.last_rows, plan.repeated_rows) == (0, 4, 0)
    assert plan.positions(0, 0, 0).tolist() == []
    assert plan.indices(0, plan.positions(0, 0, 0)) == []


def test_without_shuffle_indices_are_positions() -> None:
    plan = Plan(size=10, batch_size=4)
    assert plan.indices(7, plan.positions(0, 1)) == [4, 5, 6, 7]
    assert all(type(index) is int for index in plan.indices(0, plan.positions(0, 0)))


def epoch_of(plan: Plan, epoch: int) -> list[int]:
    return plan.indices(epoch, plan.positions(0, 0, plan.batches_per_epoch))


def test_the_order_is_set_by_seed_and_epoch_alone() -> None:
    plan = Plan(size=1000, batch_size=8, shuffle=True, seed=3)
    assert epoch_of(plan, 5) == epoch_of(Plan(size=1000, batch_size=31, shuffle=True, seed=3), 5)
    assert epoch_of(plan, 5) != epoch_of(Plan(size=1000, batch_size=8, shuffle=True, seed=4), 5)
    assert epoch_of(Plan(1000, 8, True, seed=1), 11) != epoch_of(Plan(1000, 8, True, seed=11), 1)


def test_a_huge_source_costs_nothing() -> None:
    """Were anything of its length made, this would end in a MemoryError."""
    plan = Plan(size=10**15, batch_size=32, shuffle=True, num_shards=8, shard_index=7)
    last = plan.batches_per_epoch - 1
    assert plan.batches_per_epoch == -(-(10**15) // 256)
    indices = plan.indices(3, plan.positions(0, last))
    assert len(set(indices)) == plan.rows(0, last)
    assert all(0 <= index < 10**15 for index in indices)


def test_a_plan_travels_and_compares_by_value() -> None:
    plan = Plan(size=10, batch_size=4, shuffle=True, seed=2)
    assert plan.batches_per_epoch == 3  # fills its caches
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert epoch_of(copy, 1) == epoch_of(plan, 1)


@pytest.mark.parametrize(("batch", "count"), [(0, 4), (2, 2), (1, -1), (-1, 1), (3, 1), (4, 0)])
def test_batches_outside_the_epoch_are_refused(batch: int, count: int) -> None:
    plan = Plan(size=10, batch_size=4)
    with pytest.raises(IndexError):
        plan.positions(0, batch, count)
    if batch in (-1, 3):
        with pytest.raises(IndexError):
            plan.rows(0, batch)


def test_shuffled_positions_outside_the_source_are_refused() -> None:
    with pytest.raises(IndexError):
        Plan(size=10, batch_size=4, shuffle=True).indices(0, np.array([10]))


@pytest.mark.parametrize("size", [-1, 2**62 + 1])
def test_a_size_outside_its_range_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="size must"):
        Plan(size, 2)
