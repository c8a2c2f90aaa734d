"""Async functions give the bits of the same function without `async`, for any process and number of
concurrent calls.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read
from tests.support.samples import Stream

pytestmark = pytest.mark.filterwarnings("error")
Steps = Generator[None, None, Any]


def plain(steps: Callable[..., Steps]) -> Any:
    """A function that runs through all steps."""

    def fn(item: Any, rng: Any) -> Any:
        return run_through(steps(item, rng))

    return fn


def awaiting(steps: Callable[..., Steps]) -> Any:
    """The same function, async. Other calls run between two steps."""

    async def fn(item: Any, rng: Any) -> Any:
        return await run_with_pauses(steps(item, rng))

    return fn


def run_through(steps: Steps) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value


async def run_with_pauses(steps: Steps) -> Any:
    for pause in (0.002, 0.0, 0.004, 0.001):
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value
        await asyncio.sleep(pause)
    return None


def fixed(item: int, rng: np.random.Generator) -> Steps:
    first = rng.random(2)
    yield
    second = rng.integers(0, 100, 3, dtype=np.int32)
    if item % 2:
        yield
    return {"item": item, "first": first, "second": second, "child": rng.spawn(1)[0].random()}


def of_any_length(item: int, rng: np.random.Generator) -> Steps:
    length = int(rng.integers(1, 9))
    yield
    return rng.integers(0, 255, size=length, dtype=np.uint8)


def failing(item: int, rng: np.random.Generator) -> Steps:
    noise = rng.random()
    yield
    if item % 5 == 2:
        raise ValueError("bad")
    return item, noise


def whole(items: list[int], rng: np.random.Generator) -> Steps:
    noise = rng.random(len(items))
    yield
    return np.array(items), noise, rng.random(len(items))


def element(item: int, rng: np.random.Generator) -> Steps:
    yield
    return rng.random((item % 3 + 1, 2))


def augmented(sample: Any, rng: np.random.Generator) -> Steps:
    noise = rng.random(3)
    yield
    return sample + noise + rng.random()


def row(item: int) -> Any:
    return np.full(3, item, np.float64)


async def row_async(item: int) -> Any:
    await asyncio.sleep(0.001 * (item % 3))
    return np.full(3, item, np.float64)


class Callable_:
    """An object whose `__call__` is async."""

    async def __call__(self, item: int, rng: np.random.Generator, scale: int = 1) -> Any:
        return await awaiting(fixed)(item * scale, rng)


async def scaled(scale: int, item: int, rng: np.random.Generator) -> Any:
    return await awaiting(fixed)(item * scale, rng)


# For each case: arguments without `async`, and the async ones that replace them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fn": ({"fn": plain(fixed)}, {"fn": awaiting(fixed)}),
    "shuffled": ({"fn": plain(fixed), "shuffle": True}, {"fn": awaiting(fixed)}),
    "object": ({"fn": plain(fixed)}, {"fn": Callable_()}),
    "partial": ({"fn": plain(fixed)}, {"fn": functools.partial(scaled, 1)}),
    "partial of object": ({"fn": plain(fixed)}, {"fn": functools.partial(Callable_(), scale=1)}),
    "padded": ({"fn": plain(of_any_length), "pad": True}, {"fn": awaiting(of_any_length)}),
    "skip": ({"fn": plain(failing), "on_error": "skip"}, {"fn": awaiting(failing)}),
    "replace": ({"fn": plain(failing), "on_error": "replace"}, {"fn": awaiting(failing)}),
    "batch_fn": ({"batch_fn": plain(whole)}, {"batch_fn": awaiting(whole)}),
    "elements": ({"fn": plain(element), "batch_size": None}, {"fn": awaiting(element)}),
    "augment": ({"fn": row, "augment": plain(augmented)}, {"fn": row_async}),
    "async augment": ({"fn": row, "augment": plain(augmented)}, {"augment": awaiting(augmented)}),
    "both": (
        {"fn": row, "augment": plain(augmented)},
        {"fn": row_async, "augment": awaiting(augmented)},
    ),
    "stream": ({"fn": plain(fixed), "source": Stream(), "shuffle": 10}, {"fn": awaiting(fixed)}),
    "by length": (
        {"fn": plain(fixed), "buckets": lp.Buckets([i % 7 for i in range(61)], [3, 5], [8, 4, 2])},
        {"fn": awaiting(fixed)},
    ),
}
IN_FLIGHT = (1, 5, 200)


def arguments(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    given, of_async = KINDS[kind]
    given = {"source": range(61), "batch_size": 8, "seed": 11, **given}
    return given, {**given, **of_async}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_without_async(on: Place, kind: str) -> None:
    given, of_async = arguments(kind)
    with lp.Loader(**given, workers=0) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(**of_async, workers=0) as loader:
        assert_same(read(loader, passes=2), expected)
    for threads in IN_FLIGHT:
        with lp.Loader(**of_async, **on(2), threads=threads) as loader:
            assert_same(read(loader, passes=2), expected)
            assert loader.statistics().restarts == 0


def test_row_of_out_belongs_to_its_call(on: Place) -> None:
    async def fn(item: int, rng: Any, out: Any = None) -> Any:
        out = np.empty(4) if out is None else out
        out[:2] = rng.random(2)
        await asyncio.sleep(0.001 * (item % 3))
        out[2:] = item, rng.random()
        return None if out.base is not None else out

    with lp.Loader(range(61), fn, batch_size=8, workers=0) as loader:
        expected = read(loader)
    with lp.Loader(range(61), fn, batch_size=8, **on(2), threads=9) as loader:
        assert_same(read(loader), expected)


def test_resume_with_another_number_in_flight_changes_no_bit(on: Place) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    with lp.Loader(range(101), plain(fixed), workers=0, **settings) as loader:
        expected = read(loader)
    with lp.Loader(range(101), awaiting(fixed), workers=1, threads=30, **settings) as loader:
        batches = iter(loader)
        made = read(next(batches) for _ in range(5))
        state = batches.state_dict()
        loader.resize(2)
        assert_same(made + read(batches), expected)
    with lp.Loader(range(101), awaiting(fixed), **on(2), threads=3, **settings) as loader:
        loader.load_state_dict(state)
        assert_same(made + read(loader), expected)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("workers", [0, 1])
def test_results_of_async_functions_are_cached(workers: int, threads: int, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    async def fn(item: int) -> Any:
        with calls.open("a") as file:
            file.write(f"{item}\n")
        await asyncio.sleep(0.001)
        return np.full(3, item, np.float64)

    settings: dict[str, Any] = {"batch_size": 8, "shuffle": True, "augment": awaiting(augmented)}
    with lp.Loader(
        range(40), row, **{**settings, "augment": plain(augmented)}, workers=0
    ) as loader:
        expected = read(loader, passes=3)
    with lp.Loader(
        range(40), fn, **settings, cache="memory", workers=workers, threads=threads
    ) as loader:
        assert_same(read(loader, passes=3), expected)
        assert loader.statistics().cache.hits >= 60
    called = list(map(int, calls.read_text().split()))
    assert set(called) == set(range(40))
    # an item may be loaded for two epochs at the same time
    assert len(called) <= 40 + (threads > 1) * 2 * threads


@pytest.mark.parametrize("threads", [1, 8])
def test_random_results_are_not_cached(threads: int) -> None:
    async def fn(item: int) -> float:
        await asyncio.sleep(0.001)
        return random.random() if item == 13 else 0.5

    with (
        lp.Loader(range(40), fn, cache="memory", workers=1, threads=threads) as loader,
        pytest.raises(lp.CacheError, match=r"fn used random or numpy.random for source index 13"),
    ):
        read(loader)


# ---- the process and thread of a call ----


def test_calls_of_one_worker_wait_at_the_same_time() -> None:
    async def fn(item: int) -> Any:
        begun = time.monotonic()
        await asyncio.sleep(0.2)
        return os.getpid(), threading.active_count(), begun, time.monotonic()

    with lp.Loader(range(400), fn, batch_size=16, workers=1, threads=100) as loader:
        rows = [
            row for batch in loader for row in zip(*(part.tolist() for part in batch), strict=True)
        ]
    assert len({pid for pid, *_ in rows}) == 1
    assert max(threads for _, threads, *_ in rows) == 1
    most = max(sum(begun <= at < ended for *_, begun, ended in rows) for *_, at, _ in rows)
    assert 60 <= most <= 100


@pytest.mark.parametrize("workers", [0, 1])
def test_all_calls_share_one_loop(workers: int) -> None:
    async def fn(item: int) -> int:
        return id(asyncio.get_running_loop())

    with lp.Loader(range(40), fn, batch_size=8, workers=workers, threads=4) as loader:
        assert len({int(each) for batch in read(loader, passes=2) for each in batch}) == 1


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_setup_runs_in_the_loop_of_the_calls(workers: int, is_async: bool) -> None:
    class Client:
        def setup(self) -> None:
            self.loop = asyncio.get_running_loop()
            np.seterr(divide="raise")

        async def setup_async(self) -> None:
            await asyncio.sleep(0.001)
            self.setup()

        async def load(self, item: int) -> Any:
            await asyncio.sleep(0)
            return self.loop is asyncio.get_running_loop(), np.geterr()["divide"] == "raise"

    client = Client()
    setup = client.setup_async if is_async else client.setup
    with (
        np.errstate(),
        lp.Loader(range(20), client.load, setup=setup, workers=workers, threads=4) as loader,
    ):
        for of_loop, of_context in loader:
            assert of_loop.all()
            assert of_context.all()


def test_async_setup_goes_with_plain_functions(on: Place) -> None:
    class Client:
        value = 0

        async def setup(self) -> None:
            await asyncio.sleep(0.001)
            self.value = 5

        def load(self, item: int) -> int:
            return self.value

    for where in ({"workers": 0}, on(1), {**on(1), "threads": 3}):
        client = Client()
        with lp.Loader(range(8), client.load, setup=client.setup, batch_size=8, **where) as loader:
            assert read(loader)[0].tolist() == [5] * 8


def test_tasks_of_a_worker_go_on_while_it_is_idle() -> None:
    class Client:
        async def setup(self) -> None:
            self.beats = 0
            self.task = asyncio.create_task(self.beat())

        async def beat(self) -> None:
            while True:
                await asyncio.sleep(0.01)
                self.beats += 1

        async def load(self, item: int) -> Any:
            await asyncio.sleep(0)
            return self.beats

    client = Client()
    with lp.Loader(
        range(4), client.load, setup=client.setup, batch_size=4, workers=1, threads=4
    ) as loader:
        before = max(read(loader)[0].tolist())
        time.sleep(0.5)
        assert max(read(loader, passes=2)[1].tolist()) >= before + 10


def test_inside_a_running_loop() -> None:
    async def program() -> Any:
        before = asyncio.current_task()
        with lp.Loader(range(61), awaiting(fixed), batch_size=8, workers=0) as loader:
            made = read(loader)
            one = lp.replay(loader, 5)
        assert asyncio.current_task() is before
        return made, one

    with lp.Loader(range(61), plain(fixed), batch_size=8, workers=0) as loader:
        expected, one = read(loader), lp.replay(loader, 5)
    made, replayed = asyncio.run(program())
    assert_same(made, expected)
    assert repr(replayed) == repr(one)


def test_a_coroutine_reads_another_loader() -> None:
    async def inner(item: int) -> int:
        await asyncio.sleep(0)
        return item

    async def outer(item: int) -> int:
        await asyncio.sleep(0)
        with lp.Loader(range(item + 1), inner, batch_size=None, workers=0) as loader:
            return int(sum(loader))

    with lp.Loader(range(4), outer, batch_size=4, workers=0) as loader:
        assert read(loader)[0].tolist() == [0, 1, 3, 6]


def test_replay_gives_the_sample_of_the_training() -> None:
    with lp.Loader(
        range(61), awaiting(fixed), batch_size=8, shuffle=True, workers=1, threads=9
    ) as loader:
        batch = read(loader)[2]
        for row in range(3):
            made = lp.replay(loader, int(batch["item"][row]))
            for name, part in batch.items():
                assert np.array_equal(made[name], part[row])


def test_generators_feed_async_functions(on: Place) -> None:
    def items(shard: int) -> Iterator[int]:
        yield from range(10 * shard, 10 * shard + 7)

    with lp.Loader.from_generator(
        items, fn=plain(fixed), shards=range(4), batch_size=3, workers=0
    ) as loader:
        expected = read(loader)
    for where in ({"workers": 0}, on(2)):
        with lp.Loader.from_generator(
            items, fn=awaiting(fixed), shards=range(4), batch_size=3, **where
        ) as loader:
            assert_same(read(loader), expected)


# ---- draws that calls share ----


@pytest.mark.parametrize("kind", ["global", "captured"])
def test_one_call_at_a_time_draws_from_anything(on: Place, kind: str) -> None:
    own = random.Random(3)

    def draws(item: int, rng: Any) -> Steps:
        source: Any = random if kind == "global" else own
        first = source.random()
        yield
        return item, first, source.random()

    with lp.Loader(range(41), plain(draws), batch_size=8, workers=0) as loader:
        expected = read(loader, passes=2)
    for where in ({"workers": 0}, on(2)):
        with lp.Loader(range(41), awaiting(draws), batch_size=8, **where) as loader:
            assert_same(read(loader, passes=2), expected)


def test_concurrent_draws_from_global_generators_are_refused() -> None:
    async def fn(item: int) -> float:
        await asyncio.sleep(0.001)
        return random.random() if item == 21 else 0.5

    with (
        lp.Loader(range(64), fn, batch_size=4, workers=1, threads=4) as loader,
        pytest.raises(
            lp.ArgumentError, match=r"concurrent calls share.*threads=4.*parameter `rng`"
        ),
    ):
        read(loader)


def test_concurrent_calls_warn_of_a_generator_that_they_share() -> None:
    own = np.random.default_rng(0)

    async def fn(item: int) -> float:
        return float(own.random())

    with pytest.warns(lp.LoaderpoolWarning, match=r"concurrent calls share it.*rng.*threads=1"):
        lp.Loader(range(8), fn, workers=1, threads=4).close()


def test_one_array_for_several_samples_is_refused() -> None:
    buffer = np.zeros(4)

    async def fn(item: int) -> Any:
        await asyncio.sleep(0.001)
        buffer[:] = item
        return buffer

    with (
        lp.Loader(range(64), fn, batch_size=8, workers=1, threads=4) as loader,
        pytest.raises(lp.ArgumentError, match=r"same array.*Return a new one from each call"),
    ):
        read(loader)


# ---- refused functions ----


@pytest.mark.parametrize("workers", [0, 1])
def test_an_awaitable_of_a_plain_function_is_refused(workers: int) -> None:
    with (
        lp.Loader(range(8), lambda item: row_async(item), batch_size=4, workers=workers) as loader,
        pytest.raises(
            lp.SpecMismatchError,
            match=r"fn returned a coroutine.*async def fn\(item\): return await",
        ),
    ):
        read(loader)


async def yields(item: int) -> AsyncIterator[int]:
    yield item


class Iterates:
    def __aiter__(self) -> AsyncIterator[int]:
        return yields(1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: lp.Loader(range(8), yields),
            lp.ArgumentError,
            "fn is an async generator function",
        ),
        (
            lambda: lp.Loader(Iterates()),
            lp.SourceError,
            "source is a Iterates, whose items only an event loop",
        ),
        (
            lambda: lp.Loader(yields(1)),
            lp.SourceError,
            "source is a async_generator, whose items only an event loop",
        ),
        (
            lambda: lp.Loader(yields),
            lp.SourceError,
            "source is a function, whose items only an event loop",
        ),
        (
            lambda: lp.Loader.from_generator(yields, shards=[1]),
            lp.ArgumentError,
            "make_generator is a function whose items",
        ),
        (
            lambda: lp.Loader.from_generator(lambda: iter([1]), fn=row_async, copies=1, threads=2),
            lp.ArgumentError,
            "threads=2 is not supported",
        ),
    ],
)
def test_async_iterables_are_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
