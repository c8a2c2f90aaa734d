"""`samples_per_item=`: one call of `fn` makes several samples, which the shuffle spreads."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.samples import SampleFile
from loaderpool.system import machine
from tests.support.batches import (
    Place,
    assert_same,
    copied,
    kill_supervisor,
    kill_worker,
    read,
    read_while,
    rows,
    rows_over_a_stop,
    shared_pools,
)
from tests.support.child import run_child
from tests.support.samples import StartsThread

ITEMS, SAMPLES = 12, 5


def cut(item: int, rng: np.random.Generator) -> Any:
    """Return samples: item, number of the sample, and a number from the item's random stream."""
    return [(item * SAMPLES + at, rng.integers(1 << 40)) for at in range(SAMPLES)]


def change(sample: Any, rng: np.random.Generator) -> Any:
    return (*sample, rng.integers(1 << 40))


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "as it is": dict,
    "shuffled": lambda: {"shuffle": True},
    "blocks": lambda: {"order": lp.Blocks(window=3)},
    "weights": lambda: {"order": lp.Weighted(np.arange(ITEMS * SAMPLES))},
    "indices": lambda: {"order": np.arange(ITEMS * SAMPLES)[::-3]},
    "batches": lambda: {"order": [[59, 0, 1], [7, 7], [30, 2, 58, 21]]},
}


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with shared_pools() as found:
        yield found


