"""Orders by lengths: no batch or row is too large, and shards never split a row."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.plan.drawn import DrawnBatches, checksum_of, order_bytes, read_order, write_order
from loaderpool.plan.lengths import fewest_rows, packed_rows, token_batches
from loaderpool.plan.order import DrawnOrder, Order
from loaderpool.plan.packed import PackedPlan

EXAMPLES = settings(max_examples=150, deadline=None)
MOST = 20
LENGTHS = st.lists(st.integers(0, MOST), min_size=1, max_size=60)


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Return the number of rows that the textbook algorithm needs."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        for row, space in enumerate(spaces):
            if space >= length:
                spaces[row] -= length
                break
        else:
            spaces.append(capacity - length)
    return len(spaces)


def groups(items: np.ndarray, stops: np.ndarray) -> list[list[int]]:
    return [items[start:stop].tolist() for start, stop in pairwise([0, *stops.tolist()])]


@given(LENGTHS, st.integers(MOST, 90), st.none() | st.integers(1, 9), st.integers(1, 70), st.data())
@EXAMPLES
def test_batches_keep_the_budget_and_the_window(
    lengths: list[int], most: int, rows: int | None, window: int, data: st.DataObject
) -> None:
    shuffle, epoch = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    settings = {"seed": 5, "epoch": epoch, "shuffle": shuffle}
    items, stops = token_batches(np.array(lengths), most, rows, window, **settings)
    assert sorted(items.tolist()) == [*range(len(lengths))]
    batches = groups(items, stops)
    for batch in batches:
        sizes = [lengths[item] for item in batch]
        assert len(batch) * max(sizes) <= most
        assert 1 <= len(batch) <= (rows or len(lengths))
        assert sizes == sorted(sizes, reverse=True)
    order = _in_order(len(lengths), **settings)
    for start in range(0, len(lengths), window):
        part = order[start : start + window].tolist()
        inside = [batch for batch in batches if set(batch) & set(part)]
        assert sorted(chain.from_iterable(inside)) == sorted(part)
        # All batches of a window are full, except the last.
        for batch in inside[:-1]:
            longest = max(lengths[item] for item in batch)
            assert len(batch) in (rows, len(part), most // max(1, longest))


def _in_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the items in the order before they are cut into windows."""
    return np.array(Order(size, shuffle, seed).indices(epoch, np.arange(size)))


