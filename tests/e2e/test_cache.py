"""`cache=` and `augment=`: fn is called once for each item, augment in every epoch, and the bits stay the same."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.cache.store import FILE_NAME
from tests.support.batches import Place, assert_same, copied, read, supervisor_of
from tests.support.processes import shared_bytes

ITEMS = 50
PLACES = (0, 2)


class Log:
    """Counts calls over all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def note(self, item: int) -> None:
        with open(self.path, "ab", 0) as file:
            file.write(
                b"%d\n" % item
            )  # one write to a file opened for appending stays whole, even if other processes write

    def take(self) -> list[int]:
        found = [int(line) for line in self.path.read_text().split()]
        self.path.write_text("")
        return found


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return "memory" if request.param == "memory" else tmp_path / "cache"


def decoder(log: Log) -> Callable[[int], dict[str, Any]]:
    def decode(item: int) -> dict[str, Any]:
        log.note(item)
        return {
            "image": np.full((item % 4 + 1, 6), item, np.float32),
            "label": item,
            "name": f"n{item}",
        }

    return decode


def augment(sample: dict[str, Any], rng: np.random.Generator) -> tuple[Any, Any, Any]:
    sample["image"] *= 2  # in place, which must not change the cached sample
    sample["image"] += rng.normal(size=6).astype(np.float32)
    return sample["image"].sum(0), sample["label"], sample["name"]


def settings(**more: Any) -> dict[str, Any]:
    return {"batch_size": 8, "shuffle": True, "seed": 3, "augment": augment, **more}


def reference(log: Log, passes: int = 3) -> list[Any]:
    """Return the batches that are made without a cache."""
    with lp.Loader(range(ITEMS), decoder(log), **settings(workers=0)) as loader:
        batches = read(loader, passes)
    assert sorted(log.take()) == sorted([*range(ITEMS)] * passes)
    return batches


@pytest.mark.parametrize("workers", PLACES)
def test_fn_is_called_once_for_each_item_and_the_bits_are_those_without_a_cache(
    on: Place, where: Any, log: Log, workers: int
) -> None:
    expected = reference(log)
    with lp.Loader(range(ITEMS), decoder(log), **settings(cache=where, **on(workers))) as loader:
        assert_same(read(loader, 3), expected)
        # Checked before the end: a worker that runs when the entries are removed calls the function
        # once more.
        statistics, calls = loader.statistics(), log.take()
    # If one epoch reads ahead into the next, two workers may need an item at the same time.
    assert set(calls) == set(range(ITEMS)) and len(calls) <= ITEMS + 3 * max(0, workers - 1)
    assert len(calls) == statistics.cache.misses
    assert statistics.cache.hits >= 3 * ITEMS - len(calls)
    assert statistics.cache.bytes > ITEMS * 100
    assert not statistics.cache.is_full and not statistics.cache.damaged


def test_a_later_run_calls_fn_for_nothing(on: Place, log: Log, tmp_path: Path) -> None:
    expected = reference(log)
    for workers in PLACES:
        with lp.Loader(
            range(ITEMS), decoder(log), **settings(cache=tmp_path / "c", **on(workers))
        ) as loader:
            assert_same(read(loader, 3), expected)
            assert loader.statistics().cache.misses == (ITEMS if workers == 0 else 0)
    assert len(log.take()) == ITEMS


def test_a_run_that_stopped_half_way_leaves_its_half(on: Place, log: Log, tmp_path: Path) -> None:
    with lp.Loader(
        range(ITEMS), decoder(log), **settings(cache=tmp_path / "c", workers=0)
    ) as loader:
        batches = iter(loader)
        next(batches), next(batches)
    half = log.take()
    assert len(half) == 16
    with lp.Loader(range(ITEMS), decoder(log), **settings(cache=tmp_path / "c", **on(2))) as loader:
        read(loader)
    rest = log.take()
    assert not set(half) & set(rest) and {*half, *rest} == set(range(ITEMS))
    assert len(rest) <= ITEMS - 16 + 3


def test_a_state_is_not_anothers_augmentations(log: Log) -> None:
    with lp.Loader(range(ITEMS), decoder(log), **settings(workers=0)) as loader:
        state = loader.state_dict()
        for other in (None, lambda sample: augment(sample, np.random.default_rng(0))):
            with (
                loader.replace(augment=other, batch_size=8) as another,
                pytest.raises(lp.StateError, match=r"settings\. function"),
            ):
                another.load_state_dict(state)


