"""Random generators inside users' objects draw the same numbers for any number of workers."""

from __future__ import annotations

import dataclasses
import functools
import random
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child
from tests.support.libraries import make_library

ITEMS = 64


def drawn(loader: lp.Loader, epochs: int = 1) -> list[list[float]]:
    with loader:
        return [
            [float(value) for batch in loader for value in np.ravel(batch)] for _ in range(epochs)
        ]


def assert_seeded(*arguments: Any, **settings: Any) -> None:
    """Assert that the samples of two epochs draw distinct numbers, the same with 0, 1 and 3 workers."""
    none, one, three = (
        drawn(lp.Loader(*arguments, batch_size=8, workers=n, **settings), 2) for n in (0, 1, 3)
    )
    assert none == one == three
    assert len({*none[0], *none[1]}) == 2 * ITEMS


class Noisy:
    """A map-style dataset that draws in `__getitem__`."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


class Transform:
    """A generator deep inside an object, as in many libraries."""

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
    return range(ITEMS), lambda index: float(
        torch.rand(1, generator=generator, dtype=torch.float64)
    )


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


# Functions that return a new source and function, by name.
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "default_rng of a closure": lambda: of_a_closure(lambda: np.random.default_rng(1)),
    "default_rng without a seed": lambda: of_a_closure(np.random.default_rng),
    "random.Random of a closure": lambda: of_a_closure(lambda: random.Random(2)),
    "rng of a dataset": lambda: (Noisy(np.random.default_rng(0)),),
    "deep in a transform": lambda: (range(ITEMS), Transform(3)),
    "deep in a transform without a seed": lambda: (range(ITEMS), Transform()),
    "in a slot": lambda: (range(ITEMS), Slotted()),
    "of a class": lambda: (range(ITEMS), OfTheClass()),
    "of a partial": lambda: (
        range(ITEMS),
        functools.partial(of_a_partial, generator=np.random.default_rng(4)),
    ),
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
    none, one, three = (
        drawn(lp.Loader(*arguments, batch_size=8, workers=n), epochs=2) for n in (0, 1, 3)
    )
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

    none, three = (
        drawn(lp.Loader(range(64), batch_fn=draw, batch_size=8, workers=n)) for n in (0, 3)
    )
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
    assert_seeded(range(ITEMS), getattr(module, name))


def test_generators_of_modules_used_by_a_lambda_are_seeded(module: Any) -> None:
    def draw(index: int) -> float:
        return float(module.RNG.random())

    assert_seeded(range(ITEMS), draw)


def test_generators_that_setup_makes_are_seeded() -> None:
    opened: dict[str, Any] = {}

    def setup() -> None:
        opened["rng"] = np.random.default_rng()

    def draw(index: int) -> float:
        return float(opened["rng"].random())

    assert_seeded(range(ITEMS), draw, setup=setup)


@pytest.mark.parametrize("order", [(0, 3), (3, 0, 3)])
def test_generators_that_setup_puts_into_a_module_are_seeded(
    module: Any, order: tuple[int, ...]
) -> None:
    def setup() -> None:
        import module_with_generators  # type: ignore[import-not-found]

        module_with_generators.MADE = np.random.default_rng(0)

    def draw(index: int) -> float:
        return float(module.MADE.random() + module.RNG.random())

    found = [
        drawn(lp.Loader(range(ITEMS), draw, batch_size=8, workers=n, setup=setup)) for n in order
    ]
    assert all(each == found[0] for each in found)
    assert len(set(found[0][0])) == ITEMS


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
    none, one, three = (
        drawn(lp.Loader(Shuffled(), np.int64, batch_size=4, workers=n), 3) for n in (0, 1, 3)
    )
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


PACKAGE = {
    "__init__.py": "",
    "rngs.py": """
        import numpy as np

        R = np.random.default_rng()
        POOL = {name: np.random.default_rng(len(name)) for name in {"crop", "sharpen", "hue", "blur-it"}}


        def decorate(function):
            def inner(index):
                return function(index) + R.random()

            return inner


        @decorate
        def decorated(index):
            return 0.0


        class Proxy:
            def __getattr__(self, name):
                return getattr(R, name)


        PROXY = Proxy()
    """,
    "data.py": """
        import package_of_a_user.rngs


        class Dataset:
            def __len__(self):
                return 64

            def __getitem__(self, index):
                return package_of_a_user.rngs.R.random()


        def imports(index):
            from package_of_a_user.rngs import R

            return R.random()


        def imports_near(index):
            from .rngs import R

            return R.random()


        def imports_module(index):
            from . import rngs

            return rngs.R.random()
    """,
    "functions.py": """
        def imports(index):
            import package_of_a_user.rngs

            return package_of_a_user.rngs.R.random()
    """,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import importlib
    import sys

    (tmp_path / "package_of_a_user").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "package_of_a_user" / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("rngs", "data", "functions"):
        importlib.import_module(f"package_of_a_user.{name}")
    yield sys.modules["package_of_a_user"]
    for name in [name for name in sys.modules if name.startswith("package_of_a_user")]:
        del sys.modules[name]


def by_a_chain(package: Any) -> tuple[Any, ...]:
    return range(ITEMS), lambda index: package.rngs.R.random()


def by_name(package: Any) -> tuple[Any, ...]:
    rngs = package.rngs
    return range(ITEMS), lambda index: getattr(rngs, "R").random()  # noqa: B009


def by_an_import(package: Any) -> tuple[Any, ...]:
    def draw(index: int) -> float:
        from package_of_a_user import rngs  # type: ignore[import-not-found]

        return float(rngs.R.random())

    return range(ITEMS), draw


# Source and function, by name.
USES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "package.module.generator": by_a_chain,
    "package.module.function": lambda package: (
        range(ITEMS),
        lambda index: package.rngs.decorated(index),
    ),
    "package.module.dict": lambda package: (
        range(ITEMS),
        lambda index: package.rngs.POOL["hue"].random(),
    ),
    "package.module.proxy": lambda package: (
        range(ITEMS),
        lambda index: package.rngs.PROXY.random(),
    ),
    "getattr": by_name,
    "import in a function": by_an_import,
    "class of a module": lambda package: (package.data.Dataset(),),
    "import in a function of a module": lambda package: (range(ITEMS), package.data.imports),
    "relative import": lambda package: (range(ITEMS), package.data.imports_near),
    "relative import of a module": lambda package: (range(ITEMS), package.data.imports_module),
    "import that workers have not made": lambda package: (range(ITEMS), package.functions.imports),
}


@pytest.mark.parametrize("use", USES)
def test_generators_of_packages_are_seeded(package: Any, use: str) -> None:
    arguments = USES[use](package)
    assert_seeded(*arguments)


LIBRARY = """
    import numpy as np


    class Randomizable:
        R = np.random.RandomState()


    class Noise(Randomizable):
        def __call__(self, index):
            return self.R.random_sample()
