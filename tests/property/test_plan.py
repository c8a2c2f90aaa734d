"""For any plan, in one order or by buckets: shards agree on batches, no item is lost, and a rest
continues its epoch.
"""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.errors import ArgumentError
from loaderpool.plan.batches import Numbering, Plan, bounds_of
from loaderpool.plan.buckets import BucketPlan, ItemBuckets
from loaderpool.plan.order import Order
from loaderpool.trainer.replay import find

EPOCHS = st.integers(0, 2)
EXAMPLES = settings(max_examples=200, deadline=None)


@st.composite
def all_fields(draw: st.DrawFn) -> dict[str, Any]:
    shuffle, seed = draw(st.booleans()), draw(st.integers(0, 2**64))
    fields: dict[str, Any] = {
        "drop_remainder": draw(st.booleans()),
        "num_shards": draw(st.integers(1, 7)),
    }
    if draw(st.booleans()):
        order = Order(draw(st.integers(0, 200)), shuffle, seed)
        return {**fields, "order": order, "batch_size": draw(st.none() | st.integers(1, 20))}
    boundaries = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    lengths = draw(st.lists(st.integers(0, 14), max_size=120))
    sizes = draw(
        st.lists(st.integers(1, 6), min_size=len(boundaries) + 1, max_size=len(boundaries) + 1)
    )
    buckets = ItemBuckets.of(np.array(lengths, np.int64), tuple(boundaries))
    order = Order(len(lengths), shuffle, seed)
    return {
        **fields,
        "order": order,
        "batch_size": max(sizes),
        "buckets": buckets,
        "batch_sizes": tuple(sizes),
    }


def shards_of(fields: dict[str, Any], num_shards: int | None = None) -> list[Any]:
    count = num_shards or fields["num_shards"]
    make = BucketPlan if "buckets" in fields else Plan
    return [make(**{**fields, "num_shards": count, "shard_index": shard}) for shard in range(count)]


def batches_of(plan: Plan, epoch: int) -> list[list[int]]:
    return [plan.positions(epoch, batch).tolist() for batch in range(plan.batches_per_epoch)]


def walked(plan: Any, epoch: int) -> list[list[int]]:
    """Return the global batches of an epoch, computed item by item from the definition."""
    numbers = plan.buckets.numbers if plan.rows_vary else np.zeros(plan.order.size, int)
    sizes = plan.batch_sizes if plan.rows_vary else (plan.batch_size or 1,)
    filling: list[list[int]] = [[] for _ in sizes]
    batches = []
    for position, index in enumerate(plan.order.indices(epoch, np.arange(plan.order.size))):
        bucket = int(numbers[index])
        filling[bucket].append(position)
        if len(filling[bucket]) == sizes[bucket] * plan.num_shards:
            batches.append(filling[bucket])
            filling[bucket] = []
    return batches + ([] if plan.drop_remainder else [rest for rest in filling if rest])


@given(all_fields(), EPOCHS)
@EXAMPLES
def test_shards_have_the_same_global_batches_and_miss_and_repeat_what_they_say(
    fields: dict[str, Any], epoch: int
) -> None:
    shards = shards_of(fields)
    expected = walked(shards[0], epoch)
    assert {plan.batches_per_epoch for plan in shards} == {len(expected)}
    seen: Counter[int] = Counter()
    for step, whole in zip(
        zip(*(batches_of(plan, epoch) for plan in shards), strict=True), expected, strict=True
    ):
        dealt = list(chain.from_iterable(step))
        assert dealt[: len(whole)] == whole, "in their order, one shard after the other"
        assert set(dealt) == set(whole)
        assert max(map(len, step)) - min(map(len, step)) <= 1
        seen.update(dealt)
    assert len(seen) == fields["order"].size or fields["drop_remainder"]
    assert {plan.repeated_rows for plan in shards} == {sum(seen.values()) - len(seen)}
    assert sum(seen.values()) == sum(plan.rows_per_epoch for plan in shards)
    assert len(set(shards[0].order.indices(epoch, np.array(sorted(seen), np.int64)))) == len(seen)