def test_a_full_cache_goes_on_and_says_so(on: Place, log: Log, tmp_path: Path) -> None:
    def decode(item: int) -> Any:
        log.note(item)
        return np.full(25_000, item, np.float64)  # 200 kB

    for cache in (lp.Cache("memory", "4MB"), lp.Cache(tmp_path / "c", "6MiB")):
        chosen = {"batch_size": 5, "cache": cache, "augment": np.sum, **on(2)}
        with lp.Loader(range(ITEMS), decode, **chosen) as loader:
            for _ in range(3):
                assert [int(total) for batch in loader for total in batch] == [
                    25_000 * n for n in range(ITEMS)
                ]
            statistics = loader.statistics()
            assert statistics.cache.is_full and statistics.cache.bytes <= (cache.max_bytes or 0)
        calls = log.take()
        kept = [item for item in range(ITEMS) if calls.count(item) == 1]
        assert 10 <= len(kept) <= (cache.max_bytes or 0) // 200_000
        assert (
            ITEMS < statistics.cache.misses <= len(calls)
        )  # some samples of the next epoch were made since


@pytest.mark.parametrize("workers", [0, 2])
def test_what_fails_is_not_kept(on: Place, where: Any, tmp_path: Path, workers: int) -> None:
    mended = tmp_path / "mended"

    def decode(item: int) -> int:
        if item == 7 and not mended.exists():
            raise KeyError("seven")
        return item

    with lp.Loader(
        range(20), decode, batch_size=5, cache=where, on_error="skip", **on(workers)
    ) as loader:
        assert [int(item) for batch in loader for item in batch] == [n for n in range(20) if n != 7]
        mended.touch()
        batches = read(loader, 2)[-4:]  # some batches of the next epoch may have been made before
        assert [int(item) for batch in batches for item in batch] == list(range(20))


def test_an_augment_that_fails_has_fn_kept(on: Place, where: Any, log: Log) -> None:
    def fails(sample: dict[str, Any]) -> Any:
        raise ZeroDivisionError(f"at {sample['label']}")

    with lp.Loader(
        range(20), decoder(log), batch_size=4, augment=fails, cache=where, **on(2)
    ) as loader:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="at 0") as error:
                next(iter(loader))
            assert isinstance(error.value, lp.SampleError) and error.value.index == 0
    assert log.take().count(0) == 1  # one sample of the next batch may have been started


class TestRandomFunctions:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize(
        "draw", [lambda: random.random(), lambda: np.random.rand()], ids=["random", "numpy"]
    )
    @pytest.mark.parametrize(
        "more", [{"on_error": "replace"}, {"seed_globals": True}, {"seed_globals": False}], ids=str
    )
    def test_a_draw_from_the_globals_is_an_error_that_nothing_skips(
        self, on: Place, where: Any, workers: int, draw: Any, more: dict[str, Any]
    ) -> None:
        chosen = {"batch_size": 4, "cache": where, "on_error": "skip", **more}
        with (
            lp.Loader(
                range(20),
                lambda item: item + (draw() if item == 13 else 0),
                **chosen,
                **on(workers),
            ) as loader,
            pytest.raises(lp.CacheError, match=r"source index 13[\s\S]*augment="),
        ):
            read(loader)

    @pytest.mark.parametrize("workers", PLACES)
    def test_augment_may_draw_from_the_globals(
        self, on: Place, where: Any, log: Log, workers: int
    ) -> None:
        def noisy(sample: dict[str, Any]) -> float:
            return float(sample["label"]) + random.random() + np.random.rand()

        chosen = {"batch_size": 8, "shuffle": True, "augment": noisy}
        with lp.Loader(range(ITEMS), decoder(log), workers=0, seed_globals=True, **chosen) as plain:
            expected = read(plain, 2)
        log.take()
        with lp.Loader(range(ITEMS), decoder(log), cache=where, **chosen, **on(workers)) as loader:
            assert_same(read(loader, 2), expected)
        assert set(log.take()) == set(range(ITEMS))


