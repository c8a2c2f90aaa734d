"""A plan of any size costs nothing, up to the largest one."""

from __future__ import annotations

import pytest

from loaderpool.errors import ArgumentError
from loaderpool.plan.order import Plan


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