"""


def of_an_instance(library: Any) -> tuple[Any, ...]:
    return range(ITEMS), library.Noise()


def of_a_subclass(library: Any) -> tuple[Any, ...]:
    class Own(library.Randomizable):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return ITEMS

        def __getitem__(self, index: int) -> float:
            return float(self.R.random_sample())

    return (Own(),)


@pytest.mark.parametrize("make", [of_an_instance, of_a_subclass])
def test_generators_of_library_classes_are_seeded(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make(make_library(tmp_path, monkeypatch, LIBRARY))
    assert_seeded(*arguments)


# ---- generators that objects create when they are unpickled ----


class Reopened(Noisy):
    """Drops its generator when it is pickled, as objects with open files do."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(np.random.default_rng(seed))
        self.seed = seed

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Rebuilt(Noisy):
    """Is pickled as a call of its class."""

    def __init__(self, seed: int | None) -> None:
        super().__init__(random.Random(seed))
        self.seed = seed

    def __reduce__(self) -> Any:
        return Rebuilt, (self.seed,)


class OnlyWhenLoaded(Noisy):
    """Has a generator only in workers."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.rng = np.random.default_rng(0)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("kind", [Reopened, Rebuilt])
def test_generators_made_on_loading_are_seeded(kind: Any, seed: int | None) -> None:
    dataset = kind(seed)
    dataset.rng.random()  # the copies of the workers have not drawn
    assert_seeded(dataset)


def test_generators_made_only_on_loading_are_seeded() -> None:
    dataset = OnlyWhenLoaded(None)
    one, three = (drawn(lp.Loader(dataset, batch_size=8, workers=n)) for n in (1, 3))
    assert one == three
    assert len(set(one[0])) == ITEMS


def test_another_seed_for_a_generator_made_on_loading() -> None:
    def changed(workers: int) -> list[list[float]]:
        dataset = Reopened(1)
        with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
            first = [float(value) for batch in loader for value in batch]
            dataset.__init__(2)  # type: ignore[misc]
            return [first, [float(value) for batch in loader for value in batch]]

    assert changed(0) == changed(2)


# ---- generators that are hard to find ----


@dataclasses.dataclass
class Box:
    x: float
    y: float


@dataclasses.dataclass
class Record:
    name: str
    boxes: list[Box]
    meta: dict[str, Box]


class Sequence:
    """A transform that calls others."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)

    def __call__(self, value: Any) -> Any:
        for part in self.parts:
            value = part(value)
        return value


