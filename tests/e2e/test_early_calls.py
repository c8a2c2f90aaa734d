"""While the first sample is slow, others are made for their turns: each once, and with the bits of its turn."""

from __future__ import annotations

import collections
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, copied, read

SIZE, BATCH = 48, 4
SLOW_S = 0.3  # a first sample that takes a third of it is slow


class Diary:
    """Notes of calls in any process, one a line; and the first sample's wait for them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def note(self, text: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{text}\n")

    @property
    def lines(self) -> list[str]:
        return Path(self.path).read_text().split() if os.path.exists(self.path) else []

    def wait_for(self, lines: int) -> None:
        until = time.monotonic() + 20
        while len(self.lines) < lines:
            assert time.monotonic() < until, "all wait for the first one"
            time.sleep(0.01)


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path / "diary")


def row_of(item: int, noise: float) -> Any:
    return {"x": np.full(3, noise, np.float32), "item": item}


def text_of(item: int, noise: float) -> Any:
    return {"name": "a" * item, "noise": noise}


def long_of(item: int, noise: float) -> Any:
    return np.full((1 + item % 5, 2), noise)


def list_of(item: int, noise: float) -> Any:
    return [item, noise]


def noted(diary: Diary, make: Callable[[int, float], Any], waits_for: int) -> Callable[..., Any]:
    """A function whose first sample is over when others were made; each call notes what is its own in an epoch."""

    def fn(item: int, rng: np.random.Generator) -> Any:
        noise = float(rng.random())
        if item == 0 and waits_for:
            diary.wait_for(waits_for)
        diary.note(f"{item}:{noise}")
        return make(item, noise)

    return fn


def read_while_first_waits(diary: Diary, make: Callable[[int, float], Any], **settings: Any) -> list[Any]:
    settings = {"batch_size": BATCH, "workers": 3, "seed": 5, **settings}
    with lp.Loader(range(SIZE), noted(diary, make, 8), **settings) as loader:
        return read(loader)


def read_here(tmp_path: Path, make: Callable[[int, float], Any], **settings: Any) -> list[Any]:
    here, settings = Diary(tmp_path / "here"), {"batch_size": BATCH, "seed": 5, **settings, "workers": 0}
    with lp.Loader(range(SIZE), noted(here, make, 0), **settings) as loader:
        return read(loader)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (row_of, {}),
        (row_of, {"workers": 2}),
        (row_of, {"batch_size": 16}),
        (row_of, {"batch_size": None}),
        (row_of, {"drop_remainder": True, "batch_size": 5}),
        (row_of, {"on_error": "skip"}),
        (row_of, {"shard": lp.Shard(2, 0)}),
        (row_of, {"threads": 2}),
        (text_of, {}),
        (long_of, {"pad": True, "batch_size": 12}),
        (long_of, {"ragged": True, "batch_size": 8}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_each_call_is_made_once_and_gives_the_same_bits(
    make: Callable[[int, float], Any], settings: dict[str, Any], diary: Diary, tmp_path: Path
) -> None:
    if settings.get("num_shards"):
        settings = {**settings, "drop_remainder": True}
    got = read_while_first_waits(diary, make, **settings)
    assert_same(got, read_here(tmp_path, make, **settings))
    counts = collections.Counter(diary.lines)
    assert set(counts.values()) == {1}, [line for line, count in counts.items() if count > 1]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (list_of, {}),  # made twice by any worker that makes it in blocks: it may be one list, filled again
        (long_of, {"pad": True}),  # the probe looks at other batches, and its worker has no room for all of them
        (long_of, {"pad": True, "buckets": lp.Buckets([1 + item % 5 for item in range(SIZE)], [3])}),
    ],
    ids=["list", "small batches", "buckets"],
)
def test_the_bits_are_the_same(
    make: Callable[[int, float], Any], settings: dict[str, Any], diary: Diary, tmp_path: Path
) -> None:
    got = read_while_first_waits(diary, make, **settings)
    assert_same(got, read_here(tmp_path, make, **settings))


def test_a_shuffled_epoch_begins_with_its_own_samples(diary: Diary, tmp_path: Path) -> None:
    """Which sample is the first one, its position tells; so here the first call waits, of whatever."""

    def fn(item: int, rng: np.random.Generator) -> Any:
        noise = float(rng.random())
        if item == first and diary.path != str(tmp_path / "here"):
            diary.wait_for(8)
        diary.note(f"{item}:{noise}")
        return row_of(item, noise)

    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "seed": 5}
    with lp.Loader(range(SIZE), workers=0, **settings) as loader:
        first = read(loader)[0][0]
    with lp.Loader(range(SIZE), fn, workers=3, **settings) as loader:
        got = read(loader)
    made = diary.lines
    assert len(set(made)) == len(made)
    diary.path = str(tmp_path / "here")
    with lp.Loader(range(SIZE), fn, workers=0, **settings) as loader:
        assert_same(got, read(loader))


def test_what_is_made_by_whole_batches(diary: Diary) -> None:
    def batch_fn(items: list[int], rng: np.random.Generator) -> Any:
        noise = rng.random()
        if items[0] == 0:
            diary.wait_for(2)
        diary.note(f"{items[0]}:{noise}")
        return np.array(items)

    with lp.Loader(range(SIZE), batch_fn=batch_fn, batch_size=BATCH, workers=3) as loader:
        assert np.concatenate(read(loader)).tolist() == list(range(SIZE))
    assert len(set(diary.lines)) == len(diary.lines)


def test_a_function_that_draws_from_the_global_generators_gets_its_samples_own(diary: Diary) -> None:
    def fn(item: int, waits: bool) -> Any:
        drawn = [random.random(), np.random.rand(), item]
        if waits and item == 0:
            diary.wait_for(8)
        diary.note(item)
        return np.array(drawn)

    settings: dict[str, Any] = {"batch_size": BATCH, "seed": 5}
    with lp.Loader(range(SIZE), lambda item: fn(item, True), workers=3, **settings) as loader:
        got = read(loader)
    with lp.Loader(range(SIZE), lambda item: fn(item, False), workers=0, **settings) as loader:
        assert_same(got, read(loader))


def test_two_passes_and_a_cache(diary: Diary) -> None:
    def fn(item: int) -> Any:
        if item == 0:
            diary.wait_for(8)
        diary.note(item)
        return np.full(3, item)

    with lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3, cache="memory") as loader:
        for _ in range(2):
            assert np.concatenate(read(loader))[:, 0].tolist() == list(range(SIZE))
    made = collections.Counter(diary.lines)  # of others two epochs may be made at the same time
    assert len(made) == SIZE and {made[early] for early in diary.lines[:8]} == {1}


# ---- where there is nothing to be made early ----


def test_nothing_is_made_beside_a_quick_sample(diary: Diary) -> None:
    def fn(item: int) -> Any:
        diary.note(item)
        return item

    with lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3) as loader:
        assert loader.element_spec is not None
        time.sleep(SLOW_S)
        assert diary.lines == ["0"]


@pytest.mark.parametrize("kind", ["out", "stream", "generator", "spec"])
def test_what_is_not_made_early(kind: str, diary: Diary) -> None:
    def fn(item: int, out: Any = None) -> Any:
        diary.note(item)
        if item == 0:
            time.sleep(SLOW_S)
            assert kind == "spec" or set(diary.lines) == {"0"}, "something was made early"
        return item

    def generate() -> Any:
        for item in range(SIZE):
            yield fn(item)

    settings: dict[str, Any] = {"batch_size": BATCH, "workers": 3}
    if kind == "generator":
        loader = lp.Loader.from_generator(generate, copies=1, **settings)
    elif kind == "stream":
        loader = lp.Loader(iter(range(SIZE)), lambda item: fn(item), **settings)
    elif kind == "out":
        loader = lp.Loader(range(SIZE), fn, **settings)
    else:
        loader = lp.Loader(range(SIZE), lambda item: fn(item), element_spec=lp.ArraySpec((None,), np.int64), **settings)
    with loader:
        assert sorted(np.concatenate(read(loader)).tolist()) == list(range(SIZE))


def test_a_pass_that_begins_elsewhere_makes_what_it_needs(diary: Diary, tmp_path: Path) -> None:
    """What was made of the epoch's beginning is dropped."""
    settings: dict[str, Any] = {"batch_size": BATCH, "seed": 5}
    with lp.Loader(range(SIZE), noted(Diary(tmp_path / "here"), row_of, 0), workers=0, **settings) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        expected = [copied(batch) for batch in batches]
    with lp.Loader(range(SIZE), noted(diary, row_of, 8), workers=3, **settings) as loader:
        loader.load_state_dict(state)
        assert_same(read(loader), expected)