class TestAugmentAlone:
    @pytest.mark.parametrize("workers", PLACES)
    def test_plain_functions_and_no_fn(self, on: Place, workers: int) -> None:
        items = np.arange(1000, dtype=np.int64)
        with (
            lp.Loader(items, np.negative, batch_size=10, augment=np.abs, **on(workers)) as both,
            lp.Loader(items, batch_size=10, augment=np.negative, **on(workers)) as alone,
            # These functions could write into an `out`, but are not refused for that.
            lp.Loader(items, np.negative, batch_size=10, cache="memory", **on(workers)) as cached,
        ):
            assert np.array_equal(np.concatenate(read(both)), items)
            for _ in range(2):
                assert np.array_equal(np.concatenate(read(cached)), -items)
            assert np.array_equal(np.concatenate(read(alone)), -items)

    @pytest.mark.parametrize("workers", PLACES)
    @pytest.mark.parametrize("cache", [None, "memory"])
    def test_augment_may_write_into_the_batch(self, on: Place, workers: int, cache: Any) -> None:
        def fn(item: int) -> Any:
            return np.full((4, 5), item, np.float32)

        def double(sample: Any, out: Any = None, *, rng: Any) -> Any:
            made = sample * 2 + rng.integers(3)
            if out is None:
                return made
            out[...] = made
            return None

        def doubled(item: int, rng: Any) -> Any:
            return fn(item) * 2 + rng.integers(3)

        with (
            lp.Loader(
                range(40), fn, batch_size=8, augment=double, cache=cache, **on(workers)
            ) as loader,
            lp.Loader(range(40), doubled, batch_size=8, workers=0) as expected,
        ):
            assert_same(read(loader, 2), read(expected, 2))

    def test_replay_runs_both(self, log: Log) -> None:
        with lp.Loader(range(ITEMS), decoder(log), **settings(cache="memory", workers=0)) as loader:
            batch = read(loader)[2]
            log.take()
            made = lp.replay(loader, int(batch[1][3]))
        assert np.array_equal(made[0], batch[0][3]) and made[2] == batch[2][3]
        assert log.take() == [int(batch[1][3])]  # made by its own function, not read from the cache


class TestStreams:
    """A source without an index has no cache, and `augment` is called as usual."""

    MAKERS: dict[str, Callable[..., lp.Loader]] = {
        "stream": lambda **chosen: lp.Loader(iter(range(40)), **chosen),
        "generator": lambda **chosen: lp.Loader.from_generator(
            lambda shard: iter(range(shard, shard + 10)), shards=[0, 10, 20, 30], **chosen
        ),
    }

    @pytest.mark.parametrize("maker", MAKERS)
    def test_augment_is_called_and_a_cache_refused(self, maker: str) -> None:
        def then(item: int, rng: np.random.Generator) -> tuple[int, float]:
            return item, rng.random()

        found = []
        for workers in (0, 2):
            with self.MAKERS[maker](
                fn=np.negative, augment=then, batch_size=5, workers=workers
            ) as loader:
                found.append(read(loader))
        assert_same(*found)
        assert sorted(np.concatenate([items for items, _ in found[0]]).tolist()) == list(
            range(-39, 1)
        )
        assert len(set(np.concatenate([drawn for _, drawn in found[0]]).tolist())) == 40
        with pytest.raises(lp.ArgumentError, match="got a stream or generator"):
            self.MAKERS[maker](fn=np.negative, cache="memory", workers=0)