class ManyRecords:
    """A dataset of many small objects with a transform deep inside."""

    def __init__(self, count: int) -> None:
        self.records = [
            Record(str(at), [Box(at, 0) for _ in range(4)], {"all": Box(0, 0)})
            for at in range(count)
        ]
        self.transform = Sequence(Sequence(Transform()))

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        return float(self.transform(index))


class BehindALongList:
    """Has its generator after a long list of numbers."""

    def __init__(self) -> None:
        self.steps: list[Any] = [*range(2000), np.random.default_rng()]

    def __call__(self, index: int) -> float:
        return float(self.steps[-1].random())


class BoundMethod:
    """Keeps a method of a generator."""

    def __init__(self) -> None:
        self.draw = random.Random().random

    def __call__(self, index: int) -> float:
        return self.draw()


def of_a_table() -> Any:
    frame = pytest.importorskip("pandas").DataFrame(
        {"rng": [np.random.default_rng(), np.random.default_rng()]}
    )
    return lambda index: float(frame["rng"][index % 2].random())


def of_a_proxy() -> Any:
    table = types.MappingProxyType({"rng": np.random.default_rng()})
    return lambda index: float(table["rng"].random())


HIDDEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "900 records": lambda: (ManyRecords(900),),
    "5,000 records": lambda: (ManyRecords(5000),),
    "behind a long list": lambda: (range(ITEMS), BehindALongList()),
    "bound method": lambda: (range(ITEMS), BoundMethod()),
    "DataFrame": lambda: (range(ITEMS), of_a_table()),
    "MappingProxyType": lambda: (range(ITEMS), of_a_proxy()),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_generators_are_seeded(case: str) -> None:
    arguments = HIDDEN[case]()
    assert_seeded(*arguments)


def begun_and_rest(loader: lp.Loader) -> tuple[Any, list[float]]:
    """Return the state after three batches, and the values after them."""
    with loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = batches.state_dict()
        return state, [float(value) for batch in batches for value in batch]


def resumed(loader: lp.Loader, state: Any) -> list[float]:
    with loader:
        loader.load_state_dict(state)
        return [float(value) for batch in loader for value in batch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_generators_go_on_after_a_resume(case: str, workers: int) -> None:
    state, rest = begun_and_rest(lp.Loader(*HIDDEN[case](), batch_size=8, workers=workers))
    assert resumed(lp.Loader(*HIDDEN[case](), batch_size=8, workers=workers), state) == rest


# ---- generators that are replaced ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_replaced_generator_draws_its_own_numbers(workers: int, make: Any, when: str) -> None:
    dataset = Noisy(make(5))
    with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
        list(loader)
        dataset.rng = make(9)
        batches = iter(loader)
        next(batches)
        state = batches.state_dict()
        rest = [float(value) for batch in batches for value in batch]
    dataset = Noisy(make(9 if when == "before" else 5))
    with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
        if when == "between":
            dataset.rng = make(9)
        loader.load_state_dict(state)
        if when == "after":
            dataset.rng = make(9)
        assert [float(value) for batch in loader for value in batch] == rest


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState])
def test_a_seed_changed_at_a_resume_counts(workers: int, make: Any) -> None:
    def second_epoch(state: Any = None) -> Any:
        dataset = Noisy(make(5 if state is None else 9))
        with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
            if state is None:
                list(loader)
                state = loader.state_dict()
                dataset.rng = make(9)
            else:
                loader.load_state_dict(state)
            return state, [float(value) for batch in loader for value in batch]

    state, whole = second_epoch()
    assert second_epoch(state)[1] == whole


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_holds_the_generators_in_use(workers: int) -> None:
    dataset = Noisy(np.random.default_rng(0))
    with lp.Loader(dataset, batch_size=32, workers=workers) as loader:
        first = len(str(loader.state_dict()))
        for epoch in range(10):
            list(loader)
            dataset.rng = np.random.default_rng(epoch)
        assert len(str(loader.state_dict())) < first + 20


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_is_new_in_an_epoch_is_seeded(workers: int) -> None:
    dataset = Noisy(np.random.default_rng(0))
    with lp.Loader(dataset, batch_size=8, workers=workers) as loader:
        list(loader)
        dataset.rng = np.random.default_rng(1)
        once = [float(value) for batch in loader for value in batch]
        assert lp.replay(loader, epoch=1, index=11) == once[11]
        assert dataset.rng.random() == np.random.default_rng(1).random()
    assert len(set(once)) == ITEMS


