"""For any size and key: a bijection, and the scalar and the vectorised way agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.plan.permutation import MAX_SIZE, TABLE_SIZE, Permutation

keys = st.integers(0, (1 << 128) - 1)


@given(st.integers(1, 3 * TABLE_SIZE), keys)
@settings(max_examples=60, deadline=None)
def test_every_number_comes_exactly_once(size: int, key: int) -> None:
    order = Permutation(size, key).take(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


@given(st.integers(1, MAX_SIZE), keys, st.data())
@settings(max_examples=100, deadline=None)
def test_take_is_indexing(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    permutation = Permutation(size, key)
    taken = permutation.take(np.array(positions, np.int64)).tolist()
    assert taken == [permutation[position] for position in positions]
    assert all(0 <= number < size for number in taken)
    assert len(set(taken)) == len(set(positions))


@given(st.integers(1, MAX_SIZE), keys, st.data())
@settings(max_examples=100, deadline=None)
def test_a_number_is_found_again(size: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(size, key)
    number = data.draw(st.integers(0, size - 1))
    assert permutation[permutation.position_of(number)] == number


@given(st.integers(1, 3 * TABLE_SIZE), keys)
@settings(max_examples=30, deadline=None)
def test_finding_undoes_indexing(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    for position in range(0, size, max(1, size // 50)):
        assert permutation.position_of(permutation[position]) == position
