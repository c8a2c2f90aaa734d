"""For any plan: shards agree on their batches, nothing is lost or doubled but what is said, chunks are batches."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderpool.plan.order import Numbering, Plan
from loaderpool.worker.work import OrderAhead

plans = st.fixed_dictionaries(
    {
        "size": st.integers(0, 300),
        "batch_size": st.none() | st.integers(1, 20),
        "num_shards": st.integers(1, 9),
        "drop_remainder": st.booleans(),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**64),
    }
)


def shards_of(fields: dict[str, Any]) -> list[Plan]:
    return [Plan(**fields, shard_index=shard) for shard in range(fields["num_shards"])]


def batches_of(plan: Plan) -> list[list[int]]:
    return [plan.positions(0, batch).tolist() for batch in range(plan.batches_per_epoch)]


@given(plans)
@settings(max_examples=150, deadline=None)
def test_shards_together_cover_the_epoch(fields: dict[str, Any]) -> None:
    shards = shards_of(fields)
    assert len({plan.batches_per_epoch for plan in shards}) == 1
    seen = Counter(position for plan in shards for position in chain.from_iterable(batches_of(plan)))
    step = fields["num_shards"] * (fields["batch_size"] or 1)
    kept = fields["size"] // step * step if fields["drop_remainder"] else fields["size"]
    assert sorted(seen) == list(range(kept))
    assert {plan.repeated_rows for plan in shards} == {sum(seen.values()) - kept}
    if fields["drop_remainder"] or fields["size"] % step >= fields["num_shards"]:
        assert set(seen.values()) <= {1}
    else:
        assert all(seen[position] == 1 for position in range(fields["size"] // step * step))


@given(plans)
@settings(max_examples=150, deadline=None)
def test_only_the_last_batch_may_be_short_and_shards_differ_by_one_row(fields: dict[str, Any]) -> None:
    full_rows = fields["batch_size"] or 1
    sizes = []
    for plan in shards_of(fields):
        rows = [len(batch) for batch in batches_of(plan)]
        assert rows == [plan.rows(0, batch) for batch in range(plan.batches_per_epoch)]
        assert set(rows[:-1]) <= {full_rows}
        assert rows[-1:] == [plan.last_rows] * bool(rows)
        assert all(0 < count <= full_rows for count in rows)
        numbering = Numbering(plan)
        for batch in range(len(rows)):
            assert numbering.alike(batch) == max(1, len(rows) - batch - (rows[-1] < rows[0]))
            assert numbering.total_rows(batch, len(rows) - batch) == sum(rows[batch:])
        sizes.append(rows)
    for same_batch in zip(*sizes, strict=True):
        assert max(same_batch) - min(same_batch) <= 1


@given(plans, st.data())
@settings(max_examples=150, deadline=None)
def test_a_chunk_is_its_batches(fields: dict[str, Any], data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(shards_of(fields)))
    first = data.draw(st.integers(0, plan.batches_per_epoch))
    count = data.draw(st.integers(0, plan.batches_per_epoch - first))
    chunk = plan.positions(0, first, count)
    assert chunk.dtype == np.int64
    assert chunk.tolist() == list(chain.from_iterable(batches_of(plan)[first : first + count]))


@given(plans, st.integers(0, 2**40))
@settings(max_examples=100, deadline=None)
def test_an_epoch_visits_each_item_once(fields: dict[str, Any], epoch: int) -> None:
    plan = Plan(**{**fields, "num_shards": 1, "drop_remainder": False})
    indices = plan.indices(epoch, plan.positions(0, 0, plan.batches_per_epoch))
    assert sorted(indices) == list(range(plan.size))


@given(plans, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_an_item_is_found_where_the_epoch_has_it(fields: dict[str, Any], epoch: int) -> None:
    shards = shards_of(fields)
    made: dict[int, set[tuple[int, int, int]]] = {index: set() for index in range(fields["size"])}
    for shard, plan in enumerate(shards):
        for batch in range(plan.batches_per_epoch):
            for row, index in enumerate(plan.indices(epoch, plan.positions(epoch, batch))):
                made[index].add((shard, batch, row))
    for index, places in made.items():
        position = shards[0].position_of(epoch, index)
        places_now = [(shard, plan.place(epoch, position)) for shard, plan in enumerate(shards)]
        found = {(shard, *place) for shard, place in places_now if place is not None}
        assert found == places
        for shard, batch, row in found:
            assert shards[shard].positions(epoch, batch)[row] == position


@given(plans, st.data())
@settings(max_examples=150, deadline=None)
def test_rows_looked_up_ahead_are_those_of_the_plan_in_any_order_of_batches(fields: dict[str, Any], data: Any) -> None:
    plan = data.draw(st.sampled_from(shards_of({**fields, "size": max(1, fields["size"] * 40)})))
    ahead = OrderAhead(plan)
    for _ in range(data.draw(st.integers(1, 12))):
        rest = plan.after(data.draw(st.sampled_from([0, plan.size // 3, plan.size // 2])))
        if not rest.batches_per_epoch:
            continue
        epoch, batch = data.draw(st.integers(0, 2)), data.draw(st.integers(0, rest.batches_per_epoch - 1))
        positions, indices = ahead.rows_of(epoch, batch, rest.start)
        assert positions.tolist() == rest.positions(epoch, batch).tolist()
        assert indices == rest.indices(epoch, rest.positions(epoch, batch))
