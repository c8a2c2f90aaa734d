"""`order=`: the order is the same for any number of workers, and after any stop."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import (
    Place,
    assert_same,
    kill_supervisor,
    kill_worker,
    read,
    read_while,
    rows,
    rows_over_a_stop,
    shared_pools,
)
from tests.support.child import run_child
from tests.support.draws import generators_left_alone
from tests.support.processes import wait_until

ITEMS = 40


def drawn(item: int, rng: np.random.Generator) -> Any:
    """Return the item, and a number of its random stream."""
    return item, rng.integers(1 << 40)


class Sampler:
    """Draws indices from the global generators, as samplers of many projects do."""

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(ITEMS), 12) + np.random.permutation(11).tolist())


class Batches:
    """Batches of any size, drawn from a generator of the object."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        left = self.generator.permutation(ITEMS).tolist()
        for size in (3, 1, 8, 8, 2, 5, 4):
            yield [left.pop() for _ in range(size)]


def torch_batches() -> Any:
    from torch.utils import data

    return data.BatchSampler(data.RandomSampler(range(ITEMS)), 6, drop_last=False)


def torch_sampler() -> Any:
    import torch
    from torch.utils import data

    return data.RandomSampler(range(ITEMS), generator=torch.Generator().manual_seed(4))


WEIGHTS = [item % 4 for item in range(ITEMS)]
LENGTHS = [1 + item % 7 for item in range(ITEMS)]
ORDERS: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(ITEMS)[::-2],
    "list": lambda: [5, 3, 3, 9, 0, 39, 1],
    "function": lambda: lambda epoch: np.random.permutation(ITEMS)[: 11 + 3 * epoch],
    "sampler": Sampler,
    "batches": Batches,
    "lists": lambda: [[1, 2, 3], [4], [5, 6], [7, 7]],
    "torch sampler": torch_sampler,
    "torch batches": torch_batches,
    "weights": lambda: lp.Weighted(WEIGHTS),
    "weights once": lambda: lp.Weighted(WEIGHTS, num_samples=25, replacement=False),
    "weights of the epoch": lambda: lp.Weighted(lambda epoch: np.arange(ITEMS) ** epoch, 30),
    "blocks": lambda: lp.Blocks(rows=6, window=2),
    "budget": lambda: lp.TokenBudget(LENGTHS, 17, window=15),
    "budget of the epoch": lambda: lp.TokenBudget(lambda epoch: [epoch + 1] * ITEMS, 9),
}
HAVE_BATCHES = ("batches", "lists", "torch batches", "budget", "budget of the epoch")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with shared_pools() as found:
        yield found