# ---- what goes wrong early is told in its turn ----


@pytest.mark.parametrize("settings", [{}, {"pad": True}], ids=str)
def test_what_raises_early_raises_in_its_turn(settings: dict[str, Any], diary: Diary) -> None:
    def fn(item: int) -> Any:
        if item == 0:
            diary.wait_for(8)
        diary.note(item)
        if item == 9:
            raise ValueError("a bad file")
        return np.full(2, item)

    got = []
    loader = lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3, **settings)
    with loader, pytest.raises(lp.SampleError, match="a bad file") as caught:
        for batch in loader:
            got.append(batch[:, 0].tolist())
    assert (caught.value.index, caught.value.epoch) == (9, 0)
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_does_not_fit_is_told_in_its_turn(diary: Diary) -> None:
    def fn(item: int) -> Any:
        if item == 0:
            diary.wait_for(8)
        diary.note(item)
        return np.zeros(3 if item == 9 else 2)

    got = []
    loader = lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3)
    with loader, pytest.raises(lp.SpecMismatchError, match="source index 9"):
        for batch in loader:
            got.append(len(batch))
    assert got == [BATCH, BATCH]


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_what_fails_once_early_is_never_heard_of(how: str, diary: Diary) -> None:
    def fn(item: int) -> Any:
        first = str(item) not in diary.lines
        diary.note(item)
        if item == 0:
            diary.wait_for(16 if how == "raises" else 3)
        elif item == 9 and first and how == "raises":
            raise ValueError("a file that is not there yet")
        elif item == 4 and first and how == "exits":
            os._exit(1)
        return np.full(2, item)

    with lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3, limits=lp.Limits(restarts=0)) as loader:
        assert np.concatenate(read(loader))[:, 0].tolist() == list(range(SIZE))