class TestRefused:
    CASES = {
        "batch_fn and augment": (
            {"fn": None, "batch_fn": np.stack, "augment": np.abs},
            "be combined with batch_fn",
        ),
        "batch_fn and cache": (
            {"fn": None, "batch_fn": np.stack, "cache": "memory"},
            "cache stores single samples",
        ),
        "fn takes rng": (
            {"fn": lambda item, rng: item, "cache": "memory"},
            r"fn takes `rng`.*augment=",
        ),
        "no fn": ({"fn": None, "cache": "memory"}, "no fn was given"),
        "cache is a class": ({"cache": lp.Cache}, "cache must be"),
        "augment is no function": ({"augment": 3}, "augment must be callable"),
        "augment takes nothing": (
            {"augment": lambda: 3},
            r"augment must be callable as augment\(sample\)",
        ),
        "cache is a number": ({"cache": 3}, "cache must be"),
        "cache is empty": ({"cache": ""}, "cache must be"),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_in_the_callers_line(self, case: str) -> None:
        arguments, message = self.CASES[case]
        with pytest.raises(lp.ArgumentError, match=message):
            lp.Loader(range(3), **{"fn": int, **arguments})

    def test_from_sequence(self) -> None:
        for name, value in (("cache", "memory"), ("augment", np.abs)):
            with pytest.raises(lp.ArgumentError, match=f"from_sequence takes no {name}"):
                lp.Loader.from_sequence([np.zeros(3)], **{name: value})

    def test_what_is_no_pickle(self, on: Place, where: Any) -> None:
        chosen = {
            "batch_size": 4,
            "augment": lambda made: made(),
            "cache": where,
            "on_error": "skip",
        }
        for workers in (0, 2):
            with (
                lp.Loader(range(8), lambda item: lambda: item, **chosen, **on(workers)) as loader,
                pytest.raises(lp.CacheError, match=r"source index 0, a function, cannot be cached"),
            ):
                read(loader)


class TestOnDisk:
    def test_another_function_closure_or_source_is_refused(self, log: Log, tmp_path: Path) -> None:
        def make(factor: int) -> Callable[[int], int]:
            return lambda item: item * factor

        cache = tmp_path / "c"
        with lp.Loader(range(10), make(2), workers=0, cache=cache) as loader:
            read(loader)
            with pytest.raises(
                lp.CacheError,
                match=r"'factor' of .*make.* \(then 2, now 3\)\..*Delete the directory",
            ):
                lp.Loader(range(10), make(3), workers=0, cache=cache)
            with pytest.raises(lp.CacheError, match=r"function \(then"):
                loader.replace(fn=lambda item: item - 2)
            with pytest.raises(lp.CacheError, match="source"):
                loader.replace(source=range(11))
            # Uncached objects may differ.
            with loader.replace(
                augment=np.negative, batch_size=3, shuffle=True, seed=9, shard=lp.Shard(2, 0)
            ) as other:
                assert set(np.concatenate(read(other)).tolist()) < {-2 * item for item in range(10)}
                assert other.statistics().cache.misses == 0

    def test_damage_is_made_anew_and_told_once(self, on: Place, log: Log, tmp_path: Path) -> None:
        expected = reference(log)
        chosen = settings(cache=tmp_path / "c")
        with lp.Loader(range(ITEMS), decoder(log), **chosen, workers=0) as loader:
            read(loader)
        log.take()
        with open(tmp_path / "c" / FILE_NAME, "r+b") as file:
            whole = file.read()
            for item in (3, 30):
                name = b"n%d" % item
                file.seek(whole.index(bytes([len(name)]) + name) + 1)
                file.write(b"m")
        with lp.Loader(range(ITEMS), decoder(log), **chosen, **on(2)) as loader:
            with pytest.warns(
                lp.LoaderpoolWarning, match="[2-4] items that could not be read"
            ) as warned:
                first = [copied(batch) for batch in loader]
            assert [each.filename for each in warned] == [__file__]
            assert_same(first + read(loader, 2), expected)
            assert (
                2 <= loader.statistics().cache.damaged <= 4
            )  # two workers may need an item at the same time
        assert set(log.take()) == {3, 30}

    def test_a_store_deleted_under_a_run_costs_no_more_than_itself(
        self, on: Place, log: Log, tmp_path: Path
    ) -> None:
        expected = reference(log)
        with lp.Loader(
            range(ITEMS), decoder(log), **settings(cache=tmp_path / "c", **on(2))
        ) as loader:
            first = read(loader)
            for file in (tmp_path / "c").iterdir():
                file.unlink()
            assert_same(first + read(loader, 2), expected)


def test_memory_is_free_once_the_loader_is_closed_though_its_pool_lives(on: Place) -> None:
    # Earlier tests may free memory at any time, so growth would not be exact. The pool starts to
    # fill the cache when its loader is made, so `before` is read earlier.
    gc.collect()
    with lp.Loader(range(4), batch_size=2, **on(2)) as small:
        read(small)
        pids = os.getpid(), supervisor_of(small)
        before = shared_bytes(*pids)
    chosen = {"batch_size": 5, "augment": np.sum, "cache": "memory", **on(2)}
    with lp.Loader(range(20), lambda item: np.full(100_000, item, np.float64), **chosen) as loader:
        read(loader, 2)
        assert loader.statistics().cache.bytes > 15_000_000
        full = shared_bytes(*pids)
    most = min(before + 2_000_000, full - 14_000_000)
    deadline_s = time.monotonic() + 5.0
    while shared_bytes(*pids) > most and time.monotonic() < deadline_s:
        with lp.Loader(
            range(4), batch_size=2, **on(2)
        ) as other:  # receives the message that the loader was unloaded
            read(other)
    assert shared_bytes(*pids) <= most


def test_the_settings_of_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lp.Cache("memory").in_memory and not lp.Cache("./memory").in_memory
    assert not lp.Cache(Path("memory")).in_memory
    assert lp.Cache("here").where == str(tmp_path / "here")
    assert lp.Cache("here", "1GiB").max_bytes == 1 << 30
    assert lp.Cache("here") == lp.Cache(tmp_path / "here")
