"""The order of batches: who gets which rows, what happens to the tail, how epochs and seeds change it."""

from __future__ import annotations

from typing import Any

import pytest

from loaderpool.errors import ArgumentError
from loaderpool.plan.order import Plan


@pytest.mark.parametrize(
    ("fields", "batches", "repeated"),
    [
        ((10, 4), [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]], 0),
        ((10, 4, False, 0, True), [[[0, 1, 2, 3], [4, 5, 6, 7]]], 0),
        ((8, 2), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], 0),
        ((6, 1), [[[0], [4]], [[1], [5]], [[2], [4]], [[3], [5]]], 2),  # a tail shorter than the shards is dealt again
        ((1, 8), [[[0]], [[0]], [[0]]], 2),  # each shard has a batch
        ((5, None), [[[0], [2], [4]], [[1], [3], [4]]], 1),  # each item is a batch
        ((0, 4, True), [[]], 0),
        ((0, 4, True, 0, True), [[]], 0),
    ],
)
def test_who_gets_which_rows(fields: Any, batches: list[list[list[int]]], repeated: int) -> None:
    for shard, expected in enumerate(batches):
        plan = Plan(*fields, num_shards=len(batches), shard_index=shard)
        assert [plan.positions(0, batch).tolist() for batch in range(plan.batches_per_epoch)] == expected
        assert plan.last_rows == (len(expected[-1]) if expected else 4)
        assert plan.repeated_rows == repeated
        assert plan.indices(0, plan.positions(0, 0, 0)) == []


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


@pytest.mark.parametrize("size", [-1, 2**62 + 1])
def test_a_size_outside_its_range_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="size must"):
        Plan(size, 2)
