"""`Packed`: several items in one row. Batches do not depend on the process that makes them."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import (
    Place,
    assert_same,
    calls_of,
    kill_supervisor,
    kill_worker,
    read,
    read_while,
    shared_pools,
)

ITEMS = 60
LENGTH = 24
LENGTHS = (1 + np.random.default_rng(2).integers(0, 20, ITEMS)).tolist()


def tokens(item: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return two arrays of the item's length: the item repeated, and random numbers."""
    size = LENGTHS[item]
    return {
        "tokens": np.full(size, item, np.int32),
        "noise": rng.normal(size=(size, 2)).astype(np.float32),
    }


async def tokens_later(item: int, rng: np.random.Generator) -> dict[str, Any]:
    await asyncio.sleep(0.001)
    return tokens(item, rng)


def packed(**settings: Any) -> lp.Loader:
    order = settings.pop("order", None) or lp.Packed(LENGTHS, LENGTH, window=25)
    fn, source = settings.pop("fn", tokens), settings.pop("source", range(ITEMS))
    return lp.Loader(source, fn, **{"batch_size": 3, "workers": 0, "order": order, **settings})


def items_of(batch: Any) -> Iterator[tuple[int, bytes]]:
    """Yield each item of a batch, with its random numbers. Checks the rows."""
    for row, segments, positions, noise in zip(
        batch["tokens"], batch["segment_ids"], batch["positions"], batch["noise"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            (item,) = set(row[at].tolist())
            assert positions[at].tolist() == [*range(LENGTHS[item])]
            assert at.tolist() == [*range(at[0], at[0] + LENGTHS[item])]
            yield item, noise[at].tobytes()
        rest = segments == 0
        assert not row[rest].any() and not positions[rest].any() and not noise[rest].any()
        assert np.flatnonzero(rest).tolist() == [*range((~rest).sum(), LENGTH)]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with shared_pools() as found:
        yield found


# ---- batches


def test_each_item_comes_once_and_whole() -> None:
    with packed() as loader:
        for epoch in range(2):
            count = len(loader)
            batches = read(loader)
            assert len(batches) == count
            assert [len(batch["tokens"]) for batch in batches[:-1]] == [3] * (len(batches) - 1)
            found = [item for batch in batches for item, _ in items_of(batch)]
            assert sorted(found) == [*range(ITEMS)]
            expected = [loader.indices(epoch, number).tolist() for number in range(len(batches))]
            assert [[item for item, _ in items_of(batch)] for batch in batches] == expected


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
def test_any_number_of_workers_makes_the_same_rows(place: Place) -> None:
    with packed() as here:
        expected = read(here, passes=3)
    for workers in (1, 3):
        with packed(**place(workers)) as there:
            assert_same(read(there, passes=3), expected)


@pytest.mark.parametrize("way", ["threads", "coroutines", "spawned", "many rows"])
def test_any_kind_of_call_makes_the_same_rows(way: str) -> None:
    settings: dict[str, Any] = {"workers": 2}
    if way == "threads":
        settings["threads"] = 4
    elif way == "coroutines":
        settings |= {"threads": 4, "fn": tokens_later}
    elif way == "many rows":
        settings["source"] = Rows()
    with packed() as here, lp.Pool(2, start="spawn" if way == "spawned" else None) as pool:
        if way == "spawned":
            settings["workers"] = pool
        with packed(**settings) as there:
            assert_same(read(there, passes=2), read(here, passes=2))


def test_concurrent_calls_for_two_epochs_at_once() -> None:
    with packed() as here:
        expected = [read(here), read(here)]
    with packed(workers=1, threads=4, fn=tokens_later) as there:
        for _ in range(3):
            there.epoch = 0
            batches = zip(iter(there), iter(there), strict=False)  # two passes take turns
            for number, (first, second) in enumerate(batches):
                assert_same(first, expected[0][number])
                assert_same(second, expected[1][number])


class Rows:
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def test_tiny_batches_share_a_slot() -> None:
    items = [np.full(1 + number % 3, number) for number in range(3000)]
    order = lp.Packed([len(item) for item in items], 6)
    with lp.Loader(items, batch_size=2, order=order, workers=0) as here:
        expected = read(here)
    with lp.Loader(items, batch_size=2, order=order, workers=1) as there:
        for _ in range(3):
            there.epoch = 0
            assert_same(read(there), expected)
        assert there.statistics().memory.batches_oversize == 0


def test_a_pad_value_fills_each_component() -> None:
    with packed(pad={"tokens": -100, "noise": 0.5}) as loader:
        for batch in loader:
            rest = batch["segment_ids"] == 0
            assert (batch["tokens"][rest] == -100).all()
            assert (batch["noise"][rest] == 0.5).all()
            assert (batch["positions"][rest] == 0).all()
    with (
        packed(pad=0.5) as loader,
        pytest.raises(lp.SpecMismatchError, match="does not fit its dtype"),
    ):
        next(iter(loader))


def test_padding_is_counted() -> None:
    with packed() as loader:
        share = np.mean([(batch["segment_ids"] == 0).mean() for batch in loader])
        assert loader.statistics().padding_share == pytest.approx(share, abs=0.05)
        assert loader.statistics().samples == sum(len(batch["tokens"]) for batch in loader)


def test_items_without_tokens_take_no_place() -> None:
    items = [np.ones(number % 3, np.int64) for number in range(9)]
    order = lp.Packed([len(item) for item in items], 4)
    with lp.Loader(items, batch_size=8, order=order, workers=0) as loader:
        (batch,) = loader
        assert batch["values"].sum() == 9
        assert sorted(loader.indices(0, 0).tolist()) == [*range(9)]


def test_lengths_are_read_when_a_pass_begins() -> None:
    items = [np.ones(1), np.ones(2), np.ones(3)]
    lengths = np.array([1, 2, 3])
    order = lp.Packed(lengths, 4)
    with lp.Loader(items, batch_size=8, order=order, workers=2) as loader:
        assert read(loader)[0]["values"].sum() == 6
        lengths[0] = 2
        with pytest.raises(lp.SpecMismatchError, match="has the length 1, but order=Packed"):
            read(loader)
        lengths[0] = 1
        assert read(loader)[0]["values"].sum() == 6
    epochs = lp.Packed(lambda epoch: lengths + (epoch > 0), 4)
    with lp.Loader(items, batch_size=8, order=epochs, workers=0) as loader:
        read(loader)
        with pytest.raises(lp.SpecMismatchError, match="but order=Packed"):
            read(loader)


# ---- the user's structure


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_part_of_a_sample_gets_the_segments(workers: int) -> None:
    lengths = [2, 3, 1]

    def of(make: Any) -> Any:
        order = lp.Packed(lengths, 4, shuffle=False)
        with lp.Loader(lengths, make, batch_size=2, order=order, workers=workers) as loader:
            (batch,) = read(loader)
        return batch

    plain = of(lambda n: np.full(n, n))
    assert list(plain) == ["values", "segment_ids", "positions"]
    assert plain["segment_ids"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 2]]
    assert plain["positions"].dtype == plain["segment_ids"].dtype == np.int32
    pair = of(lambda n: ({"ids": np.full(n, n)}, np.zeros(n)))
    assert list(pair[0]) == ["ids", "segment_ids", "positions"]
    assert pair[1].shape == (2, 4)
    named = of(lambda n: Pair(np.full(n, n), np.zeros((n, 5))))
    assert type(named).__name__ == "Pair"
    assert list(named.x) == ["values", "segment_ids", "positions"]
    assert named.y.shape == (2, 4, 5)
    nested = of(lambda n: {"a": {"b": np.full(n, n)}, "c": np.zeros(n)})
    assert list(nested) == ["a", "c", "segment_ids", "positions"]
    assert_same(nested["a"]["b"], plain["values"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda item: item, "the element is a single value, but order=Packed"),
        (lambda item: {"a": np.ones(LENGTHS[item]), "b": 3}, "component ['b'] is a single value"),
        (lambda item: ["a"] * LENGTHS[item], "the element is strings"),
        (lambda item: {"positions": np.ones(LENGTHS[item])}, "Give it another name"),
        (
            lambda item: np.ones((LENGTHS[item], 1 + item % 2)),
            "Samples are packed along their first axis, so axis 1 must not vary",
        ),
        (lambda item: np.ones(LENGTHS[item] + (item == 7)), "of source index 7 has the length"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_does_not_fit_is_named(make: Any, message: str, workers: int) -> None:
    with packed(fn=make, workers=workers) as loader, pytest.raises(lp.LoaderpoolError) as caught:
        read(loader)
    assert message in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_may_refill_their_result(workers: int) -> None:
    buffer = np.zeros(LENGTH, np.int64)

    def refill(item: int) -> Any:
        buffer[: LENGTHS[item]] = item
        return buffer[: LENGTHS[item]]

    makes = (refill, lambda item: [item] * LENGTHS[item], lambda item: np.full(LENGTHS[item], item))
    found = []
    for make in makes:
        with packed(fn=make, workers=workers) as loader:
            found.append(read(loader, passes=2))
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])


def test_one_more_sample_costs_few_calls() -> None:
    def calls(samples: int) -> int:
        items = np.arange(samples * 2 * 40).reshape(-1, 2)
        order = lp.Packed([2] * len(items), 2 * samples)
        with lp.Loader(items, batch_size=8, order=order, workers=0) as loader:
            read(loader)
            return calls_of(lambda: read(loader))

    assert calls(60) - calls(10) < 8 * 50 * 40  # 3 in blocks, 7 one by one


def test_one_more_batch_costs_few_calls() -> None:
    def calls(batches: int) -> int:
        items = np.zeros((2 * batches, 2))
        order = lp.Packed([2] * len(items), 2)
        with lp.Loader(items, batch_size=2, order=order, workers=1) as loader:
            read(loader)
            return calls_of(lambda: [None for _ in loader])

    assert calls(4000) - calls(1000) < 7 * 3000  # 5 for each batch, as for shuffled rows


# ---- failures


def fails(item: int) -> Any:
    if item in (5, 30):
        raise ValueError("no such item")
    return np.full(LENGTHS[item] + (item == 9), item)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_items_leave_their_place_empty(workers: int) -> None:
    with packed(fn=fails, workers=workers, on_error="skip") as loader:
        batches = read(loader)
        found = Counter[int]()
        for batch in batches:
            assert batch["values"].shape[1] == LENGTH
            kept = batch["segment_ids"] > 0
            found.update(batch["values"][kept].tolist())
            assert not batch["values"][~kept].any()
        sizes = {item: size for item, size in enumerate(LENGTHS) if item not in (5, 9, 30)}
        assert found == sizes
        assert sorted(loader.statistics().skipped_indices) == [5, 9, 30]
        kept_share = sum((batch["segment_ids"] > 0).sum() for batch in batches) / sum(
            batch["segment_ids"].size for batch in batches
        )
        assert loader.statistics().padding_share == pytest.approx(1 - kept_share)
    with (
        packed(fn=fails, workers=workers, on_error=("skip", 2)) as loader,
        pytest.raises(lp.LoaderpoolError, match="3 samples failed in this epoch"),
    ):
        read(loader)
    with (
        packed(fn=fails, workers=workers) as loader,
        pytest.raises(lp.LoaderpoolError, match="source index"),
    ):
        read(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_whose_items_all_fail_is_left_out(workers: int) -> None:
    def make(item: int) -> Any:
        if 2 <= item < 4:
            raise ValueError
        return np.full(2, item)

    order = lp.Packed([2] * 6, 2, shuffle=False)
    with lp.Loader(
        range(6), make, batch_size=2, order=order, workers=workers, on_error="skip"
    ) as loader:
        assert [batch["values"][:, 0].tolist() for batch in loader] == [[0, 1], [4, 5]]


def slow(item: int) -> Any:
    import time

    if item == 8:
        time.sleep(60)
    return np.full(LENGTHS[item], item)


def test_a_time_limit_names_the_item() -> None:
    with (
        packed(fn=slow, workers=1, limits=lp.Limits(timeout_s=0.3)) as loader,
        pytest.raises(lp.SampleError, match="source index 8"),
    ):
        read(loader)


def test_replay_makes_an_item_again() -> None:
    with packed(workers=2) as loader:
        batch = next(iter(loader))
        item, noise = next(items_of(batch))
        sample = lp.replay(loader, item)
        assert sample["noise"].tobytes() == noise


def test_a_dead_process_changes_nothing() -> None:
    with packed() as here:
        expected = read(here, passes=2)
    with packed(workers=2) as there:
        got = read_while(there, {1: lambda: kill_worker(there)})
        iterator = iter(there)
        got += read(itertools.islice(iterator, 2))
        kill_supervisor(there)
        assert_same(got + read(iterator), expected)


# ---- shards and saved states


def test_shards_have_equal_numbers_of_rows() -> None:
    with packed() as whole:
        expected = Counter(item for batch in whole for item, _ in items_of(batch))
    for drop in (False, True):
        found, shapes = Counter[int](), set[tuple[int, ...]]()
        for index in range(3):
            with packed(batch_size=2, shard=lp.Shard(3, index), drop_remainder=drop) as part:
                batches = read(part)
                shapes.add(tuple(len(batch["tokens"]) for batch in batches[:-1]))
                found.update(item for batch in batches for item, _ in items_of(batch))
        assert len(shapes) == 1
        assert found.keys() <= expected.keys()
        if not drop:
            assert found.keys() == expected.keys()


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
def test_others_continue_where_an_epoch_was_left(place: Place) -> None:
    choose = random.Random(4)
    with packed() as here:
        here.epoch = 1
        everything = Counter(pair for batch in here for pair in items_of(batch))
    for _ in range(8):
        before, after = choose.choice((1, 2, 3)), choose.choice((1, 2, 3))
        workers, taken = choose.choice((0, 0, 1, 3)), choose.randrange(0, 4)
        had, state = Counter[tuple[int, bytes]](), None
        for index in range(before):
            with packed(shard=lp.Shard(before, index)) as part:
                part.epoch = 1
                iterator = iter(part)
                had.update(
                    pair for batch in itertools.islice(iterator, taken) for pair in items_of(batch)
                )
                state = json.loads(json.dumps(part.state_dict()))
        assert state is not None
        for index in range(after):
            with packed(**place(workers), shard=lp.Shard(after, index)) as part:
                part.load_state_dict(state)
                if part.epoch == 1:
                    had.update(pair for batch in part for pair in items_of(batch))
        assert had.keys() == everything.keys()
        if before == after == 1:
            assert had == everything


def test_a_state_within_an_epoch_refuses_other_lengths() -> None:
    lengths = np.array(LENGTHS)
    order = lp.Packed(lengths, LENGTH)
    with packed(order=order) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        lengths[0] += 1
        with pytest.raises(lp.StateError, match="order= now gives other indices"):
            loader.load_state_dict(state)
        lengths[0] -= 1
        loader.load_state_dict(state)
    other = lp.Packed(lengths, LENGTH + 1)
    with packed(order=other) as loader, pytest.raises(lp.StateError, match="order: saved"):
        loader.load_state_dict(state)


def test_batches_that_are_left_out_have_whole_rows() -> None:
    with packed() as loader, packed(batch_size=1) as rows:
        expected = read(loader)
        loader.epoch = rows.epoch = 0
        loader.skip_batches(range(1, 3))
        assert_same(read(loader), [expected[0], *expected[3:]])
        rows.skip_batches(range(2, 4))
        kept = read(rows)
        every = Counter(pair for batch in expected for pair in items_of(batch))
        assert 0 < sum(1 for batch in kept for _ in items_of(batch)) < every.total()


# ---- views


@pytest.mark.parametrize("drop", [False, True])
def test_the_spec_is_that_of_packed_rows(drop: bool) -> None:
    rows = 3 if drop else None
    with packed(drop_remainder=drop) as loader:
        assert {key: str(spec) for key, spec in loader.element_spec.items()} == {
            "tokens": f"int32[{rows}, 24]",
            "noise": f"float32[{rows}, 24, 2]",
            "segment_ids": f"int32[{rows}, 24]",
            "positions": f"int32[{rows}, 24]",
        }


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": None}, "order=Packed(...) and batch_size=None cannot be combined"),
        ({"fn": None, "batch_fn": np.stack}, "order=Packed(...) and batch_fn cannot be combined"),
        ({"ragged": True}, "order=Packed(...) and ragged=True cannot be combined"),
        ({"batch_indices": True}, "Write loader.indices(epoch, batch)"),
        ({"on_error": "replace"}, 'Set on_error="skip"'),
        ({"element_spec": lp.ArraySpec((3, 24), int)}, "Convert dtypes in fn"),
        ({"shuffle": True}, "order and shuffle=True cannot be combined"),
        (
            {"order": lp.Packed([9] * ITEMS, 8)},
            "Packed.lengths has 9 for item 0 in epoch 0, more than length=8",
        ),
        ({"order": lp.Packed([9], 9)}, "for each of the 60 items of source, got int64[1]"),
        ({"order": lp.Packed([-1] * ITEMS, 9)}, "got -1 for item 0 in epoch 0"),
        ({"order": lp.Packed(lambda epoch: None, 9)}, "got object[] in epoch 0"),
        ({"batch_size": 64, "drop_remainder": True}, "leave no batches in epoch 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(lp.ArgumentError) as caught, packed(**settings) as loader:
        read(loader)
    assert message in str(caught.value)


def test_a_loader_shows_its_default_batch_size() -> None:
    assert repr(inspect.signature(lp.Loader).parameters["batch_size"].default) == "32"
