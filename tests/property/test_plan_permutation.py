"""For any size and key, a permutation is a bijection."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.plan.permutation import MAX_SIZE, TABLE_SIZE, Permutation

keys = st.integers(0, (1 << 128) - 1)


@given(st.integers(1, 3 * TABLE_SIZE), keys)
@settings(max_examples=60, deadline=None)
def test_every_number_comes_exactly_once(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    assert np.array_equal(np.sort(permutation.take(np.arange(size))), np.arange(size))


@given(st.integers(1, MAX_SIZE), keys, st.data())
@settings(max_examples=150, deadline=None)
def test_each_number_has_its_place_in_any_order_of_asking(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    permutation = Permutation(size, key)
    taken = permutation.take(np.array(positions, np.int64)).tolist()
    assert taken == [permutation.take(np.array([position])).item() for position in positions]
    assert all(0 <= number < size for number in taken)
    assert len(set(taken)) == len(set(positions))
