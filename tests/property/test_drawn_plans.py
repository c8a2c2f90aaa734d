"""Plans of drawn orders: shards share each epoch, rests continue it, and shared memory keeps it."""

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

from loaderpool.plan.alias_table import alias_table
from loaderpool.plan.batches import Numbering, Plan
from loaderpool.plan.drawn import DrawnBatches, checksum_of, order_bytes, read_order, write_order
from loaderpool.plan.order import DrawnOrder
from loaderpool.plan.weighted_order import WeightedOrder

EXAMPLES = settings(max_examples=150, deadline=None)
NONE = np.empty(0, np.int64)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of an epoch with a drawn order: given rows for each batch, or the same for all."""
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    settings = {"batch_size": draw(st.integers(1, 5)), "drop_remainder": draw(st.booleans())}
    size = sum(rows)
    indices = np.array(draw(st.permutations(range(100, 100 + size))), np.int64)
    if draw(st.booleans()):
        empty = DrawnBatches(DrawnOrder(7), **settings)
        return empty.drawn(indices, size, np.cumsum(rows))
    if draw(st.booleans()):
        return Plan(WeightedOrder(7, seed=3), **settings).drawn(
            alias_table(np.arange(1.0, 9)), size, NONE
        )
    return Plan(DrawnOrder(7), **settings).drawn(indices, size, NONE)


def shards_of(plan: Plan, count: int) -> list[Plan]:
    return [replace(plan, num_shards=count, shard_index=index) for index in range(count)]


def batches_of(plan: Plan) -> list[list[int]]:
    return [plan.positions(5, batch).tolist() for batch in range(plan.batches_per_epoch)]


@given(plans(), st.integers(1, 5))
@EXAMPLES
def test_shards_share_an_epoch_evenly(plan: Plan, count: int) -> None:
    shards = shards_of(plan, count)
    found = [batches_of(shard) for shard in shards]
    assert len({len(batches) for batches in found}) == 1
    counts = Counter(chain.from_iterable(chain.from_iterable(found)))
    repeated = sum(counts.values()) - len(counts)
    assert repeated == shards[0].repeated_rows < count
    if not plan.drop_remainder:
        assert sorted(counts) == list(range(plan.order.size))
    for shard, batches in zip(shards, found, strict=True):
        assert sum(map(len, batches)) == shard.rows_per_epoch
        assert all(1 <= len(batch) <= max(shard.most_rows, 1) for batch in batches)
        numbers = range(shard.batches_per_epoch)
        assert [shard.rows(5, batch) for batch in numbers] == [*map(len, batches)]
        for batch in numbers:
            count = min(3, len(batches) - batch)
            assert [*shard.batch_rows(5, batch, count)] == [*map(len, batches[batch:][:count])]
        joined = shard.positions(5, 0, len(batches)).tolist()
        assert joined == [*chain.from_iterable(batches)]


@given(plans())
@EXAMPLES
def test_one_shard_has_the_batches_that_were_given(plan: Plan) -> None:
    if isinstance(plan, DrawnBatches):
        bounds = [0, *plan.stops.tolist()]
        given = [[*range(*pair)] for pair in pairwise(bounds)]
        assert batches_of(plan) == given


@given(plans(), st.integers(1, 4), st.integers(1, 4), st.data())
@EXAMPLES
def test_other_shards_continue_an_epoch(
    plan: Plan, before: int, after: int, data: st.DataObject
) -> None:
    plan = replace(plan, drop_remainder=False)
    first = shards_of(plan, before)
    taken = data.draw(st.integers(0, first[0].batches_per_epoch))
    starts = {shard.start_after(5, taken) for shard in first}
    assert len(starts) == 1
    had = chain.from_iterable(batch for each in first for batch in batches_of(each)[:taken])
    rests = [shard.after(starts.copy().pop()) for shard in shards_of(plan, after)]
    left = chain.from_iterable(batch for each in rests for batch in batches_of(each))
    had, left = set(had), set(left)
    assert not had & left
    assert had | left == set(range(plan.order.size))
    number = Numbering(rests[0].after(0), 5, rests[0].start)
    for batch in range(rests[0].batches_per_epoch):
        at = 6 * number.batches_per_epoch - rests[0].batches_per_epoch + batch
        assert number.locate(at)[:2] == (5, batch)
        assert number.total_rows(at, 1) == rests[0].rows(5, batch)


@given(plans())
@EXAMPLES
def test_shared_memory_keeps_an_order(plan: Plan) -> None:
    memory = bytearray(64 + order_bytes(plan))

    def write(offset: int, part: npt.NDArray[Any]) -> None:
        memory[offset : offset + part.nbytes] = part.tobytes()

    write_order(plan, write, 64)
    nothing = type(plan)(replace(plan.order, table=None, size=7), plan.batch_size)
    there = read_order(pickle.loads(pickle.dumps(nothing)), memory, 64)
    there = replace(there, drop_remainder=plan.drop_remainder)
    assert batches_of(there) == batches_of(plan)
    positions = np.arange(plan.order.size)
    assert there.order.indices(5, positions) == plan.order.indices(5, positions)
    assert checksum_of(there) == checksum_of(plan)
    assert checksum_of(there) != checksum_of(plan.drawn(plan.order.table + 1, 1, NONE))


@given(plans(), st.integers(1, 4), st.integers(1, 4), st.data())
@EXAMPLES
def test_batches_that_are_left_out_come_on_no_shard(
    plan: Plan, before: int, after: int, data: st.DataObject
) -> None:
    plan = replace(plan, drop_remainder=False)
    first = shards_of(plan, before)
    count = first[0].batches_per_epoch
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    starts = {shard.without(5, range(begin, end)) for shard in first}
    assert len(starts) == 1
    start = starts.pop()
    left = [*range(begin), *range(end, count)]
    for shard in first:
        whole = batches_of(shard)
        assert batches_of(shard.after(start)) == [whole[number] for number in left]
    expected = {row for shard in first for number in left for row in batches_of(shard)[number]}
    found = [batch for shard in shards_of(plan, after) for batch in batches_of(shard.after(start))]
    assert set(chain.from_iterable(found)) == expected
    rests = [shard.after(start) for shard in shards_of(plan, after)]
    stop = data.draw(st.integers(0, rests[0].batches_per_epoch))
    had = {row for rest in rests for batch in batches_of(rest)[:stop] for row in batch}
    starts = {rest.start_after(5, stop) for rest in rests}
    assert len(starts) == 1
    rests = [shard.after(starts.copy().pop()) for shard in first]
    more = {row for rest in rests for batch in batches_of(rest) for row in batch}
    assert not more & had
    assert more | had == expected