@pytest.fixture(params=ORDERS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name.startswith("torch"):
        pytest.importorskip("torch")
    return name


def loader(kind: str, place: dict[str, Any] | None = None, **settings: Any) -> lp.Loader:
    order = ORDERS[kind]()
    sizes = {} if kind in HAVE_BATCHES else {"batch_size": 4}
    return lp.Loader(
        range(ITEMS), drawn, order=order, **{**sizes, **(place or {"workers": 0}), **settings}
    )


# ---- the same bits


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
def test_any_number_of_workers_makes_the_same_bits(kind: str, place: Place) -> None:
    with loader(kind) as here:
        expected = read(here, passes=3)
        assert sum(len(here.indices(2, batch)) for batch in range(len_of(here, 2))) > 0
    for workers in (1, 3):
        with loader(kind, place(workers)) as there:
            assert_same(read(there, passes=3), expected)


def len_of(loader: lp.Loader, epoch: int) -> int:
    loader.epoch = epoch
    return len(loader)


def test_indices_are_those_of_the_batches(kind: str) -> None:
    with loader(kind) as here:
        for epoch in range(2):
            assert here.epoch == epoch
            count = len(here)
            expected = [here.indices(epoch, batch).tolist() for batch in range(count)]
            assert [items.tolist() for items, _ in here] == expected
            with pytest.raises(IndexError, match=f"has the batches 0 to {count - 1}, got"):
                here.indices(epoch, count)


def test_shards_share_each_epoch(kind: str) -> None:
    with loader(kind) as whole:
        for epoch in range(2):
            expected = Counter(item for items, _ in whole for item in items.tolist())
            found, counts = Counter[int](), set()
            for index in range(3):
                with loader(kind, shard=lp.Shard(3, index)) as part:
                    part.epoch = epoch
                    batches = read(part)
                counts.add(len(batches))
                found.update(item for items, _ in batches for item in items.tolist())
            assert found.keys() == expected.keys()
            assert not expected - found
            assert (found - expected).total() < 3  # if the last batch has fewer rows than shards
            assert len(counts) == 1


# ---- stops


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
def test_others_continue_where_an_epoch_was_left(kind: str, place: Place) -> None:
    choose = random.Random(kind)
    with loader(kind) as here:
        next(iter(here))
        here.epoch = 1
        whole = read(here)
    expected = rows(whole)
    for _ in range(6):
        found, is_alone = rows_over_a_stop(functools.partial(loader, kind), place, choose)
        assert set(found) == set(expected)
        if is_alone:
            assert len(found) == len(expected)


def test_the_rest_of_an_epoch_has_the_same_bits(kind: str) -> None:
    with loader(kind) as here:
        expected = read(here, passes=2)
        count = len_of(here, 0)
        for taken in range(1, count):
            here.epoch = 0
            iterator = iter(here)
            for _ in range(taken):
                next(iterator)
            with loader(kind) as other:
                other.load_state_dict(iterator.state_dict())
                assert_same(read(other, passes=2), expected[taken:])
            iterator.close()


def test_a_dead_supervisor_changes_nothing() -> None:
    def order(epoch: int) -> Any:
        return np.random.permutation(ITEMS)

    settings: dict[str, Any] = {"batch_size": 2, "order": order}
    with lp.Loader(range(ITEMS), drawn, workers=0, **settings) as here:
        expected = read(here, passes=2)
    with lp.Loader(range(ITEMS), drawn, workers=2, **settings) as there:
        iterator = iter(there)
        got = read(itertools.islice(iterator, 3))
        kill_supervisor(there)
        got += read(iterator)
        kill_supervisor(there)
        assert_same(got + read(there), expected)
        assert there._core.engine.pool.deaths.replaced >= 1  # type: ignore[union-attr]


def test_a_dead_worker_changes_nothing() -> None:
    with loader("batches") as here, loader("batches", {"workers": 2}) as there:
        got = read_while(there, {1: lambda: kill_worker(there)})
        assert_same(got + read(there), read(here, passes=2))


def test_orders_leave_the_arena_when_their_passes_are_over() -> None:
    calls = itertools.count()

    def order(epoch: int) -> Any:
        return np.arange(ITEMS)[next(calls) % 3 :]

    with lp.Loader(range(ITEMS), drawn, batch_size=4, order=order, workers=1) as there:
        read(there)
        extents = there._core.engine.pool.arena.extents  # type: ignore[union-attr]
        taken = extents.taken_bytes
        for _ in range(5):
            next(iter(there))
            read(there)
        wait_until(lambda: there.statistics() and extents.taken_bytes <= taken + 4096)


def test_orders_of_failed_passes_leave_the_arena() -> None:
    def fails(item: int) -> int:
        raise ValueError(item)

    def order(epoch: int) -> Any:
        return np.zeros(100_000, np.int64)

    with lp.Loader(range(ITEMS), fails, batch_size=4, order=order, workers=1) as there:
        extents = there._core.engine.pool.arena.extents  # type: ignore[union-attr]
        before = extents.taken_bytes
        for _ in range(4):
            with pytest.raises(lp.SampleError):
                next(iter(there))
        assert extents.taken_bytes <= before + 900_000


# ---- batches of any size


class Growing:
    """Batches of 1 to 9 rows and one of 200. In each epoch, they are three times as large as
    before.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def sizes(self) -> list[int]:
        rows = [1 + (5 * number) % 9 for number in range(60)]
        rows[17] = 200
        return [each * 3**self.epoch for each in rows]

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[Any]:
        last = 0
        for size in self.sizes():
            yield np.arange(last, last + size) % ITEMS
            last += size


def mixed(item: int, rng: np.random.Generator) -> Any:
    """Return components whose rows have 3, 8 and 8000 bytes."""
    small = np.full(3, item, np.uint8)
    return {"small": small, "number": item, "large": rng.random(2000, np.float32)}


@pytest.mark.parametrize(
    "settings",
    [{}, {"on_error": "replace"}, {"threads": 3}, {"limits": lp.Limits(memory=1 << 22)}],
    ids=["plain", "replace", "threads", "memory"],
)
def test_sizes_of_batches_may_differ_and_grow(settings: dict[str, Any]) -> None:
    with lp.Loader(range(ITEMS), mixed, order=Growing(), workers=0) as here:
        expected = read(here, passes=3)
    with lp.Loader(range(ITEMS), mixed, order=Growing(), workers=2, **settings) as there:
        assert_same(read(there, passes=3), expected)
        memory = there.statistics().memory
    assert memory.batches_oversize == 3
    if "limits" in settings:
        assert memory.buffers * memory.buffer_bytes <= 1 << 22


def test_batches_of_any_size_may_come_in_any_order() -> None:
    with lp.Loader(range(ITEMS), mixed, order=Growing(), workers=0) as here:
        expected = {batch["large"].tobytes() for batch in read(here)}
    settings: dict[str, Any] = {"deterministic": False, "workers": 3}
    with lp.Loader(range(ITEMS), mixed, order=Growing(), **settings) as there:
        iterator = iter(there)
        found = [batch["large"].tobytes() for batch in itertools.islice(iterator, 20)]
        with lp.Loader(range(ITEMS), mixed, order=Growing(), **settings) as other:
            other.load_state_dict(iterator.state_dict())
            found += [batch["large"].tobytes() for batch in other]
        iterator.close()
    assert len(found) == 60
    assert set(found) == expected


def test_a_large_slow_batch_is_made_by_all_workers() -> None:
    def slow(item: int) -> tuple[int, int]:
        time.sleep(0.002)
        return item, os.getpid()

    order = [list(range(10)), list(range(ITEMS)) * 10, list(range(ITEMS)) * 10]
    with lp.Loader(range(ITEMS), slow, order=order, workers=2) as there:
        batches = read(there)
    assert [items.tolist() for items, _ in batches] == order
    assert len(set(batches[2][1].tolist())) == 2


# ---- the time at which an order is read


def test_weights_are_read_when_a_pass_begins() -> None:
    weights = np.zeros(ITEMS)
    weights[7] = 1
    for workers in (0, 2):
        weights[:] = 0
        weights[7] = 1
        order = lp.Weighted(weights, num_samples=8)
        with lp.Loader(range(ITEMS), batch_size=4, order=order, workers=workers) as each:
            assert {int(item) for batch in each for item in batch} == {7}
            iterator = iter(each)
            first = next(iterator).tolist()
            weights[:] = 0
            weights[9] = 1
            assert {*first, *(int(item) for batch in iterator for item in batch)} == {7}
            assert {int(item) for batch in each for item in batch} == {9}


def test_all_of_many_weights_are_compared_and_checked() -> None:
    weights = np.zeros(300_000, np.float32)
    last = len(weights) - 1
    order = lp.Weighted(weights, num_samples=8)
    with lp.Loader(range(len(weights)), order=order, workers=0) as loader:
        for item in (0, last):
            weights[:] = 0
            weights[item] = 1
            assert {int(item) for batch in loader for item in batch} == {item}
        weights[last] = -1
        with pytest.raises(lp.ArgumentError, match=r"got -1\.0 for item 299,999 in epoch 2"):
            list(loader)


def test_the_length_is_that_of_the_coming_epoch() -> None:
    indices = [0, 1, 2, 3, 4]
    with lp.Loader(range(9), batch_size=2, order=indices, workers=0) as each:
        assert len(each) == 3
        iterator = iter(each)
        next(iterator)
        indices += [5, 6]
        assert (len(iterator), len(each)) == (3, 4)
        assert len(list(iterator)) == 2
        assert len(list(each)) == 4


class Longer:
    """Sampler whose epochs grow. Its length is that of the latest `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4 * (1 + self.epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * len(self))


class Estimated(Longer):
    """Sampler with a wrong length."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4 * (1 + self.epoch))


@pytest.mark.parametrize("make", [Longer, Estimated])
def test_the_length_counts_the_indices_of_a_sampler(make: Any) -> None:
    from torch.utils.data import BatchSampler

    wrapped = BatchSampler(make(), batch_size=2, drop_last=False)
    for settings in ({"order": make(), "batch_size": 2}, {"order": wrapped}):
        with lp.Loader(range(9), workers=0, **settings) as each:
            for epoch in (0, 1, 2, 5):
                each.epoch = epoch
                assert len(each) == len(list(each)) == 2 * (1 + epoch)


def test_a_draw_leaves_the_generators_of_the_program_alone() -> None:
    with generators_left_alone(), loader("sampler") as here:
        read(here)


@pytest.mark.parametrize(
    "draw", ["np.random.permutation(99)", "random.sample(range(99), 99)", "torch_permutation()"]
)
def test_the_first_draw_of_a_process_is_seeded(draw: str) -> None:
    """The first draw also imports the generator's module."""
    if "torch" in draw:
        pytest.importorskip("torch")
    code = f"""
        import random
        import numpy as np
        import loaderpool as lp

        def torch_permutation():
            import torch
            return torch.randperm(99).tolist()

        with lp.Loader(range(99), order=lambda epoch: {draw}, workers=0) as loader:
            first = loader.indices(0, 0).tolist()
            assert first == loader.indices(0, 0).tolist()
            assert first == next(iter(loader)).tolist()
    """
    run_child(textwrap.dedent(code)).check()


def test_a_seed_makes_another_order() -> None:
    for kind in ("function", "sampler", "batches", "weights", "weights once", "blocks", "budget"):
        with loader(kind) as one, loader(kind, seed=1) as other:
            assert one.indices(1, 0).tolist() != other.indices(1, 0).tolist()


LEFT_OUT = r"in epoch 0: its order leaves it out\. Pass the epoch that the error names$"


def test_replay_finds_a_sample_of_a_drawn_order() -> None:
    with loader("batches") as here:
        for batch in here:
            for item, number in zip(*batch, strict=True):
                assert lp.replay(here, int(item)) == (item, number)
    with loader("array") as here, pytest.raises(lp.ArgumentError, match=LEFT_OUT):
        lp.replay(here, 0)


def test_set_epoch_is_called() -> None:
    class Own(Sampler):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 23)

    with lp.Loader(range(9), batch_size=23, order=Own(), workers=0) as each:
        assert [int(batch[0]) for _ in range(3) for batch in each] == [0, 1, 2]


class Around:
    """Batch sampler around another one, as Accelerate has."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)


def test_set_epoch_is_called_for_wrapped_samplers() -> None:
    from torch.utils.data import BatchSampler

    order = Around(BatchSampler(Longer(), batch_size=9, drop_last=False))
    with lp.Loader(range(9), order=order, workers=0) as each:
        assert [int(batch[0]) for _ in range(2) for batch in each] == [0, 1]
        assert each.indices(1, 0)[0] == 1
        assert each.indices(0, 0)[0] == 0


class Counting(Sampler):
    """Counts its epochs itself, as samplers of some libraries do."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([self.epoch] * 23)


class Mixing(Sampler):
    """Shuffles its list in place, as samplers of some libraries do."""

    def __init__(self) -> None:
        self.items = list(range(23))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.items)
        return iter(self.items)


def test_a_sampler_that_counts_epochs_starts_with_its_first() -> None:
    with lp.Loader(range(9), batch_size=23, order=Counting(), workers=0) as each:
        assert [int(batch[0]) for _ in range(3) for batch in each] == [0, 1, 2]


def in_fives(order: Any) -> lp.Loader:
    return lp.Loader(range(23), batch_size=5, order=order, workers=0)


@pytest.mark.parametrize("sampler", [Counting, Mixing])
def test_resume_names_an_order_with_its_own_state(sampler: type[Sampler]) -> None:
    with in_fives(sampler()) as first:
        list(first)
        start = first.state_dict()
        batches = iter(first)
        next(batches)
        middle = first.state_dict()
    with (
        in_fives(sampler()) as other,
        pytest.warns(lp.LoaderpoolWarning, match=r"set_epoch\(epoch\)"),
    ):
        other.load_state_dict(start)
    with (
        in_fives(sampler()) as other,
        pytest.raises(lp.StateError, match=r"(?s)within epoch 1.*order=lambda epoch"),
    ):
        other.load_state_dict(middle)


def test_a_sampler_made_for_each_epoch_resumes() -> None:
    with in_fives(lambda epoch: Mixing()) as first:
        list(first)
        start = first.state_dict()
        second = [batch.tolist() for batch in first]
    with in_fives(lambda epoch: Mixing()) as other:
        other.load_state_dict(start)
        assert [batch.tolist() for batch in other] == second


# ---- refusals


def refusal(order: Any, source: Any = range(9), **settings: Any) -> str:
    with (
        pytest.raises(lp.ArgumentError) as caught,
        lp.Loader(source, order=order, workers=0, **settings) as each,
    ):
        list(each)
    return str(caught.value)


class DistributedSampler(Sampler):
    pass


class PartOfEpoch(Sampler):
    """Sampler for one of several processes, such as timm's `RepeatAugSampler`."""

    num_replicas = 2


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(3))


class EndlessOfTen(Endless):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 9], "from 0 to 8 for each epoch, got 9 at position 1 of epoch 0"),
        ([-1], "got -1 at position 0 of epoch 0"),
        ([0.5], "integers of one axis, got float64[1] in epoch 0"),
        (np.ones(9, bool), "pass numpy.flatnonzero(mask)"),
        (np.zeros((2, 2), int), "got int64[2, 2] in epoch 0"),
        (np.array(5), "as integers of one axis, got int64[] in epoch 0"),
        ([], "got an empty [0] array in epoch 0"),
        ([[1, 2], 3], "must give a list of indices for each batch, got 3 for batch 1 of epoch 0"),
        ([[1, 2], None], "got None for batch 1 of epoch 0"),
        (lambda: [1], "order must be callable as order(epoch)"),
        (lp.Weighted, "order is the class Weighted: write Weighted(...)"),
        (lp.mix([range(9)]), "<mix of 1 sources: 9 items>, which is a source: pass it as source="),
        (lambda epoch: itertools.cycle(range(9)), "such as itertools.islice(sampler, n)"),
        (EndlessOfTen(), "has given more than 10,000,000 elements for epoch 0"),
        (lp.Weighted(lambda epoch: None), "items of source, got None in epoch 0"),
        ([[0], []], "no empty batch, got batch 1 of epoch 0"),
        (lambda epoch: 3, "got 3 in epoch 0"),
        ("abc", "order must be an array of source indices, a function"),
        ({1, 2}, "order must be an array of source indices, a function"),
        (5, "order must be an array of source indices, a function"),
        ("random", "got 'random' of type str. To shuffle, write shuffle=True"),
        (lp.Buckets([1], [2]), "Write buckets=Buckets(...)"),
        (DistributedSampler(), 'Pass shard="auto"'),
        (PartOfEpoch(), "is a PartOfEpoch, which gives one process its part"),
        (Around(Around(PartOfEpoch())), "is a PartOfEpoch, which gives one process its part"),
        (Endless(), "order=lambda epoch: itertools.islice(sampler, n)"),
        (iter([1]), "without a length"),
        (lp.Weighted([1, 2]), "for each of the 9 items of source, got the shape [2] in epoch 0"),
        (lp.Weighted([1] * 8 + [-1]), "got -1.0 for item 8 in epoch 0"),
        (lp.Weighted([float("nan")] * 9), "got nan for item 0 in epoch 0"),
        (lp.Weighted([0] * 9), "got only zeros in epoch 0"),
        (lp.Weighted(["a"] * 9), "in epoch 0: could not convert string to float"),
        (
            lp.Weighted([1] + [0] * 8, replacement=False),
            "must draw 9 items in epoch 0, but only 1 have a weight above 0. Set num_samples=1",
        ),
        (
            lp.Blocks(),
            "a source of type range does not say how it stores them: write loaderpool.Blocks(rows=...)",
        ),
        (lp.TokenBudget([1, 2], 9), "for each of the 9 items of source, got int64[2] in epoch 0"),
        (
            lp.TokenBudget([1.0] * 9, 9),
            "got float64[9] in epoch 0. Convert seconds to milliseconds",
        ),
        (lp.TokenBudget([[1], [1, 2]], 9), "TokenBudget.lengths must have an integer"),
        (lp.TokenBudget([1] * 8 + [-1], 9), "got -1 for item 8 in epoch 0"),
        (
            lp.TokenBudget([1] * 8 + [10], 9),
            "has 10 for item 8 in epoch 0, more than max_tokens=9. Set a larger max_tokens",
        ),
    ],
)
def test_a_wrong_order_is_refused_with_a_way_out(order: Any, message: str) -> None:
    assert message in refusal(order)


def test_an_order_is_refused_beside_other_orders() -> None:
    assert "order and shuffle=True cannot be combined" in refusal([0], shuffle=True)
    buckets = lp.Buckets([1] * 9, [3])
    assert "order and buckets= cannot be combined" in refusal([0], buckets=buckets)
    assert "order needs a source with __len__" in refusal([0], source=(x for x in [1]))
    budget = lp.TokenBudget([1] * 9, 3)
    for size in (None, 3, 32):
        assert f"cannot be combined with batch_size={size}: remove" in refusal(
            [[0]], batch_size=size
        )
        assert "or set max_rows=" in refusal(budget, batch_size=size)
    assert "Remove batch_size=" in refusal(budget, batch_size=None, pad=True)
    assert "leave no batches in epoch 0" in refusal([0], drop_remainder=True)
    with pytest.raises(lp.ArgumentError, match="order needs a source with __len__"):
        lp.Loader.from_generator(lambda: iter([1]), order=[0], workers=0)


@pytest.mark.parametrize(
    "order",
    [
        [0, 99],
        [0.5],
        np.zeros((2, 2), int),
        np.ones(9, bool),
        lp.Weighted([1, 2]),
        lp.Weighted(np.ones(3)),
        lp.Weighted([0] * 9),
        lp.Packed([9] * 9, length=8),
    ],
)
def test_a_wrong_order_is_refused_when_the_loader_is_made(order: Any) -> None:
    with pytest.raises(lp.ArgumentError, match=r"(in|of) epoch 0"):
        lp.Loader(range(9), order=order, batch_size=2, workers=0)


def test_functions_of_the_epoch_are_checked_at_once() -> None:
    with pytest.raises(lp.ArgumentError, match=r"callable as Weighted.weights\(epoch\)"):
        lp.Weighted(lambda: [1] * 9)
    with pytest.raises(lp.ArgumentError, match=r"callable as TokenBudget.lengths\(epoch\)"):
        lp.TokenBudget(lambda: [1] * 9, 9)


@pytest.mark.parametrize(
    ("order", "name"),
    [
        (len, "order"),
        (lp.Weighted(len), "Weighted.weights"),
        (lp.TokenBudget(len, 9), "TokenBudget.lengths"),
    ],
)
def test_the_error_of_a_function_of_items_names_the_epoch(order: Any, name: str) -> None:
    with (
        pytest.raises(TypeError) as caught,
        lp.Loader(range(9), order=order, workers=0) as each,
    ):
        list(each)
    if hasattr(caught.value, "add_note"):  # from Python 3.11 on
        assert caught.value.__notes__ == [f"while {name} was called with the epoch number 0"]


def test_arrays_may_be_filled_after_the_loader_was_made() -> None:
    weights, indices = np.zeros(9), np.full(3, 99)
    with (
        lp.Loader(range(9), order=lp.Weighted(weights), workers=0) as weighted,
        lp.Loader(range(9), order=indices, workers=0) as given,
    ):
        weights[4], indices[:] = 1, [2, 1, 0]
        assert {int(item) for batch in weighted for item in batch} == {4}
        assert [batch.tolist() for batch in given] == [[2, 1, 0]]


def test_a_failed_draw_leaves_the_loader_usable() -> None:
    indices = np.array([0, 99])
    with lp.Loader(range(9), order=indices, workers=2) as each:
        with pytest.raises(lp.ArgumentError, match="got 99"):
            next(iter(each))
        indices[1] = 1
        assert [batch.tolist() for batch in each] == [[0, 1]]
        assert each.epoch == 1


def test_a_batch_size_beside_a_batch_sampler_must_be_its_own() -> None:
    data = pytest.importorskip("torch").utils.data
    batches = data.BatchSampler(range(9), 4, drop_last=False)
    for size in (None, 32, 5):
        assert "order gives batches of 4" in refusal(batches, batch_size=size)
    for settings in ({}, {"batch_size": 4}):
        with lp.Loader(range(9), order=batches, workers=0, **settings) as each:
            assert each.config.batch_size == 4
            assert [len(batch) for batch in each] == [4, 4, 1]


def test_a_replaced_loader_knows_if_its_batch_size_was_given() -> None:
    with lp.Loader(range(64), workers=0) as plain, plain.replace(order=[[0], [1]]) as other:
        assert [len(batch) for batch in other] == [1, 1]
    with (
        lp.Loader(range(64), batch_size=32, workers=0) as plain,
        pytest.raises(lp.ArgumentError, match="remove batch_size="),
    ):
        plain.replace(order=[[0], [1]])


# ---- batches of any size


@pytest.mark.parametrize("drop", [False, True])
def test_the_spec_of_given_batches_states_no_rows(drop: bool) -> None:
    settings: dict[str, Any] = {"order": [[0, 1], [2]], "workers": 0, "drop_remainder": drop}
    with lp.Loader(range(9), **settings) as each:
        assert each.element_spec == lp.ArraySpec((None,), np.int64)
        assert "batches of its order" in repr(each)
    with lp.Loader(range(9), batch_indices=True, **settings) as each:
        assert each.element_spec[0] == lp.ArraySpec((None,), np.int64)
    given = lp.ArraySpec((None,), np.int32)
    with lp.Loader(range(9), element_spec=given, **settings) as each:
        assert each.element_spec == given
        assert [batch.dtype for batch in each] == [np.int32] * 2
    with (
        lp.Loader(range(9), element_spec=lp.ArraySpec((32,), np.int32), **settings) as each,
        pytest.raises(lp.SpecMismatchError, match="a batch has any number of rows"),
    ):
        next(iter(each))


BATCHES = {
    "max_tokens": {"order": lp.TokenBudget([1] * 8, max_tokens=4)},
    "the batches of order": {"order": [[0, 1], [2]]},
    "batch_sizes": {"buckets": lp.Buckets([1] * 8, [4], [2, 3])},
    "batch_size": {"order": [3, 1], "batch_size": 2},
}


def ends_its_process(item: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("argument", BATCHES)
def test_advice_about_memory_names_what_limits_batches(argument: str) -> None:
    settings: dict[str, Any] = {"workers": 1, **BATCHES[argument]}
    with (
        lp.Loader(range(8), limits=lp.Limits(memory=4096), **settings) as each,
        pytest.raises(lp.MemoryLimitError, match=f"or more, or lower {argument}\\."),
    ):
        next(iter(each))
    limits = lp.Limits(restarts_per_item=2)
    with (
        lp.Loader(range(8), ends_its_process, limits=limits, **settings) as each,
        pytest.raises(lp.WorkerLostError, match=f"or lower workers or {argument}\\."),
    ):
        next(iter(each))


def test_padded_batches_keep_a_token_budget() -> None:
    items = [np.ones(length) for length in LENGTHS]
    order = lp.TokenBudget(LENGTHS, 20, max_rows=4)
    for workers in (0, 2):
        with lp.Loader(items, order=order, pad=True, workers=workers) as each:
            for _ in range(2):
                batches = read(each)
                assert sum(len(batch) for batch in batches) == ITEMS
                assert max(batch.size for batch in batches) <= 20
                assert max(len(batch) for batch in batches) == 4
            assert each.element_spec.shape == (None, None)
            assert each.statistics().memory.batches_oversize == 0


def test_shards_keep_a_token_budget_at_the_end_of_an_epoch() -> None:
    for count in (2, 3, 5, 50):
        costs = []
        for index in range(count):
            order = lp.TokenBudget(LENGTHS, 20)
            with lp.Loader(
                range(ITEMS), order=order, workers=0, shard=lp.Shard(count, index)
            ) as each:
                for _ in range(2):
                    costs += [
                        len(batch) * max(LENGTHS[item] for item in batch.tolist()) for batch in each
                    ]
        assert max(costs) <= 20


# ---- saved states


def test_a_state_refuses_another_order_by_name() -> None:
    with loader("array") as here, loader("weights") as other:
        state = here.state_dict()
        with pytest.raises(lp.StateError, match="order: saved 'indices', current 'Weighted"):
            other.load_state_dict(state)
        with (
            lp.Loader(range(ITEMS), drawn, batch_size=4, workers=0) as plain,
            pytest.raises(lp.StateError, match="order: saved 'indices', current None"),
        ):
            plain.load_state_dict(state)


def test_a_state_within_an_epoch_refuses_other_indices() -> None:
    indices = np.arange(9)
    with lp.Loader(range(9), batch_size=2, order=indices, workers=0) as each:
        iterator = iter(each)
        next(iterator)
        state = each.state_dict()
        indices[:] = indices[::-1].copy()
        with pytest.raises(lp.StateError, match="order= now gives other indices"):
            each.load_state_dict(state)
        iterator.close()
        each.load_state_dict(each.state_dict())
        indices[:] = indices[::-1].copy()
        each.load_state_dict(state)
        assert [batch.tolist() for batch in each] == [[2, 3], [4, 5], [6, 7], [8]]