@pytest.mark.parametrize("when", ["before the first batch", "after a pass"])
def test_generators_of_setup_go_on_after_a_resume(when: str) -> None:
    kept = np.random.default_rng()
    made: dict[str, Any] = {}

    def setup() -> None:
        made["rng"] = np.random.default_rng()

    def draw(index: int) -> float:
        return float(made["rng"].random() + kept.random())

    def make(workers: int) -> lp.Loader:
        made.clear()
        return lp.Loader(range(ITEMS), draw, batch_size=8, workers=workers, setup=setup)

    state, rest = begun_and_rest(make(2))
    loader = make(0)
    if when == "after a pass":
        list(loader)
    assert resumed(loader, state) == rest


# ---- generators that cannot be seeded ----


def test_threads_warn_of_a_generator() -> None:
    with pytest.warns(
        lp.LoaderpoolWarning,
        match="attribute .rng of Noisy is a random number generator.*threads=1",
    ):
        lp.Loader(Noisy(np.random.default_rng(0)), batch_size=8, workers=1, threads=2).close()


def test_threads_warn_of_a_generator_of_a_module(module: Any) -> None:
    function = lambda index: module.RNG.random()  # noqa: E731
    with pytest.warns(
        lp.LoaderpoolWarning,
        match=r"module_with_generators\.RNG is a random number generator.*threads=1",
    ):
        lp.Loader(range(8), function, batch_size=8, workers=1, threads=2).close()


def test_a_warning_names_generators_behind_the_third(module: Any) -> None:
    held = [np.random.default_rng(seed) for seed in range(3)]
    function = lambda index: held[index % 3].random() + module.RNG.random()  # noqa: E731
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        lp.Loader(range(8), function, batch_size=8, workers=1, threads=2).close()
    assert "More random number generators: module_with_generators.RNG. With" in str(
        shown[-1].message
    )


def test_seed_globals_false_warns_of_a_generator() -> None:
    with pytest.warns(
        lp.LoaderpoolWarning, match="workers repeat the same numbers.*remove seed_globals=False"
    ):
        lp.Loader(
            Noisy(np.random.default_rng(0)), batch_size=8, workers=1, seed_globals=False
        ).close()


def test_too_many_generators_warn() -> None:
    many = [np.random.default_rng(number) for number in range(300)]
    with pytest.warns(lp.LoaderpoolWarning, match="one of 300, and at most 256 are seeded"):
        lp.Loader(range(300), lambda index: many[index].random(), batch_size=8, workers=1).close()


def test_a_cached_function_may_not_draw() -> None:
    rng = np.random.default_rng(0)
    loader = lp.Loader(
        range(8), lambda index: rng.random(), batch_size=8, workers=1, cache="memory"
    )
    with loader, pytest.raises(lp.CacheError, match="a random number generator that it holds"):
        next(iter(loader))


def test_a_cache_on_disk_knows_unseeded_generators(tmp_path: Path) -> None:
    for _ in range(2):
        transform = Transform()

        def load(index: int) -> float:
            return float(index)

        def augment(value: float, transform: Any = transform) -> float:
            return value + transform(0)

        loader = lp.Loader(
            range(8), load, augment=augment, batch_size=8, workers=1, cache=tmp_path / "cache"
        )
        assert len(drawn(loader)[0]) == 8