def test_a_worker_that_is_killed_while_it_makes_early(diary: Diary) -> None:
    def fn(item: int) -> Any:
        if item == 0:
            diary.wait_for(6)  # the killed worker's two, and the batch of the other one
        elif item == 5 and "5" not in diary.lines:
            diary.note(5)
            os.kill(os.getpid(), signal.SIGKILL)
        diary.note(item)
        return np.full(2, item)

    with lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3) as loader:
        assert np.concatenate(read(loader))[:, 0].tolist() == list(range(SIZE))
        assert loader.statistics().restarts == 1


def test_a_sample_that_always_ends_its_worker_is_named_in_its_turn(diary: Diary) -> None:
    def fn(item: int) -> Any:
        diary.note(item)
        if item == 0:
            diary.wait_for(4)
        if item == 9:
            os._exit(7)
        return np.full(2, item)

    got = []
    loader = lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3)
    with loader, pytest.raises(lp.WorkerLostError) as caught:
        for batch in loader:
            got.append(batch[:, 0].tolist())
    assert caught.value.index == 9 and got == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_hangs_early_times_out_in_its_turn(diary: Diary) -> None:
    def fn(item: int) -> Any:
        diary.note(item)
        if item == 0:
            diary.wait_for(3)
        if item == 9:
            time.sleep(60)
        return np.full(2, item)

    got = []
    loader = lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3, limits=lp.Limits(timeout_s=1))
    with loader, pytest.raises(lp.SampleTimeoutError) as caught:
        for batch in loader:
            got.append(batch[:, 0].tolist())
    assert caught.value.index == 9 and got == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("first_hangs", [True, False])
def test_close_does_not_wait_for_what_hangs_early(first_hangs: bool, diary: Diary) -> None:
    hangs_s = 600

    def fn(item: int) -> Any:
        diary.note(item)
        if item == 0 and not first_hangs:
            diary.wait_for(3)
        if item != 0 or first_hangs:
            time.sleep(hangs_s)
        return np.full(2, item)

    loader = lp.Loader(range(SIZE), fn, batch_size=BATCH, workers=3)
    diary.wait_for(3)  # the first one, and two early
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(timeout=hangs_s / 4)
    assert not closing.is_alive()