@given(all_fields(), EPOCHS, st.data())
@EXAMPLES
def test_a_chunk_is_its_batches_and_a_place_is_where_an_item_is(
    fields: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    shards = shards_of(fields)
    plan = data.draw(st.sampled_from(shards))
    batches = batches_of(plan, epoch)
    rows = [plan.rows(epoch, batch) for batch in range(len(batches))]
    assert rows == list(map(len, batches))
    assert max(rows, default=plan.most_rows) == plan.most_rows
    first = data.draw(st.integers(0, len(batches)))
    count = data.draw(st.integers(0, len(batches) - first))
    chunk = plan.positions(epoch, first, count)
    assert chunk.dtype == np.int64
    parts = [chunk[start:stop].tolist() for start, stop in bounds_of(rows[first : first + count])]
    assert parts == batches[first : first + count]
    if not plan.rows_vary:
        assert rows == rows[:1] * (len(rows) - 1) + [plan.last_rows] * bool(rows), (
            "only the last one may be shorter"
        )
    numbering = Numbering(plan)
    if count:
        number = epoch * numbering.batches_per_epoch + first
        alike = numbering.alike(number)
        assert plan.rows_vary or len(set(rows[first : first + alike])) == 1
        assert numbering.total_rows(number, count) == len(chunk)
    made = {(index, shard): (batch, row)
            for shard, each in enumerate(shards)
            for batch, positions in enumerate(batches_of(each, epoch))
            for row, index in enumerate(each.order.indices(epoch, np.array(positions, np.int64)))}  # fmt: skip
    for index in range(fields["order"].size):
        for shard, each in enumerate(shards):
            assert find(each, epoch, index) == made.get((index, shard))


@given(all_fields(), EPOCHS, st.data())
@EXAMPLES
def test_to_go_on_is_as_if_it_had_never_stopped(
    fields: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    """After any number of stops, every shard can continue from any shard's state."""
    shards = shards_of(fields)
    whole = [batches_of(plan, epoch) for plan in shards]
    count = shards[0].batches_per_epoch
    stops = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    got: list[list[list[int]]] = [[] for _ in shards]
    plans = pickle.loads(pickle.dumps(shards))
    for before, stop in pairwise([0, *stops, count]):
        for shard, plan in enumerate(plans):
            assert plan.batches_per_epoch == count - before or stop == count
            got[shard] += batches_of(plan, epoch)[: stop - before]
        starts = {plan.start_after(epoch, stop - before) for plan in plans}
        assert len(starts) == 1
        start = starts.pop()
        plans = [plan.after(start) for plan in shards]
    assert got == whole
    if not fields["drop_remainder"]:
        assert {plan.batches_per_epoch for plan in plans} == {0}


@given(all_fields(), EPOCHS, st.data())
@EXAMPLES
def test_shares_follow_the_cluster(fields: dict[str, Any], epoch: int, data: st.DataObject) -> None:
    """The number of shards changes during an epoch, and together they have each item once."""
    start: Any = 0
    seen: Counter[int] = Counter()
    repeated = 0
    for is_last in [*data.draw(st.lists(st.just(False), max_size=3)), True]:
        shards = [plan.after(start) for plan in shards_of(fields, data.draw(st.integers(1, 5)))]
        count = shards[0].batches_per_epoch
        stop = count if is_last else data.draw(st.integers(0, count))
        for plan in shards:
            seen.update(chain.from_iterable(batches_of(plan, epoch)[:stop]))
        repeated += shards[0].repeated_rows
        if stop == count:
            break
        start = shards[0].start_after(epoch, stop)
        repeated -= shards[0].after(start).repeated_rows
    assert len(seen) == fields["order"].size or fields["drop_remainder"]
    assert sum(seen.values()) - len(seen) == repeated


@given(
    st.lists(st.integers(0, 2**40), max_size=50),
    st.sets(st.integers(1, 2**40), min_size=1, max_size=300),
)
@settings(max_examples=100, deadline=None)
def test_buckets_are_those_of_tf_data(lengths: list[int], edges: set[int]) -> None:
    boundaries = sorted(edges)
    buckets = ItemBuckets.of(np.array(lengths, np.int64), tuple(boundaries))
    for length, bucket in zip(lengths, buckets.numbers.tolist(), strict=True):
        assert bucket == 0 or boundaries[bucket - 1] <= length
        assert bucket == len(boundaries) or length < boundaries[bucket]
    assert buckets.firsts == tuple(accumulate((0, *buckets.counts[:-1])))
    assert buckets.numbers.dtype == (np.uint8 if len(boundaries) < 256 else np.uint16)


@pytest.mark.parametrize("size", [-1, 2**62 + 1])
def test_a_size_outside_its_range_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="size must"):
        Order(size)


@given(all_fields(), EPOCHS, st.data())
@EXAMPLES
def test_batches_that_are_left_out_come_on_no_shard(
    fields: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    """Other rows come once. With the same number of shards, their batches do not change."""
    fields["drop_remainder"] = False
    shards = shards_of(fields)
    count, after = shards[0].batches_per_epoch, data.draw(st.integers(1, 5))
    whole = [batches_of(plan, epoch) for plan in shards]
    taken = data.draw(st.integers(0, count))
    start = shards[0].start_after(epoch, taken)
    left = set(range(taken, count))
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, count))
        end = data.draw(st.integers(begin, count))
        starts = {plan.after(start).without(epoch, range(begin, end)) for plan in shards}
        assert len(starts) == 1
        start = starts.pop()
        left -= set(range(begin, end))
    rests = [plan.after(start) for plan in pickle.loads(pickle.dumps(shards))]
    for rest, batches in zip(rests, whole, strict=True):
        assert batches_of(rest, epoch) == [batches[number] for number in sorted(left)]
    expected = {row for batches in whole for number in left for row in batches[number]}
    shards = [plan.after(start) for plan in shards_of(fields, after)]
    stop = data.draw(st.integers(0, shards[0].batches_per_epoch))
    got = Counter(chain.from_iterable(chain(*(batches_of(plan, epoch)[:stop] for plan in shards))))
    starts = {plan.start_after(epoch, stop) for plan in shards}
    assert len(starts) == 1
    rests = [plan.after(starts.copy().pop()) for plan in shards_of(fields)]
    more = set(chain.from_iterable(chain(*(batches_of(plan, epoch) for plan in rests))))
    assert not more & got.keys()
    assert more | got.keys() == expected