@given(LENGTHS, st.integers(MOST, 50), st.integers(1, 70), st.booleans(), st.integers(0, 3))
@EXAMPLES
def test_rows_are_not_overfull_and_as_few_as_by_first_fit(
    lengths: list[int], capacity: int, window: int, shuffle: bool, epoch: int
) -> None:
    settings = {"seed": 5, "epoch": epoch, "shuffle": shuffle}
    items, stops = packed_rows(np.array(lengths), capacity, window, **settings)
    assert sorted(items.tolist()) == [*range(len(lengths))]
    rows = groups(items, stops)
    assert all(row and sum(lengths[item] for item in row) <= capacity for row in rows)
    order = _in_order(len(lengths), **settings).tolist()
    place = {item: at for at, item in enumerate(order)}
    at = 0
    for start in range(0, len(lengths), window):
        part = [lengths[item] for item in order[start : start + window]]
        count = sum(place[row[0]] // window == start // window for row in rows)
        assert fewest_rows(np.array(part), capacity) <= count
        assert count <= first_fit_decreasing(part, capacity)
        # Rows of a window come together, and items of a row in the order of the epoch.
        inside = rows[at : at + count]
        assert sum(map(len, inside)) == len(part)
        assert all([*map(place.get, row)] == sorted(map(place.__getitem__, row)) for row in inside)
        at += count
    assert at == len(rows)


# ---- plans ----


@st.composite
def packed_plans(draw: st.DrawFn) -> PackedPlan:
    lengths = np.array(draw(LENGTHS))
    items, stops = packed_rows(lengths, MOST, 16, seed=1, epoch=0, shuffle=True)
    empty = PackedPlan(
        DrawnOrder(len(lengths)),
        draw(st.integers(1, 5)),
        draw(st.booleans()),
        length=MOST,
    )
    plan = empty.drawn(items, len(items), stops, lengths[items])
    assert isinstance(plan, PackedPlan)
    return plan


def shards_of(plan: PackedPlan, count: int) -> list[PackedPlan]:
    return [replace(plan, num_shards=count, shard_index=index) for index in range(count)]


def rows_of(plan: PackedPlan, batch: int) -> list[tuple[int, ...]]:
    """Return the positions of each row of a batch, and check their places."""
    positions = plan.positions(5, batch).tolist()
    lengths, counts = plan.row_items(5, batch, 1)
    assert plan.rows(5, batch) == len(positions) == counts.sum()
    assert lengths.tolist() == plan.lengths[positions].tolist()
    left = iter(positions)
    rows = [tuple(next(left) for _ in range(count)) for count in counts.tolist()]
    assert all(plan.lengths[[*row]].sum() <= plan.packed_length for row in rows)
    return rows


def batches_of(plan: PackedPlan) -> list[list[tuple[int, ...]]]:
    return [rows_of(plan, batch) for batch in range(plan.batches_per_epoch)]


@given(packed_plans(), st.integers(1, 5))
@EXAMPLES
def test_shards_share_whole_rows_evenly(plan: PackedPlan, count: int) -> None:
    shards = shards_of(plan, count)
    found = [batches_of(shard) for shard in shards]
    assert len({len(batches) for batches in found}) == 1
    rows = Counter(chain.from_iterable(chain.from_iterable(found)))
    assert rows.total() - len(rows) == shards[0].repeated_rows < count
    everything = {tuple(range(*pair)) for pair in pairwise([0, *plan.stops.tolist()])}
    assert rows.keys() <= everything
    if not plan.drop_remainder:
        assert rows.keys() == everything
    for shard, batches in zip(shards, found, strict=True):
        assert all(len(batch) == plan.batch_size for batch in batches[:-1])
        items = [sum(map(len, batch)) for batch in batches]
        assert shard.rows_per_epoch == sum(items)
        assert not batches or shard.most_rows == max(items)
        if plan.drop_remainder and batches:
            assert len(batches[-1]) == plan.batch_size


@given(packed_plans(), st.integers(1, 4), st.integers(1, 4), st.data())
@EXAMPLES
def test_other_shards_continue_an_epoch_of_rows(
    plan: PackedPlan, before: int, after: int, data: st.DataObject
) -> None:
    plan = replace(plan, drop_remainder=False)
    first = shards_of(plan, before)
    taken = data.draw(st.integers(0, first[0].batches_per_epoch))
    (start,) = {shard.start_after(5, taken) for shard in first}
    had = {row for each in first for batch in batches_of(each)[:taken] for row in batch}
    rests = [shard.after(start) for shard in shards_of(plan, after)]
    left = {row for each in rests for batch in batches_of(each) for row in batch}
    assert not had & left
    assert had | left == {tuple(range(*pair)) for pair in pairwise([0, *plan.stops.tolist()])}


@given(packed_plans())
@EXAMPLES
def test_shared_memory_keeps_packed_rows(plan: PackedPlan) -> None:
    memory = bytearray(64 + order_bytes(plan))

    def write(offset: int, part: npt.NDArray[Any]) -> None:
        memory[offset : offset + part.nbytes] = part.tobytes()

    write_order(plan, write, 64)
    nothing = replace(plan, order=DrawnOrder(7), stops=plan.stops[:0], lengths=plan.lengths[:0])
    there = read_order(pickle.loads(pickle.dumps(nothing)), memory, 64)
    assert isinstance(there, PackedPlan)
    assert batches_of(there) == batches_of(plan)
    assert checksum_of(there) == checksum_of(plan)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 12), st.data())
@EXAMPLES
def test_no_part_of_a_batch_has_rows_of_another(
    rows: list[int], count: int, data: st.DataObject
) -> None:
    stops = np.cumsum(rows)
    size = int(stops[-1])
    plan = DrawnBatches(DrawnOrder(size), 4).drawn(np.arange(size), size, stops)
    plan = plan.after(data.draw(st.integers(0, len(rows) - 1)))
    parts = [
        each.positions(5, batch).tolist()
        for index in range(count)
        for each in [replace(plan, num_shards=count, shard_index=index)]
        for batch in range(each.batches_per_epoch)
    ]
    for part in parts:
        assert len(set(stops.searchsorted(part, side="right").tolist())) == 1
    # The parts of one batch differ by one row at most.
    of_batch: dict[int, set[int]] = {}
    for part in parts:
        of_batch.setdefault(int(stops.searchsorted(part[0], side="right")), set()).add(len(part))
    assert all(max(sizes) - min(sizes) <= 1 for sizes in of_batch.values())
