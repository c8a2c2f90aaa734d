"""Every kind of batch has the bits that this process makes, at any speed, with threads and
without.
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read, read_while
from tests.support.samples import Stream

THREADS = 4


def jitter(index: int) -> None:
    """Wait, so that samples end in another order than they started."""
    time.sleep(0.001 * (index * 7 % 5))


def fixed(index: int, rng: np.random.Generator) -> Any:
    jitter(index)
    return {"index": index, "noise": rng.standard_normal((2, 3), np.float32)}


def tiny(index: int) -> Any:
    return np.full(3, index, np.float32)


def of_any_length(index: int, rng: np.random.Generator) -> Any:
    jitter(index)
    return rng.integers(0, 255, size=int(rng.integers(1, 9)), dtype=np.uint8)


def text(index: int, rng: np.random.Generator) -> Any:
    jitter(index)
    return {"name": "é\0" * int(rng.integers(0, 5)), "raw": rng.bytes(int(rng.integers(0, 40)))}


def failing(index: int, rng: np.random.Generator) -> Any:
    jitter(index)
    noise = rng.random()
    if index % 5 == 2:
        raise ValueError("bad")
    return index, noise


def into_out(index: int, rng: np.random.Generator, out: Any = None) -> Any:
    jitter(index)
    out = np.empty(5, np.float64) if out is None else out
    rng.standard_normal(out=out)
    return out


def whole(items: list[int], rng: np.random.Generator) -> Any:
    jitter(items[0])
    return np.array(items), rng.random(len(items))


def reads_late(index: int, rng: np.random.Generator) -> Any:
    jitter(index)
    return rng.random((index % 3 + 1, 2))


class Items:
    """A source whose reads wait."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> int:
        jitter(index)
        return index + 100


KINDS: dict[str, dict[str, Any]] = {
    "fixed rows": {"fn": fixed},
    "tiny rows": {"fn": tiny, "size": 3000},
    "more rows than threads": {"fn": fixed, "batch_size": 50},
    "shuffled": {"fn": fixed, "shuffle": True},
    "padded": {"fn": of_any_length, "pad": True},
    "ragged": {"fn": of_any_length, "ragged": True},
    "text": {"fn": text},
    "skip": {"fn": failing, "on_error": "skip"},
    "replace": {"fn": failing, "on_error": ("replace", 100)},
    "out": {"fn": into_out},
    "batch_fn": {"batch_fn": whole},
    "elements": {"fn": reads_late, "batch_size": None},
    "augment": {"fn": tiny, "augment": lambda sample, rng: sample + rng.random(3, np.float32)},
    "a source that waits": {"source": Items()},
    "by length": {"fn": fixed, "buckets": lp.Buckets([index % 7 for index in range(61)], [3, 5], [8, 4, 2])},
    "shards": {"fn": fixed, "shard": lp.Shard(3, 1)},
    "a stream": {"fn": fixed, "source": Stream(), "shuffle": 10},
}  # fmt: skip


def arguments(kind: str) -> dict[str, Any]:
    given = {"batch_size": 8, "seed": 11, **KINDS[kind]}
    given.setdefault("source", range(given.pop("size", 61)))
    return given


@pytest.mark.parametrize(
    "where", [{"threads": THREADS}, {"limits": lp.Limits(memory="64KiB")}], ids=["threads", "none"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_no_workers(on: Place, kind: str, where: dict[str, Any]) -> None:
    with lp.Loader(**arguments(kind), workers=0) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(**arguments(kind), **on(2), **where) as loader:
        assert_same(read(loader, passes=2), expected)
        assert loader.statistics().restarts == 0


def test_a_resize_and_a_state_that_goes_on_with_other_threads_change_no_bit(on: Place) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    with lp.Loader(range(161), fixed, workers=0, **settings) as loader:
        expected = read(loader)
    with lp.Loader(range(161), fixed, workers=1, threads=THREADS, **settings) as loader:
        batches = iter(loader)
        made = read(next(batches) for _ in range(5))
        state = batches.state_dict()
        loader.resize(3)
        assert_same(made + read_while(batches, {10: lambda: loader.resize(1)}), expected)
    with lp.Loader(range(161), fixed, **on(2), threads=2, **settings) as loader:
        loader.load_state_dict(state)
        assert_same(made + read(loader), expected)


@pytest.mark.parametrize("kind", ["fixed rows", "skip", "elements"])
def test_without_an_order_each_batch_comes_once(on: Place, kind: str) -> None:
    def as_text(batch: Any) -> str:
        parts = (
            batch.values()
            if isinstance(batch, dict)
            else batch
            if isinstance(batch, tuple)
            else [batch]
        )
        return repr([part.tolist() for part in parts])

    with lp.Loader(**arguments(kind), workers=0) as loader:
        expected = sorted(as_text(batch) for batch in read(loader))
    with lp.Loader(**arguments(kind), **on(2), threads=THREADS, deterministic=False) as loader:
        assert sorted(as_text(batch) for batch in read(loader)) == expected


def test_a_sequence_is_asked_for_several_batches_at_once() -> None:
    class Batches:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return np.full(3, index), np.full(1, threading.get_ident())

    with lp.Loader.from_sequence(Batches(), workers=1, threads=3) as loader:
        batches = read(loader)
    assert [numbers[0] for numbers, _ in batches] == list(range(9))
    assert len({int(thread[0]) for _, thread in batches}) > 1


def test_samples_wait_at_the_same_time() -> None:
    def fn(index: int) -> Any:
        begun = time.monotonic()
        time.sleep(0.05)
        return os.getpid(), begun, time.monotonic()

    with lp.Loader(range(64), fn, batch_size=4, workers=2, threads=8) as loader:
        spans = [
            row for batch in loader for row in zip(*(part.tolist() for part in batch), strict=True)
        ]
    for worker in {pid for pid, _, _ in spans}:
        mine = [(begun, ended) for pid, begun, ended in spans if pid == worker]
        most = max(sum(begun <= at < ended for begun, ended in mine) for at, _ in mine)
        assert 5 <= most <= 8, "batches of 4 alone would not keep 8 threads busy"


def test_random_draws_of_a_few_samples_are_refused_before_their_batch() -> None:
    def fn(index: int) -> Any:
        return index, random.random() if index == 21 else 0.5

    delivered = []
    with (
        lp.Loader(range(64), fn, batch_size=4, workers=1, threads=2) as loader,
        pytest.raises(lp.ArgumentError, match=r"threads=2.*parameter `rng`"),
    ):
        for batch in loader:
            delivered += batch[0].tolist()
    assert delivered == list(range(len(delivered)))
    assert len(delivered) <= 20


# ---- arguments ----


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"threads": True}, "threads must be"),
        ({"seed_globals": True}, "(?s)seed_globals.*rng"),
        ({"cache": "memory"}, "cache and threads=2 cannot be combined"),
    ],
)
def test_what_goes_with_no_threads_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(lp.ArgumentError, match=text):
        lp.Loader(range(8), tiny, workers=0, **{"threads": 2, **settings})
    with pytest.raises(lp.ArgumentError, match=r"threads=2.*workers"):
        lp.Loader.from_generator(lambda: iter(range(5)), workers=1, threads=2)


def test_no_workers_have_no_threads() -> None:
    def fn(index: int) -> Any:
        return threading.current_thread() is threading.main_thread(), random.random()

    with lp.Loader(range(9), fn, workers=0, threads=4) as loader:
        assert all(batch[0].all() for batch in loader)
