"""Random generators inside users' objects draw the same numbers for any number of workers."""

from __future__ import annotations

import functools
import random
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child

ITEMS = 64


def drawn(loader: lp.Loader, epochs: int = 1) -> list[list[float]]:
    with loader:
        return [[float(value) for batch in loader for value in np.ravel(batch)] for _ in range(epochs)]


class Noisy:
    """A map-style dataset that draws in `__getitem__`."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


class Transform:
    """As libraries have them: a generator deep inside an object."""

    def __init__(self, seed: int | None = None) -> None:
        self.parts = [{"of": (np.random.RandomState(seed), random.Random(seed))}]

    def __call__(self, index: int) -> float:
        numpys, pythons = self.parts[0]["of"]
        return float(numpys.random_sample() + pythons.random())


class Slotted:
    """Keeps its generator in a slot."""

    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __call__(self, index: int) -> float:
        return self.rng.random()


class OfTheClass:
    """Has a generator as a class attribute."""

    rng = np.random.default_rng(6)

    def __call__(self, index: int) -> float:
        return self.rng.random()


def of_a_partial(index: int, generator: Any = None) -> float:
    return float(generator.random())


def of_torch() -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    return range(ITEMS), lambda index: float(torch.rand(1, generator=generator, dtype=torch.float64))


def of_scipy() -> tuple[Any, ...]:
    stats = pytest.importorskip("scipy.stats")
    distribution = stats.norm(0, 1)
    distribution.random_state = np.random.default_rng(7)
    return range(ITEMS), lambda index: float(distribution.rvs())


def of_a_closure(make: Callable[[], Any]) -> tuple[Any, ...]:
    generator = make()
    return range(ITEMS), lambda index: float(generator.random())


def spawning() -> tuple[Any, ...]:
    generator = np.random.default_rng(8)
    return range(ITEMS), lambda index: float(generator.spawn(1)[0].random())


# By name: the source and the function, anew with each call.
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "default_rng of a closure": lambda: of_a_closure(lambda: np.random.default_rng(1)),
    "default_rng without a seed": lambda: of_a_closure(np.random.default_rng),
    "random.Random of a closure": lambda: of_a_closure(lambda: random.Random(2)),
    "rng of a dataset": lambda: (Noisy(np.random.default_rng(0)),),
    "deep in a transform": lambda: (range(ITEMS), Transform(3)),
    "deep in a transform without a seed": lambda: (range(ITEMS), Transform()),
    "in a slot": lambda: (range(ITEMS), Slotted()),
    "of a class": lambda: (range(ITEMS), OfTheClass()),
    "of a partial": lambda: (range(ITEMS), functools.partial(of_a_partial, generator=np.random.default_rng(4))),
    "torch.Generator": of_torch,
    "scipy distribution": of_scipy,
    "spawned children": spawning,
}


@pytest.fixture(params=CASES)
def arguments(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    return CASES[request.param]()


def test_samples_draw_distinct_numbers(arguments: tuple[Any, ...]) -> None:
    first, second = drawn(lp.Loader(*arguments, batch_size=8, workers=3), epochs=2)
    assert len({*first, *second}) == 2 * ITEMS


def test_draws_are_equal_for_any_workers(arguments: tuple[Any, ...]) -> None:
    none, one, three = (drawn(lp.Loader(*arguments, batch_size=8, workers=n), epochs=2) for n in (0, 1, 3))
    assert none == one == three


def test_draws_go_on_equal_after_a_resume(arguments: tuple[Any, ...]) -> None:
    def make(workers: int) -> lp.Loader:
        return lp.Loader(*arguments, batch_size=8, workers=workers)

    whole = drawn(make(2))
    with make(2) as loader:
        batches = iter(loader)
        begun = [float(value) for _ in range(3) for value in next(batches)]
        state = batches.state_dict()
    with make(0) as loader:
        loader.load_state_dict(state)
        rest = [float(value) for batch in loader for value in batch]
    assert [begun + rest] == whole


def test_no_warning_names_a_seeded_generator(arguments: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", lp.LoaderpoolWarning)
        drawn(lp.Loader(*arguments, batch_size=8, workers=2))


def test_workers_0_leaves_the_users_generators() -> None:
    rng = np.random.default_rng(0)
    drawn(lp.Loader(Noisy(rng), batch_size=8, workers=0))
    assert rng.random() == np.random.default_rng(0).random()


def test_replay_draws_the_same_numbers() -> None:
    arguments = of_a_closure(np.random.default_rng)
    with lp.Loader(*arguments, batch_size=8, workers=2) as loader:
        batches = list(loader)
        assert lp.replay(loader, epoch=0, index=11) == batches[1][3]


def test_a_killed_worker_changes_no_draw() -> None:
    import os
    import signal

    rng = np.random.default_rng(0)
    whole = drawn(lp.Loader(Noisy(rng), batch_size=4, workers=2))
    with lp.Loader(Noisy(rng), batch_size=4, workers=2) as loader:
        batches = iter(loader)
        found = [float(value) for value in next(batches)]
        os.kill(loader.statistics().workers[0].pid, signal.SIGKILL)
        found += [float(value) for batch in batches for value in batch]
    assert [found] == whole


def test_batch_fn_draws_once_per_batch() -> None:
    rng = np.random.default_rng(0)

    def draw(items: list[int]) -> Any:
        return rng.random(len(items))

    none, three = (drawn(lp.Loader(range(64), batch_fn=draw, batch_size=8, workers=n)) for n in (0, 3))
    assert none == three
    assert len(set(none[0])) == ITEMS


def test_items_of_a_long_list_may_hold_generators() -> None:
    class Item:
        def __init__(self, number: int) -> None:
            self.text = "x" * 2000
            self.rng = shared

    shared = np.random.default_rng(0)
    items = [Item(number) for number in range(1200)]

    def draw(item: Item) -> float:
        return item.rng.random()

    none, three = (drawn(lp.Loader(items, draw, batch_size=64, workers=n)) for n in (0, 3))
    assert none == three
    assert len(set(none[0])) == 1200


# ---- modules, set-up, scripts ----

MODULE = """
    import random

    import numpy as np

    RNG = np.random.default_rng()


    class Flip:
        own = random.Random(5)

        def __init__(self):
            self.state = np.random.RandomState()


    FLIP = Flip()


    def plain(index):
        return RNG.random()


    def deep(index):
        return FLIP.state.random_sample() + FLIP.own.random()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import importlib
    import sys

    (tmp_path / "module_with_generators.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("module_with_generators")
    del sys.modules["module_with_generators"]


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_generators_of_modules_are_seeded(module: Any, name: str) -> None:
    function = getattr(module, name)
    none, one, three = (drawn(lp.Loader(range(ITEMS), function, batch_size=8, workers=n), 2) for n in (0, 1, 3))
    assert none == one == three
    assert len({*none[0], *none[1]}) == 2 * ITEMS


def test_generators_of_modules_used_by_a_lambda_are_seeded(module: Any) -> None:
    def draw(index: int) -> float:
        return float(module.RNG.random())

    none, three = (drawn(lp.Loader(range(ITEMS), draw, batch_size=8, workers=n)) for n in (0, 3))
    assert none == three
    assert len(set(none[0])) == ITEMS


def test_generators_that_setup_makes_are_seeded() -> None:
    opened: dict[str, Any] = {}

    def setup() -> None:
        opened["rng"] = np.random.default_rng()

    def draw(index: int) -> float:
        return float(opened["rng"].random())

    none, three = (drawn(lp.Loader(range(ITEMS), draw, batch_size=8, workers=n, setup=setup)) for n in (0, 3))
    assert none == three
    assert len(set(none[0])) == ITEMS


RESUMED = """
    import json
    import numpy as np
    import loaderpool as lp

    rng = np.random.default_rng()  # without a seed: another state in each process

    def draw(index):
        return float(rng.random())

    with lp.Loader(range(32), draw, batch_size=4, workers=WORKERS) as loader:
        state = json.loads(STATE)
        if state:
            loader.load_state_dict(state)
        batches = iter(loader)
        first = [] if state else [next(batches).tolist() for _ in range(3)]
        state = batches.state_dict()
        print(json.dumps([first, [batch.tolist() for batch in batches], state]))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_another_process_goes_on_with_unseeded_generators(workers: int) -> None:
    import json

    def run(count: int, state: Any) -> Any:
        script = RESUMED.replace("WORKERS", str(count)).replace("STATE", repr(json.dumps(state)))
        child = run_child(script)
        return json.loads(child.check().stdout)

    _, rest, state = run(2, None)
    assert run(workers, state)[1] == rest


# ---- generators that run in workers, and streams ----


@pytest.mark.parametrize("shards", [None, list(range(5))])
def test_a_replica_or_shard_draws_its_own_numbers(shards: list[int] | None) -> None:
    rng = np.random.default_rng(0)

    def make(*shard: int) -> Iterator[float]:
        for _ in range(16):
            yield float(rng.random())

    def loader(workers: int) -> lp.Loader:
        settings = {"shards": shards} if shards else {"copies": 3}
        return lp.Loader.from_generator(make, batch_size=4, workers=workers, **settings)

    none, one, three = (drawn(loader(n), epochs=2) for n in (0, 1, 3))
    assert none == one == three
    assert len({*none[0], *none[1]}) == 2 * len(none[0])


class Shuffled:
    """A stream that shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        items = list(range(32))
        self.random.shuffle(items)
        yield from items


def test_a_stream_shuffles_anew_in_each_pass() -> None:
    none, one, three = (drawn(lp.Loader(Shuffled(), np.int64, batch_size=4, workers=n), 3) for n in (0, 1, 3))
    assert none == one == three
    assert len(set(map(tuple, none))) == 3


def test_a_stream_leaves_the_users_generator() -> None:
    stream = Shuffled()
    drawn(lp.Loader(stream, np.int64, batch_size=4, workers=0))
    assert stream.random.random() == random.Random(1).random()


def test_a_stream_goes_on_equal_after_a_resume() -> None:
    with lp.Loader(Shuffled(), np.int64, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = batches.state_dict()
        rest = [batch.tolist() for batch in batches]
    with lp.Loader(Shuffled(), np.int64, batch_size=4, workers=0) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == rest


# ---- what cannot be seeded ----


def test_threads_warn_of_a_generator() -> None:
    with pytest.warns(lp.LoaderpoolWarning, match="attribute .rng of Noisy is a random number generator.*threads=1"):
        lp.Loader(Noisy(np.random.default_rng(0)), batch_size=8, workers=1, threads=2).close()


def test_seed_globals_false_warns_of_a_generator() -> None:
    with pytest.warns(lp.LoaderpoolWarning, match="workers repeat the same numbers.*remove seed_globals=False"):
        lp.Loader(Noisy(np.random.default_rng(0)), batch_size=8, workers=1, seed_globals=False).close()


def test_too_many_generators_warn() -> None:
    many = [np.random.default_rng(number) for number in range(300)]
    with pytest.warns(lp.LoaderpoolWarning, match="one of 300, and at most 256 are seeded"):
        lp.Loader(range(300), lambda index: many[index].random(), batch_size=8, workers=1).close()


def test_a_cached_function_may_not_draw() -> None:
    rng = np.random.default_rng(0)
    loader = lp.Loader(range(8), lambda index: rng.random(), batch_size=8, workers=1, cache="memory")
    with loader, pytest.raises(lp.CacheError, match="a random number generator that it holds"):
        next(iter(loader))


def test_a_cache_on_disk_knows_unseeded_generators(tmp_path: Path) -> None:
    for _ in range(2):
        transform = Transform()

        def load(index: int) -> float:
            return float(index)

        def augment(value: float, transform: Any = transform) -> float:
            return value + transform(0)

        loader = lp.Loader(range(8), load, augment=augment, batch_size=8, workers=1, cache=tmp_path / "cache")
        assert len(drawn(loader)[0]) == 8
