"""`skip_batches`: no rank gets a batch that is left out, and the other batches do not change."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read, rows, shared_pools
from tests.support.streams import Numbers

ITEMS = 60


def drawn(item: int, rng: np.random.Generator) -> Any:
    return item, rng.integers(1 << 40)


def shuffled_batches(epoch: int) -> list[int]:
    return np.random.permutation(ITEMS)[: 50 + epoch].tolist()


BATCHES = [[*range(first, first + 1 + first % 4)] for first in range(0, 48, 4)]
LENGTHS = [1 + item % 5 for item in range(ITEMS)]
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "dropped remainder": lambda: {"shuffle": True, "drop_remainder": True},
    "tiny batches": lambda: {"shuffle": True, "batch_size": 1},
    "buckets": lambda: {"shuffle": True, "buckets": lp.Buckets(LENGTHS, [3], [3, 5])},
    "function": lambda: {"order": shuffled_batches},
    "batches": lambda: {"order": BATCHES},
    "weights": lambda: {"order": lp.Weighted([item % 4 for item in range(ITEMS)])},
    "blocks": lambda: {"order": lp.Blocks(rows=7, window=3)},
}
pytestmark = pytest.mark.may_leak(
    reason="the tests share pools; the fixture looks when the last has run"
)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with shared_pools() as found:
        yield found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def loader(kind: str, place: dict[str, Any] | None = None, **more: Any) -> lp.Loader:
    sizes = {} if kind == "batches" else {"batch_size": 4}
    settings = {**sizes, **KINDS[kind](), **(place or {"workers": 0}), **more}
    return lp.Loader(range(ITEMS), drawn, **settings)


def of_epoch(kind: str, epoch: int) -> list[Any]:
    with loader(kind) as each:
        each.epoch = epoch
        return read(each)


def test_all_other_batches_have_the_same_bits(kind: str, place: Place) -> None:
    first, second = of_epoch(kind, 0), of_epoch(kind, 1)
    expected = first[1:3] + first[6:7] + first[9:] + second
    for workers in (0, 1, 3):
        with loader(kind, place(workers)) as each:
            each.skip_batches(1)
            each.skip_batches(range(3, 6))
            each.skip_batches(range(5, 6))
            each.skip_batches(range(7, 9))
            assert_same(read(each, passes=2), expected)


def test_other_workers_and_ranks_leave_out_the_same(kind: str, place: Place) -> None:
    choose = random.Random(kind)
    with loader(kind) as each:
        size = len(each)
        left_out = range(size // 4, size // 2)
        expected = {
            row
            for number, batch in enumerate(read(each))
            if number not in left_out
            for row in rows([batch])
        }
    for _ in range(3):
        state: Any = None
        had: list[Any] = []
        shards, is_over = 1, False
        while not is_over:
            now = shards if state is None else choose.choice((1, 2, 3))
            taken = choose.randrange(1, 4)
            shared, states = [], []
            for index in range(now):
                where = place(choose.choice((0, 0, 1, 3)))
                with loader(kind, where, shard=lp.Shard(now, index)) as part:
                    if state is None:
                        part.skip_batches(left_out)
                    else:
                        part.load_state_dict(state)
                    iterator = iter(part)
                    shared += rows(read(itertools.islice(iterator, taken)))
                    states.append(json.loads(json.dumps(part.state_dict())))
                    iterator.close()
            state = states[0]
            assert all(each["position"] == state["position"] for each in states)
            assert not {*shared} & {*had}
            had += shared
            is_over = state["epoch"] > 0
        if KINDS[kind]().get("drop_remainder"):
            assert {*had} <= expected
        else:
            assert {*had} == expected


def test_a_number_may_reach_into_later_epochs(kind: str) -> None:
    first, second, third = (of_epoch(kind, epoch) for epoch in range(3))
    everything = first + second + third
    count = len(first) + len(second)
    for taken, left_out in ((2, len(first) - 2), (2, count), (0, count), (1, len(first) + 3)):
        with loader(kind) as each:
            iterator = iter(each)
            for _ in range(taken):
                next(iterator)
            each.skip_batches(left_out)
            iterator.close()
            got = read(each)
            while each.epoch < 3:
                got += read(each)
            assert_same(got, everything[taken + left_out :])


def test_nothing_is_left_of_an_epoch(kind: str) -> None:
    with loader(kind) as each:
        each.skip_batches(range(len(each)))
        assert each.epoch == 1
        each.skip_batches(0)
        assert_same(read(each), of_epoch(kind, 1))


# ---- the position at which skipping starts


def test_a_loop_continues_behind_the_batches_it_leaves_out(place: Place) -> None:
    expected = of_epoch("shuffle", 0)
    got = []
    with loader("shuffle", place(1)) as each:
        for number, batch in enumerate(each):
            got += read([batch])
            if number == 2:
                each.skip_batches(4)
                break
        got += read(each)
    assert_same(got, expected[:3] + expected[7:])


def test_a_loaded_state_counts_although_an_iterator_is_active() -> None:
    expected = of_epoch("shuffle", 0)
    with loader("shuffle") as each:
        iterator = iter(each)
        next(iterator)
        state = each.state_dict()
        for _ in range(5):
            next(iterator)
        each.load_state_dict(state)
        each.skip_batches(8)
        assert_same(read(each), expected[9:])
        each.epoch = 0
        each.skip_batches(range(1, len(expected)))
        assert_same(read(each), expected[:1])


def test_batches_that_were_taken_are_not_left_out_again() -> None:
    expected = of_epoch("shuffle", 0)
    with loader("shuffle") as each:
        iterator = iter(each)
        for _ in range(5):
            next(iterator)
        each.load_state_dict(each.state_dict())
        each.skip_batches(range(2, 7))
        assert_same(read(each), expected[7:])


def test_a_state_of_another_run_continues_its_order() -> None:
    expected = of_epoch("weights", 0)
    with loader("weights") as first, loader("weights", {"workers": 1}) as second:
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        first.skip_batches(2)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert_same(read(second), expected[5:])


def test_a_batch_left_out_is_one_of_any_order_of_delivery() -> None:
    settings: dict[str, Any] = {"deterministic": False, "shuffle": True}
    expected = of_epoch("shuffle", 0)
    left = sorted(rows([*expected[:2], *expected[5:]]))
    with lp.Loader(range(ITEMS), drawn, batch_size=4, workers=3, **settings) as each:
        each.skip_batches(range(2, 5))
        iterator = iter(each)
        got = read(itertools.islice(iterator, 4))
        state = each.state_dict()
        iterator.close()
        each.load_state_dict(state)
        got += read(each)
        assert sorted(rows(got)) == left


# ---- streams


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, 10])
def test_the_next_batches_of_a_stream_are_left_out(workers: int, shuffle: bool | int) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "workers": workers}
    with lp.Loader(Numbers(30), **settings) as each:
        expected = read(each)
        each.epoch = 0
        each.skip_batches(3)
        assert_same(read(each), expected[3:])
        each.epoch = 0
        each.skip_batches(range(2))
        assert_same(read(each), expected[2:])
        with pytest.raises(lp.ArgumentError, match="must be a number if the source is a stream"):
            each.skip_batches(range(2, 4))


# ---- refusals


def test_wrong_batches_are_refused_by_name() -> None:
    with loader("in order") as each:
        for wrong in (range(14, 16), range(0, 6, 2), range(-1, 3), range(5, 2)):
            with pytest.raises(lp.ArgumentError, match="within the 15 batches of epoch 0, such as"):
                each.skip_batches(wrong)
        for wrong in (-1, 1.5, [1, 2], True):
            with pytest.raises(lp.ArgumentError, match="batches must be"):
                each.skip_batches(wrong)  # type: ignore[arg-type]
    with pytest.raises(lp.ClosedError):
        each.skip_batches(1)


def test_generators_and_iterators_are_refused_by_name() -> None:
    with (
        lp.Loader.from_generator(lambda: iter([1, 2]), workers=0) as each,
        pytest.raises(lp.ArgumentError, match="but the source is generators"),
    ):
        each.skip_batches(1)
    with (
        lp.Loader(iter([1, 2]), workers=0) as each,
        pytest.raises(lp.StateError, match="which can be read only once"),
    ):
        each.skip_batches(1)


def test_other_indices_than_those_left_out_of_are_refused() -> None:
    indices = np.arange(20)
    with lp.Loader(range(20), batch_size=4, order=indices, workers=0) as each:
        each.skip_batches(range(1, 2))
        indices[:] = indices[::-1].copy()
        with pytest.raises(lp.StateError, match="than when the state was saved or batches were"):
            next(iter(each))
        each.epoch = 0
        each.skip_batches(range(1, 2))
        assert [int(batch[0]) for batch in each] == [19, 11, 7, 3]


def test_batches_taken_out_of_order_are_refused_by_name() -> None:
    with lp.Loader(range(ITEMS), drawn, batch_size=4, workers=0, deterministic=False) as each:
        state = each.state_dict()
        core = each._core
        position = core.tracker.next.position._replace(taken=frozenset([2]))
        each.load_state_dict(state)
        core.tracker.next.position = position
        with pytest.raises(lp.StateError, match="deterministic=False"):
            each.skip_batches(1)
