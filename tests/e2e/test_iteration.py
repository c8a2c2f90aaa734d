"""Every kind of pass gives whole epochs of whole batches: shapes, dtypes, structures, and several
iterators at once.
"""

from __future__ import annotations

import collections
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, copied, indices_in, read
from tests.support.samples import Point, fail_at

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def made(rows: list[Any]) -> Any:
    """Return the batch of these samples, stacked by NumPy in their nested structure."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: made([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        parts = [made([row[at] for row in rows]) for at in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, (str, bytes)) or getattr(first, "dtype", None) == np.dtype(object):
        out = np.empty((len(rows), *np.shape(first)), object)
        for at, row in enumerate(rows):
            out[at] = row
        return out
    return np.stack([np.asarray(row) for row in rows])


def expected_batches(fn: Any, size: int, batch_size: int) -> list[Any]:
    rows = [copied_row(fn(index)) for index in range(size)]
    return [made(rows[start : start + batch_size]) for start in range(0, size, batch_size)]


def copied_row(row: Any) -> Any:
    return row.copy() if isinstance(row, np.ndarray) else row


# ---- several passes at once ----


class Stream:
    """A stream that a process reads, or a thread, because a lock cannot be pickled."""

    lock: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(range(2000))  # more items than are read ahead before the first batch


class ReadHere(Stream):
    def __init__(self) -> None:
        self.lock = threading.Lock()


SIDE_BY_SIDE: dict[str, Callable[..., lp.Loader]] = {
    "items": lambda **how: lp.Loader(range(2000), **how),
    "stream": lambda **how: lp.Loader(Stream(), **how),
    "stream read here": lambda **how: lp.Loader(ReadHere(), **how),
    "generators": lambda **how: lp.Loader.from_generator(
        lambda shard: range(shard, shard + 500), shards=range(0, 2000, 500), cycle_length=1, **how
    ),
}


@WORKERS
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_two_iterators_go_side_by_side(on: Place, workers: int, kind: str) -> None:
    loader = SIDE_BY_SIDE[kind](batch_size=4, **on(workers))
    pairs = list(zip(loader, loader, strict=True))
    assert (
        indices_in(left for left, _ in pairs)
        == indices_in(right for _, right in pairs)
        == list(range(2000))
    )
    loader.close()


@WORKERS
def test_a_broken_off_pass_leaves_the_next_one_whole(on: Place, workers: int) -> None:
    loader = lp.Loader(range(200), batch_size=3, **on(workers))
    for stop_after in (0, 1, 2, 5, 20, 66):
        for at, batch in enumerate(loader):
            assert batch[0] == 3 * at
            if at == stop_after:
                break
        if stop_after % 2:
            assert indices_in(loader) == list(range(200))


def test_passes_that_end_in_errors_keep_no_slot(on: Place) -> None:
    def fail(index: int) -> Any:
        return np.full(1000, fail_at(range(8, 64))(index))

    loader = lp.Loader(range(64), fail, batch_size=2, limits=lp.Limits(memory="128KiB"), **on(3))
    for _ in range(40):
        with pytest.raises(ValueError, match="is bad"):
            read(loader)
    assert len(read(batch for _, batch in zip(range(4), loader, strict=False))) == 4


@WORKERS
def test_loaders_and_passes_in_threads(on: Place, workers: int) -> None:
    def add_noise(item: Any, rng: np.random.Generator) -> Any:
        return item, rng.random(), np.random.rand()

    shared = lp.Loader(range(120), add_noise, batch_size=5, **on(workers))
    reference = read(lp.Loader(range(120), add_noise, batch_size=5, workers=0), passes=1)
    results: dict[int, Any] = {}

    def consume(number: int) -> None:
        own = lp.Loader(range(number, number + 90), batch_size=4, **on(workers))
        shared_batches = iter(shared)
        results[number] = [
            indices_in(own),
            [copied(batch) for batch in shared_batches],
            shared_batches.epoch,
        ]

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(5)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads interrupt each other often
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert sorted(results) == list(range(5))
    assert sorted(epoch for _, _, epoch in results.values()) == list(range(5))
    for number, (own, batches, epoch) in results.items():
        assert own == list(range(number, number + 90))
        assert [batch[0].tolist() for batch in batches] == [
            batch[0].tolist() for batch in reference
        ]
        if epoch == 0:
            assert_same(batches, reference)


# ---- kinds of samples ----


def nested(index: int) -> Any:
    return {
        "point": Point(np.float32(index), np.full(2, index)),
        "pair": (np.array([index], np.uint8), {"text": f"n{index}"}),
        3: index,
    }


SAMPLES: dict[str, Any] = {
    "int": lambda index: index,
    "float": lambda index: index / 3,
    "floats that are no numbers": lambda index: np.array(
        [0x7FC00001, 0xFFC12345, index], np.uint32
    ).view(np.float32),
    "bool": lambda index: index % 3 == 0,
    "complex": lambda index: complex(index, -index),
    "str": lambda index: "é\0x" * index,
    "bytes": lambda index: b"\0\xff" * index,
    "huge text": lambda index: "ü" * (200_000 if index == 3 else 1),
    "text array": lambda index: np.array([str(index), "", "日本"], object),
    "scalar array": lambda index: np.array(index, np.int16),
    "no elements": lambda index: np.empty((2, 0, 3), np.float32),
    "nested": nested,
    "namedtuple": lambda index: Point(index, np.ones((2, 2)) * index),
    "list": lambda index: [[index, 1], [2, index]],
    "Fortran order": lambda index: np.asfortranarray(np.arange(12.0).reshape(3, 4) + index),
    "strided": lambda index: (np.arange(24) + index).reshape(4, 6)[::2, 1::2],
    "reversed": lambda index: (np.arange(5) + index)[::-1],
    "broadcast": lambda index: np.broadcast_to(np.float32(index), (3, 2)),
    "read-only": lambda index: np.frombuffer(bytes([index % 256] * 4), np.uint8),
    "large rows": lambda index: np.full((64, 64, 3), index, np.float32),
}


@WORKERS
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_every_kind_are_stacked_unchanged(on: Place, name: str, workers: int) -> None:
    fn = SAMPLES[name]
    assert_same(
        read(lp.Loader(range(23), fn, batch_size=5, **on(workers))), expected_batches(fn, 23, 5)
    )


DTYPES = [np.dtype(code) for code in "?bBhHiIqQefdFD"] + [
    np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3b11fnuz",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    )
]


@WORKERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_as_it_is(on: Place, dtype: np.dtype[Any], workers: int) -> None:
    def fn(index: int) -> Any:
        return {
            "array": np.arange(index, index + 6).reshape(2, 3).astype(dtype),
            "scalar": dtype.type(index % 2),
            "special": np.array([np.nan, -0.0, np.inf]).astype(np.float16).view(np.uint16),
        }

    assert_same(
        read(lp.Loader(range(11), fn, batch_size=4, **on(workers))), expected_batches(fn, 11, 4)
    )


# ---- functions that reuse a buffer ----


class _Buffers:
    """Functions that return memory which the next call overwrites."""

    def __init__(self) -> None:
        self.array = np.empty(5, np.float64)
        self.large = np.empty((20, 5), np.float64)
        self.turns = [np.empty(5, np.float64) for _ in range(3)]
        self.bytes = bytearray(40)
        self.text = np.empty(5, object)
        self.calls = -1

    def same_array(self, index: int) -> Any:
        self.array[:] = index
        return self.array

    def view(self, index: int) -> Any:
        self.large[:] = index
        return self.large[2]

    def in_turn(self, index: int) -> Any:
        self.calls += 1
        array = self.turns[self.calls % 3]
        array[:] = index
        return array

    def chunk(self, index: int) -> Any:
        if index // 10 != self.calls:  # another chunk takes the place of the last one
            self.calls = index // 10
            self.large[:10] = np.arange(10 * self.calls, 10 * self.calls + 10)[:, None]
        return self.large[index % 10]

    def chunk_of_torch(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.chunk(index))

    def from_bytes(self, index: int) -> Any:
        self.bytes[:] = np.full(5, float(index)).tobytes()
        return np.frombuffer(self.bytes, np.float64)

    def by_protocol(self, index: int) -> Any:
        self.array[:] = index
        buffer = self.array

        class Tensor:
            def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
                return buffer

        return Tensor()

    def text_array(self, index: int) -> Any:
        self.text[:] = str(index)
        return self.text


@WORKERS
@pytest.mark.parametrize(
    "form", ["fixed", "padded", "ragged", "replaced", "elements", "given None"]
)
@pytest.mark.parametrize(
    "method",
    ["same_array", "view", "in_turn", "chunk", "chunk_of_torch", "from_bytes", "by_protocol"],
)
def test_a_buffer_that_the_function_fills_again_never_gives_a_wrong_batch(
    on: Place, method: str, form: str, workers: int
) -> None:
    settings: dict[str, Any] = {
        "fixed": {},
        "padded": {"pad": True},
        "ragged": {"ragged": True},
        "replaced": {"on_error": "replace"},
        "elements": {"batch_size": None},
        "given None": {"element_spec": lp.ArraySpec((None, None), np.float64)},
    }[form]
    loader = lp.Loader(
        range(300), getattr(_Buffers(), method), **{"batch_size": 4, **settings}, **on(workers)
    )
    values = [batch.values if form == "ragged" else batch for batch in read(loader)]
    rows = np.concatenate(values).reshape(-1, 5)
    assert rows.tolist() == [[float(index)] * 5 for index in range(300)]


@WORKERS
@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_array_of_text_that_is_filled_again_never_gives_a_wrong_batch(
    on: Place, batch_size: int, workers: int
) -> None:
    batches = read(
        lp.Loader(range(100), _Buffers().text_array, batch_size=batch_size, **on(workers))
    )
    assert np.concatenate(batches).tolist() == [[str(index)] * 5 for index in range(100)]


@WORKERS
@pytest.mark.parametrize(
    "settings", [{}, {"on_error": "replace"}, {"limits": lp.Limits(timeout_s=60)}], ids=str
)
def test_a_dict_that_the_function_fills_again_never_gives_a_wrong_batch(
    on: Place, settings: dict[str, Any], workers: int
) -> None:
    outer: dict[str, Any] = {"inner": {}}

    def fill(index: int) -> Any:
        outer["x"] = index
        outer["inner"]["y"] = float(index)
        return outer

    batches = read(lp.Loader(range(100), fill, batch_size=4, **settings, **on(workers)))
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(100))
    assert np.concatenate([batch["inner"]["y"] for batch in batches]).tolist() == list(range(100))


@WORKERS
def test_a_batch_fn_may_fill_one_buffer_again(on: Place, workers: int) -> None:
    buffer = np.empty((4, 3))

    def fill(items: list[int]) -> Any:
        buffer[: len(items)] = np.array(items)[:, None]
        return buffer[: len(items)]

    batches = read(lp.Loader(range(201), batch_fn=fill, batch_size=4, **on(workers)))
    assert np.concatenate(batches)[:, 0].tolist() == list(range(201))


# ---- shapes that vary ----


@WORKERS
def test_axes_that_a_given_spec_leaves_open_may_vary_from_batch_to_batch(
    on: Place, workers: int
) -> None:
    def by_batch(index: int) -> Any:
        return np.full((2, 1 + index // 4), index, np.float32)

    spec = lp.ArraySpec((None, 2, None), np.float32)
    batches = read(lp.Loader(range(40), by_batch, batch_size=4, element_spec=spec, **on(workers)))
    assert [batch.shape for batch in batches] == [(4, 2, 1 + number) for number in range(10)]
    assert [batch[0, 0, 0] for batch in batches] == list(range(0, 40, 4))


@WORKERS
def test_batches_without_rows_arrive(on: Place, workers: int) -> None:
    def element(index: int) -> Any:
        return np.empty((0 if index % 2 else 2, 3)), np.empty(0, "U3") if index % 2 else np.array(
            ["a", "b"]
        )

    batches = read(lp.Loader(range(9), element, batch_size=None, **on(workers)))
    assert [batch[0].shape for batch in batches] == [
        (0 if index % 2 else 2, 3) for index in range(9)
    ]
    assert [batch[1].tolist() for batch in batches] == [
        [] if index % 2 else ["a", "b"] for index in range(9)
    ]


@WORKERS
def test_batches_that_outgrow_their_slot_arrive_whole(on: Place, workers: int) -> None:
    def grow(index: int) -> Any:
        size = 10 ** (index // 50) * 7
        return np.full(size, index, np.int32), "t" * size

    loader = lp.Loader(range(200), grow, batch_size=2, ragged=True, **on(workers))
    rounds = 2
    for _ in range(rounds):
        for number, (ragged, text) in enumerate(loader):
            for row in range(2):
                array, string = grow(2 * number + row)
                assert np.array_equal(ragged[row], array) and text[row] == string
    statistics = loader.statistics()
    assert statistics.batches == 100 * rounds
    if workers:
        assert statistics.memory.batches_oversize >= 1
        # The slots became larger, so some of the large batches fit into them.
        assert statistics.memory.batches_oversize < 70 * rounds
        assert statistics.memory.buffer_bytes > 2 * 7 * 10**3 * 4


# ---- tickets of many batches ----


def test_tiny_batches_come_several_at_a_time_and_are_the_same(on: Place) -> None:
    loader = lp.Loader(
        range(4001), lambda index: np.full(4, index, np.float32), batch_size=4, **on(2)
    )
    kept: collections.deque[Any] = collections.deque(maxlen=40)
    together = []
    for batch in loader:
        kept.append(batch)
        together.append(len(kept) / loader.statistics().memory.buffers_in_use)
    assert len(together) == 1001 and max(together) > 4
    assert [int(batch[0, 0]) for batch in kept] == list(range(4001 - 157, 4001, 4))
    del kept, batch
    assert [batch[0, 0] for batch in loader] == list(range(0, 4001, 4))
    assert [len(batch) for batch in loader] == [4] * 1000 + [1]


# ---- the parameter `out`, `setup`, and old objects ----


@WORKERS
@pytest.mark.parametrize("form", ["fixed", "replaced", "ragged"])
def test_a_function_may_ignore_the_out_that_it_takes(on: Place, workers: int, form: str) -> None:
    settings: dict[str, Any] = {
        "fixed": {},
        "replaced": {"on_error": "replace"},
        "ragged": {"ragged": True},
    }[form]
    loader = lp.Loader(
        range(9), lambda index, out: np.full(3, index), batch_size=4, **settings, **on(workers)
    )
    values = [batch.values if form == "ragged" else batch for batch in read(loader)]
    assert np.concatenate(values).reshape(9, 3)[:, 0].tolist() == list(range(9))


@WORKERS
def test_setup_runs_once_in_each_worker_before_any_sample(on: Place, workers: int) -> None:
    state: dict[str, int] = {"setups": 0}

    def set_up() -> None:
        state["setups"] += 1

    loader = lp.Loader(
        range(60), lambda index: state["setups"], batch_size=4, setup=set_up, **on(workers)
    )
    for _ in range(2):
        assert set(indices_in(loader)) == {1}


@pytest.mark.parametrize("workers", [1, 2])
def test_later_changes_of_captured_objects_are_seen(on: Place, workers: int) -> None:
    items, offset = [1, 2, 3, 4], {"value": 10}
    array = np.arange(100_000)
    loader = lp.Loader(
        items, lambda item: item + offset["value"] + int(array[item]), batch_size=2, **on(workers)
    )
    items[0], offset["value"] = 100, 0
    array[:] = 0
    for _ in range(2):
        assert indices_in(loader) == [100, 2, 3, 4]
        gc.collect()
