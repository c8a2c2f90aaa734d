"""The watch notices every draw from the global generators, and the program's own state is kept."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from loaderpool.plan.sample_streams import SampleStreams
from loaderpool.worker.own_process import GlobalsWatch, KeptGlobals, SavedGlobals
from tests.support.child import run_child
from tests.support.draws import global_draws


def global_states() -> tuple[object, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


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


@pytest.fixture
def watch() -> GlobalsWatch:
    return GlobalsWatch()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_watch_sees(watch: GlobalsWatch, draw: Callable[[], object]) -> None:
    random.seed(17)
    np.random.seed(17)
    before, states = watch.look(), global_states()
    assert (watch.look(), global_states()) == (before, states), "to look is no draw"
    draw()
    after = watch.look()
    assert after != before and global_states() != states
    assert watch.look() == after


@pytest.mark.parametrize("code", NO_DRAWS.values(), ids=NO_DRAWS)
def test_the_watch_does_not_fire_for(watch: GlobalsWatch, code: Callable[[], object]) -> None:
    before = watch.look()
    code()
    assert watch.look() == before


@pytest.mark.parametrize(
    "normal", [np.random.normal, lambda: random.gauss(0, 1)], ids=["numpy", "random"]
)
def test_a_gaussian_that_was_kept_before_is_gone(
    watch: GlobalsWatch, normal: Callable[[], object]
) -> None:
    """Otherwise it would be returned without a draw."""
    normal()
    before = watch.look()
    normal()
    assert watch.look() != before


# Uses of numpy.random by code that imports it first, and whether each counts as a draw the second
# time.
LATE = {
    "np.random": False,
    "np.random.get_state()": False,
    "np.random.default_rng(1).normal()": False,
    "np.random.rand()": True,
    "np.random.bytes(4 * 624)": True,
    "np.random.seed(next(numbers))": True,
    "np.random.mtrand._rand.__init__(np.random.PCG64(next(numbers)))": True,
}


def test_the_watch_imports_nothing_and_counts_the_first_import_as_a_draw() -> None:
    result = run_child(f"""
        import itertools, os, sys
        import numpy as np
        from loaderpool.worker.own_process import GlobalsWatch

        watch, numbers = GlobalsWatch(), itertools.count()
        if "numpy.random" in sys.modules:  # NumPy 1
            sys.exit()
        for code, is_draw in {LATE!r}.items():
            pid = os.fork()
            if pid == 0:
                before = watch.look()  # here: `random` is seeded again in a fork
                assert watch.look() == before
                eval(code)
                after = watch.look()
                assert watch.look() == after
                eval(code)
                draws = [after != before, watch.look() != after]
                if draws != [True, is_draw]:
                    print(code, draws, flush=True)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0, code
    """)
    assert result.check().stdout == ""


# --- the program's own state


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


def test_blocks_leave_the_generators_as_they_were_however_they_end_and_whoever_drew_between() -> (
    None
):
    kept = KeptGlobals()
    for draws, fails, looks in itertools.product([False, True], repeat=3):
        random.random(), np.random.normal()  # draws of the program between two blocks
        before = global_states()
        with contextlib.suppress(ZeroDivisionError), kept:
            assert kept.seen == kept.look()
            seen, kept.seen = kept.seen, None
            if draws:
                global_draws()
            if looks and kept.look() == seen:
                kept.seen = seen
            if fails:
                np.random.rand()
                raise ZeroDivisionError
        assert kept.seen is None
        assert before == global_states()