@pytest.fixture(params=ORDERS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def loader(kind: str, place: dict[str, Any] | None = None, **settings: Any) -> lp.Loader:
    sizes = {} if kind == "batches" else {"batch_size": 4}
    chosen = {**sizes, **ORDERS[kind](), **(place or {"workers": 0}), **settings}
    return lp.Loader(range(ITEMS), cut, augment=change, samples_per_item=SAMPLES, **chosen)


class Logged:
    """Function that logs a line for each call, in any process."""

    def __init__(self, log: Path, call: Callable[[int], Any], pause_s: float = 0.0) -> None:
        self.log, self.call, self.pause_s = log, call, pause_s

    def __call__(self, item: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{item}\n")
        time.sleep(self.pause_s)
        return self.call(item)

    def items(self) -> Counter[int]:
        """Return the number of calls for each item since the last call of this method."""
        lines = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return Counter(map(int, lines))


def numbers(item: int) -> Any:
    return [item * SAMPLES + at for at in range(SAMPLES)]


# ---- equal bits


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
def test_any_number_of_workers_makes_the_same_bits(kind: str, place: Place) -> None:
    with loader(kind) as here:
        expected = read(here, passes=3)
    for settings in ({}, {"threads": 3}):
        for workers in (1, 3):
            with loader(kind, place(workers), **settings) as there:
                assert_same(read(there, passes=3), expected)


def test_indices_are_numbers_of_samples(kind: str) -> None:
    with loader(kind) as here:
        for epoch in range(2):
            count = len(here)
            expected = [here.indices(epoch, batch).tolist() for batch in range(count)]
            assert [items.tolist() for items, *_ in here] == expected


def test_samples_of_an_item_come_from_one_call() -> None:
    with loader("weights") as here:
        found: dict[int, set[int]] = {}
        for items, drawn, _ in read(here):
            for number, value in zip(items.tolist(), drawn.tolist(), strict=True):
                found.setdefault(number, set()).add(value)
        again = {value for _, drawn, _ in read(here) for value in drawn.tolist()}
    assert all(len(values) == 1 for values in found.values())
    assert not again & set().union(*found.values())


def test_shuffle_mixes_samples_of_sixteen_items() -> None:
    settings: dict[str, Any] = {"batch_size": None, "samples_per_item": SAMPLES, "workers": 0}
    for given, window in (({"shuffle": True}, 16), ({"order": lp.Blocks(window=3)}, 3)):
        with lp.Loader(range(40), numbers, **given, **settings) as here:
            order = [int(number) for number in here]
            assert sorted(order) == list(range(40 * SAMPLES))
            windows = [
                {number // SAMPLES for number in order[start : start + window * SAMPLES]}
                for start in range(0, len(order), window * SAMPLES)
            ]
            assert all(len(items) <= window for items in windows)
            assert sum(map(len, windows)) == 40
            assert order != [int(number) for number in here]
            few = itertools.pairwise(order)
            assert sum(one // SAMPLES == other // SAMPLES for one, other in few) < len(order) / 2


def test_each_sample_is_an_object_of_its_own() -> None:
    def overlapping(item: int) -> Any:
        volume = np.full(9, item)
        return [volume[at : at + 5] for at in range(SAMPLES)]

    def negate(sample: Any) -> Any:
        np.negative(sample, out=sample)
        return sample

    order = [3, 3, 4, 3, 0, 1, 2, 4]
    settings: dict[str, Any] = {"order": order, "batch_size": 8, "samples_per_item": SAMPLES}
    for workers in (0, 1):
        with lp.Loader(range(3), overlapping, augment=negate, workers=workers, **settings) as there:
            (batch,) = read(there)
        assert batch.tolist() == [[-(number // SAMPLES)] * 5 for number in order]


def test_views_of_a_tensor_keep_only_their_own_part() -> None:
    torch = pytest.importorskip("torch")

    def views(item: int) -> Any:
        volume = torch.zeros(1 << 20)
        return [volume[at : at + 10] for at in range(SAMPLES)]

    with lp.Loader(range(3), views, batch_size=5, samples_per_item=SAMPLES, workers=0) as here:
        assert next(iter(here)).shape == (5, 10)
        kept = here._core.engine.work.calls.reader.samples._kept  # type: ignore[union-attr]
        assert all(len(part) < 10_000 for parts, _ in kept.values() for part in parts)


def test_global_generators_are_seeded_for_the_item() -> None:
    def draw(item: int) -> Any:
        return [(random.random(), np.random.rand()) for _ in range(SAMPLES)]

    class Own:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(4)

        def __call__(self, item: int) -> Any:
            return [self.rng.random() for _ in range(SAMPLES)]

    for fn in (draw, Own()):
        settings: dict[str, Any] = {"shuffle": True, "batch_size": 4, "samples_per_item": SAMPLES}
        with lp.Loader(range(ITEMS), fn, workers=0, **settings) as here:
            expected = read(here, passes=2)
        for workers in (1, 3):
            with lp.Loader(range(ITEMS), fn, workers=workers, **settings) as there:
                assert_same(read(there, passes=2), expected)


# ---- calls


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_fn_is_called_once_for_each_item(tmp_path: Path, workers: int, threads: int) -> None:
    fn = Logged(tmp_path / "log", numbers, pause_s=0.01)
    settings: dict[str, Any] = {"shuffle": True, "batch_size": 4, "threads": threads}
    with lp.Loader(range(60), fn, samples_per_item=SAMPLES, workers=workers, **settings) as there:
        got = [number for batch in there for number in batch.tolist()]
    assert sorted(got) == list(range(60 * SAMPLES))
    calls = fn.items()
    # Some batches of the next epoch are prefetched.
    assert calls.keys() == set(range(60))
    assert calls.total() <= 60 + 16


@pytest.mark.filterwarnings("ignore:Workers are started without fork")
@pytest.mark.parametrize("start", ["exec", "spawn"])
def test_workers_without_a_fork_make_the_same_samples(tmp_path: Path, start: str) -> None:
    kept = StartsThread() if start == "exec" else None
    fn = Logged(tmp_path / "log", lambda item: (kept, numbers(item))[1], pause_s=0.01)
    settings: dict[str, Any] = {"shuffle": True, "batch_size": 4, "samples_per_item": SAMPLES}
    with (
        lp.Pool(3, start="spawn" if start == "spawn" else "fork") as pool,
        lp.Loader(range(40), fn, workers=pool, **settings) as there,
    ):
        got = [number for batch in there for number in batch.tolist()]
        assert there.statistics().workers_start == start
    assert sorted(got) == list(range(40 * SAMPLES))
    # Spawned workers have no memory file to share, so each makes the items that it needs. Others
    # may start so late that the samples of their first batches were dropped.
    assert fn.items().total() <= (3 * 40 if start == "spawn" else 40 + 16) + 16


# ---- stops


@pytest.mark.may_leak(reason="the tests share pools; the fixture looks when the last has run")
@pytest.mark.parametrize("kind", ["as it is", "shuffled", "blocks", "weights"])
def test_others_continue_where_an_epoch_was_left(kind: str, place: Place) -> None:
    choose = random.Random(kind)
    with loader(kind) as here:
        here.epoch = 1
        whole = read(here)
    expected = rows(whole)
    for _ in range(6):
        found, _ = rows_over_a_stop(functools.partial(loader, kind), place, choose)
        assert set(found) == set(expected)
        assert not Counter(expected) - Counter(found)
        assert len(found) - len(expected) < 3  # if the last batch has fewer rows than shards


def test_a_state_refuses_another_number_of_samples() -> None:
    with loader("shuffled") as here:
        state = here.state_dict()
    with (
        lp.Loader(range(15), cut, augment=change, samples_per_item=4, shuffle=True) as other,
        pytest.raises(lp.StateError, match="samples_per_item: saved 5, current 4"),
    ):
        other.load_state_dict(state)


def test_dead_processes_change_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shuffle": True, "batch_size": 2, "samples_per_item": SAMPLES}
    with lp.Loader(range(60), cut, workers=0, **settings) as here:
        expected = read(here, passes=2)
    with lp.Loader(range(60), cut, workers=2, **settings) as there:
        got = read_while(there, {3: lambda: kill_worker(there), 9: lambda: kill_worker(there)})
        iterator = iter(there)
        got += [copied(batch) for batch in itertools.islice(iterator, 5)]
        kill_supervisor(there)
        assert_same(got + read(iterator), expected)


def test_a_lock_ends_with_its_process() -> None:
    file = SampleFile(machine.create_memory_file("samples"), 3)
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    pid = os.fork()
    if not pid:
        file.lock(3, waits=False)
        os.write(from_child, b"x")
        os.read(to_child, 1)
        os._exit(0)
    os.read(to_parent, 1)
    assert file.lock(2, waits=False)
    assert not file.lock(3, waits=False)
    os.write(from_parent, b"x")
    assert file.lock(3, waits=True)
    os.waitpid(pid, 0)
    file.unlock(2)
    file.unlock(3)
    for each in (to_child, from_parent, to_parent, from_child):
        os.close(each)


# ---- errors


class Fails:
    """Function that fails for item 7, in one of several ways."""

    def __init__(self, how: str, pause_s: float = 0.0) -> None:
        self.how, self.pause_s = how, pause_s

    def __call__(self, item: int) -> Any:
        time.sleep(self.pause_s)
        if item != 7:
            return numbers(item)
        if self.how == "raises":
            raise KeyError("broken volume")
        if self.how == "too few":
            return numbers(item)[:3]
        if self.how == "no list":
            return tuple(numbers(item))
        if self.how == "no pickle":
            return [*numbers(item)[1:], threading.Lock()]
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return None


SAYS = {
    "raises": "broken volume",
    "too few": "must return a list of 5 samples .* returned 3 samples for source index 7",
    "no list": "returned an object of type tuple for source index 7. Convert",
    "no pickle": "a sample that fn returned for source index 7 cannot be pickled",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", SAYS)
def test_errors_name_the_item(how: str, workers: int) -> None:
    with (
        lp.Loader(
            range(ITEMS), Fails(how), samples_per_item=SAMPLES, shuffle=True, workers=workers
        ) as there,
        pytest.raises(lp.LoaderpoolError, match=SAYS[how]) as caught,
    ):
        list(there)
    if isinstance(caught.value, lp.SampleError):
        assert caught.value.index == 7
        assert "source index 7" in str(caught.value)


def test_error_of_augment_names_item_and_sample() -> None:
    def check(number: int) -> int:
        if number == 38:
            raise ValueError("bad patch")
        return number

    for workers in (0, 1):
        with (
            lp.Loader(
                range(ITEMS), numbers, augment=check, samples_per_item=SAMPLES, workers=workers
            ) as there,
            pytest.raises(lp.SampleError, match="bad patch") as caught,
        ):
            list(there)
        assert caught.value.index == 7  # type: ignore[attr-defined]
        assert "sample 3 of the item" in caught.value.remote_traceback  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("how", [*SAYS, "dies", "hangs"])
def test_skip_leaves_out_all_samples_of_an_item(how: str, workers: int, tmp_path: Path) -> None:
    if how in ("dies", "hangs") and not workers:
        pytest.skip("the function would end this process")
    fn = Logged(tmp_path / "log", Fails(how))
    limits = lp.Limits(timeout_s=0.5, restarts_per_item=2) if how == "hangs" else None
    with lp.Loader(
        range(ITEMS),
        fn,
        batch_size=4,
        samples_per_item=SAMPLES,
        shuffle=True,
        on_error="skip",
        workers=workers,
        limits=limits,
    ) as there:
        got = [number for batch in there for number in batch.tolist()]
        counts = there.statistics()
    assert sorted(got) == [each for item in range(ITEMS) if item != 7 for each in numbers(item)]
    assert counts.errors == SAMPLES
    assert counts.skipped_indices == (7,) * SAMPLES
    assert fn.items()[7] <= 2 * max(3, 3 * workers)


def test_each_call_has_its_own_time_limit() -> None:
    def slow(item: int) -> Any:
        time.sleep(0.3)
        return numbers(item)

    def slow_too(number: int) -> int:
        time.sleep(0.3 if number % SAMPLES == 0 else 0)
        return number

    limits = lp.Limits(timeout_s=0.5)
    with lp.Loader(
        range(4), slow, augment=slow_too, samples_per_item=SAMPLES, workers=3, batch_size=2,
        limits=limits,
    ) as there:  # fmt: skip
        got = [number for batch in there for number in batch.tolist()]
    assert got == list(range(4 * SAMPLES))


def test_a_timeout_names_the_item() -> None:
    limits = lp.Limits(timeout_s=0.3)
    with (
        lp.Loader(
            range(ITEMS), Fails("hangs"), samples_per_item=SAMPLES, workers=2, limits=limits
        ) as there,
        pytest.raises(lp.SampleTimeoutError, match="source index 7") as caught,
    ):
        list(there)
    assert caught.value.index == 7


# ---- caches, replay


@pytest.mark.parametrize("workers", [0, 3])
def test_a_cache_keeps_the_samples(tmp_path: Path, workers: int) -> None:
    fn = Logged(tmp_path / "log", numbers)
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "workers": workers}
    for where in ("memory", tmp_path / "kept"):
        with lp.Loader(
            range(ITEMS), fn, augment=change_number, samples_per_item=SAMPLES, cache=where,
            **settings,
        ) as there:  # fmt: skip
            got = read(there, passes=3)
            counts = there.statistics().cache
        with lp.Loader(
            range(ITEMS), numbers, augment=change_number, samples_per_item=SAMPLES, batch_size=4,
            shuffle=True, workers=0,
        ) as here:  # fmt: skip
            assert_same(got, read(here, passes=3))
        assert set(fn.items().values()) == {1}
        assert counts.misses == ITEMS
        assert counts.hits >= 2 * ITEMS * SAMPLES
    with pytest.raises(lp.CacheError, match=r"samples_per_item \(then 5, now 4\)"):
        lp.Loader(range(ITEMS), fn, samples_per_item=4, cache=tmp_path / "kept", workers=0)


def change_number(number: int, rng: np.random.Generator) -> Any:
    return number, rng.integers(1 << 40)


def test_samples_beyond_a_full_cache_are_kept_for_the_window(tmp_path: Path) -> None:
    fn = Logged(tmp_path / "log", numbers)
    cache = lp.Cache("memory", max_bytes=2000)
    with lp.Loader(
        range(ITEMS), fn, samples_per_item=SAMPLES, cache=cache, shuffle=True, workers=2
    ) as there:
        got = [number for batch in there for number in batch.tolist()]
    assert sorted(got) == list(range(ITEMS * SAMPLES))
    assert fn.items().total() <= 2 * ITEMS


def test_replay_returns_the_samples_of_an_item() -> None:
    with loader("shuffled", {"workers": 1}) as there:
        rows = {
            row[0]: row
            for batch in read(there)
            for row in zip(*map(np.ndarray.tolist, batch), strict=True)
        }
        made = lp.replay(there, 7)
    assert [tuple(map(int, sample)) for sample in made] == [rows[number] for number in numbers(7)]
    with (
        lp.Loader(range(ITEMS), Fails("raises"), samples_per_item=SAMPLES, workers=0) as here,
        pytest.raises(KeyError, match="broken volume"),
    ):
        lp.replay(here, 7)
    with loader("indices") as here:
        assert len(lp.replay(here, 7)) < SAMPLES


def test_objects_that_change_between_epochs_are_used() -> None:
    class Adds:
        more = 0

        def __call__(self, item: int) -> Any:
            return [item + self.more] * SAMPLES

    fn = Adds()
    for workers in (0, 1):
        fn.more = 0
        with lp.Loader(range(4), fn, samples_per_item=SAMPLES, workers=workers) as there:
            assert next(iter(there))[0] == 0
            fn.more = 3
            there.epoch = 0
            assert next(iter(there))[0] == 3


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("order", [{}, {"order": lp.Weighted([1] * 20)}])
def test_a_repeated_epoch_reads_its_items_again(workers: int, order: Any, tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.write_text("bad")

    def read_file(item: int) -> Any:
        now = content.read_text()
        if item == 2 and now == "bad":
            raise OSError("a damaged volume")
        return [(item, now)] * SAMPLES

    with lp.Loader(
        range(4), read_file, samples_per_item=SAMPLES, workers=workers, on_error="skip", **order
    ) as there:
        assert 2 not in {int(item) for items, _ in there for item in items}
        content.write_text("good")
        there.epoch = 0
        again = [*there]
    assert 2 in {int(item) for items, _ in again for item in items}
    assert {str(text) for _, texts in again for text in texts} == {"good"}


def test_a_system_without_locks_of_files_makes_samples() -> None:
    run_child(
        """
        import sys
        sys.modules["fcntl"] = None  # as on Windows
        import loaderpool as lp
        with lp.Loader(range(3), lambda i: [i, -i], samples_per_item=2, workers=0) as loader:
            assert next(iter(loader)).tolist() == [0, 0, 1, -1, 2, -2]
        """
    )


def test_lengths_and_shapes_are_those_of_samples() -> None:
    with loader("shuffled", drop_remainder=True) as here:
        assert len(here) == ITEMS * SAMPLES // 4
        assert here.element_spec[0].shape == (4,)
        assert "12 items" in repr(here)
    with lp.Loader(range(3), numbers, samples_per_item=SAMPLES, batch_size=None, workers=1) as each:
        assert [int(number) for number in each] == list(range(15))


# ---- refusals


async def later(item: int) -> Any:
    return numbers(item)


def filled(item: int, out: Any = None) -> Any:
    return numbers(item)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fn": None}, "needs fn, which returns a list of samples, but no fn was given"),
        ({"fn": None, "batch_fn": list}, "batch_fn returns whole batches"),
        ({"fn": later}, "async"),
        ({"fn": filled}, "Move the part that fills `out` to augment="),
        ({"source": iter([1])}, "Yield the samples one by one"),
        ({"buckets": lp.Buckets([1] * 9, [2])}, "samples_per_item and buckets"),
        ({"order": lp.Blocks(rows=5)}, r"write Blocks\(window=16\)"),
        ({"samples_per_item": 0}, "samples_per_item must be at least 1"),
        ({"order": [45]}, "from 0 to 44"),
        ({"order": lp.Weighted([1] * 9)}, r"each of the 45 samples \(9 items, samples_per_item=5"),
        ({"order": lp.Packed([1] * 9, length=9)}, r"each of the 45 samples \(9 items, samples_per"),
    ],
)
def test_wrong_settings_are_refused_with_a_way_out(settings: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"source": range(9), "fn": numbers, "samples_per_item": SAMPLES}
    with pytest.raises(lp.ArgumentError, match=message):
        list(lp.Loader(**{**arguments, **settings}, workers=0))


def test_generators_are_refused() -> None:
    with pytest.raises(lp.ArgumentError, match="Yield the samples one by one"):
        lp.Loader.from_generator(lambda: iter(range(3)), samples_per_item=SAMPLES)
    with pytest.raises(lp.ArgumentError, match="cache needs a source with __len__"):
        lp.Loader.from_generator(lambda: iter(range(3)), cache="memory")
