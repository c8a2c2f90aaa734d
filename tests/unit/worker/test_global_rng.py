"""The watch sees every draw from the global generators; the trainer's own state is kept."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool.plan.sample_streams import SampleStreams
from loaderpool.worker import global_rng
from loaderpool.worker.global_rng import GlobalsGuard, GlobalsWatch, SavedGlobals
from tests.support.child import run_child
from tests.support.draws import global_draws


@pytest.fixture(autouse=True)
def tests_leave_the_global_generators_alone() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    yield
    random.setstate(python)
    np.random.set_state(numpy)


# --- the watch


DRAWS: dict[str, Callable[[], object]] = {
    "random.random": random.random,
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "random.getrandbits": lambda: random.getrandbits(1),
    "random.gauss": lambda: random.gauss(0, 1),
    "624 words of random": lambda: random.getrandbits(32 * 624),
    "6240 words of random": lambda: random.getrandbits(32 * 6240),
    "random.seed": lambda: random.seed(3),
    "random.setstate": lambda: random.setstate(random.Random(5).getstate()),
    "numpy.random.rand": np.random.rand,
    "numpy.random.normal": np.random.normal,
    "numpy.random.shuffle": lambda: np.random.shuffle([1, 2, 3]),
    "numpy.random.bytes": lambda: np.random.bytes(1),
    "624 words of numpy.random": lambda: np.random.bytes(4 * 624),
    "6240 words of numpy.random": lambda: np.random.bytes(4 * 6240),
    "numpy.random.seed": lambda: np.random.seed(3),
    "numpy.random.set_state": lambda: np.random.set_state(np.random.RandomState(5).get_state()),
}

NO_DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "getstate": lambda: (random.getstate(), np.random.get_state()),
    "own Random": lambda: random.Random(1).random(),
    "own RandomState": lambda: np.random.RandomState(1).normal(),
    "own Generator": lambda: np.random.default_rng(1).normal(),
    "a sample's generator": lambda: SampleStreams(1).generator(0, 0).normal(),
    "system entropy": lambda: random.SystemRandom().random(),
}


@pytest.fixture(params=["peek", "whole state"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GlobalsWatch:
    """A watch of either kind; the second is what is left where memory is not laid out as expected."""
    if request.param == "whole state":
        monkeypatch.setattr(global_rng, "_words_at", lambda address, count: memoryview(bytes(4 * count)).cast("I"))
    watch = GlobalsWatch()
    assert (watch._look is not global_rng._states) == (request.param == "peek")
    return watch


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_watch_sees(watch: GlobalsWatch, draw: Callable[[], object]) -> None:
    random.seed(17)
    np.random.seed(17)
    watch.arm()
    assert not watch.drew()
    draw()
    assert watch.drew()
    assert watch.drew()
    watch.arm()
    assert not watch.drew()


@pytest.mark.parametrize("code", NO_DRAWS.values(), ids=NO_DRAWS)
def test_the_watch_does_not_fire_for(watch: GlobalsWatch, code: Callable[[], object]) -> None:
    watch.arm()
    code()
    assert not watch.drew()


def twisters() -> bytes:
    """The whole state of both Mersenne Twisters, without their cached Gaussians."""
    state: Any = np.random.get_state(legacy=False)
    return pickle.dumps((random.getstate()[1], state["state"]))


@pytest.mark.parametrize("normal", [np.random.normal, lambda: random.gauss(0, 1)], ids=["numpy", "random"])
def test_the_watch_sees_a_cached_gaussian_taken(watch: GlobalsWatch, normal: Callable[[], object]) -> None:
    """It is returned without a draw, so that the twister itself does not change."""
    random.seed(17)
    np.random.seed(17)
    normal()
    watch.arm()
    before = twisters()
    normal()
    assert twisters() == before
    assert watch.drew()


def test_the_watch_changes_nothing(watch: GlobalsWatch) -> None:
    np.random.normal()
    random.gauss(0, 1)
    before = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    GlobalsWatch()
    watch.arm()
    watch.drew()
    assert pickle.dumps((random.getstate(), np.random.get_state(legacy=False))) == before


# What code that is the first to import numpy.random does with it, and whether that counts as a draw.
LATE = {
    "np.random": False,
    "np.random.get_state()": False,
    "np.random.default_rng(1).normal()": False,
    "np.random.RandomState(1).normal()": False,
    "np.random.rand()": True,
    "np.random.bytes(1)": True,
    "np.random.bytes(4 * 623)": True,
    "np.random.bytes(4 * 624)": True,
    "np.random.bytes(4 * 6240)": True,
    "np.random.normal(), np.random.normal()": True,
    "np.random.seed(next(numbers))": True,
    "np.random.set_state(np.random.RandomState(next(numbers)).get_state())": True,
    "np.random.mtrand._rand.__init__(np.random.PCG64(next(numbers)))": True,
}


def test_the_watch_imports_nothing_and_sees_draws_of_who_imports_it_first() -> None:
    result = run_child(f"""
        import itertools, os, sys
        import numpy as np
        from loaderpool.worker.global_rng import GlobalsWatch

        watch, numbers = GlobalsWatch(), itertools.count()
        if "numpy.random" in sys.modules:  # NumPy 1
            sys.exit()
        for code, is_draw in {LATE!r}.items():
            pid = os.fork()
            if pid == 0:
                watch.arm()  # here: `random` is seeded anew in a fork
                assert not watch.drew() and not watch.was_blind
                eval(code)
                looks = [watch.drew(), watch.was_blind]
                watch.arm()
                looks += [watch.drew(), watch.was_blind]
                eval(code)
                looks += [watch.drew(), watch.was_blind]
                if looks != [True, True, False, False, is_draw, False]:
                    print(code, looks, flush=True)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, code
    """)
    assert result.check().stdout == ""


def swap_bit_generator() -> None:
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]


@pytest.fixture
def bit_generators_are_put_back() -> Iterator[None]:
    generator, state = np.random.get_bit_generator(), np.random.get_state(legacy=False)  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
    np.random.set_state(state)


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="came with NumPy 1.24")
@pytest.mark.usefixtures("bit_generators_are_put_back")
class TestSwappedBitGenerators:
    def test_the_watch_sees_the_swap(self) -> None:
        watch = GlobalsWatch()
        swap_bit_generator()
        assert watch.drew()

    def test_the_watch_works_on_another_kind(self) -> None:
        swap_bit_generator()
        watch = GlobalsWatch()
        assert not watch.drew()
        np.random.rand()
        assert watch.drew()

    def test_the_saved_one_comes_back(self) -> None:
        saved = SavedGlobals()
        expected = np.random.rand()
        swap_bit_generator()
        np.random.rand()
        saved.restore()
        assert np.random.rand() == expected

    def test_the_guard_notices_draws_from_one_swapped_in_outside(self) -> None:
        guard = GlobalsGuard()
        swap_bit_generator()
        for _ in range(2):
            expected = np.random.RandomState(np.random.PCG64(1)).rand()
            with guard:
                np.random.rand()
        assert np.random.rand() == expected

    def test_the_guard_puts_back_one_swapped_inside(self) -> None:
        guard, generator = GlobalsGuard(), np.random.get_bit_generator()  # type: ignore[attr-defined]
        with guard:
            swap_bit_generator()
        assert np.random.get_bit_generator() is generator  # type: ignore[attr-defined]


# --- the trainer's own state


@pytest.mark.parametrize("cached", [False, True])
def test_the_trainers_state_comes_back_with_its_cached_gaussians(cached: bool) -> None:
    if cached:
        random.gauss(0, 1)
        np.random.normal()
    saved = SavedGlobals()
    expected = global_draws()
    SampleStreams(1).seed_globals(0, 0)
    global_draws()
    saved.restore()
    assert global_draws() == expected
    saved.restore()
    assert global_draws() == expected


def test_leaving_the_context_restores_also_after_an_error() -> None:
    saved = SavedGlobals()
    random.random()
    with pytest.raises(ZeroDivisionError), saved:
        outside = random.getstate()
        random.seed(1)
        raise ZeroDivisionError
    assert random.getstate() == outside


def states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))


@pytest.mark.parametrize("inside", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("outside", DRAWS.values(), ids=DRAWS)
def test_the_guard_undoes_what_blocks_draw_and_nothing_else(
    outside: Callable[[], object], inside: Callable[[], object]
) -> None:
    guard = GlobalsGuard()
    for draw in (outside, inside, outside, lambda: None, inside):
        draw()
        before = states()
        with guard:
            inside()
            inside()
        assert states() == before
        with guard:
            pass
        assert states() == before


def test_the_guard_restores_after_an_error_too() -> None:
    guard, before = GlobalsGuard(), states()
    with pytest.raises(ZeroDivisionError), guard:
        global_draws()
        raise ZeroDivisionError
    assert states() == before


def test_the_guard_neither_saves_nor_restores_where_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = GlobalsGuard()

    def refuse(*args: Any, **settings: Any) -> None:
        raise AssertionError("it takes 30 us")

    monkeypatch.setattr(SavedGlobals, "save", refuse)
    monkeypatch.setattr(SavedGlobals, "restore", refuse)
    for _ in range(3):
        with guard:
            np.random.default_rng(1).normal()
