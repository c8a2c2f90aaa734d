"""Sources with `__getitems__`: the calls that they get, and the rows that come from them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import SampleError, SourceError, SpecMismatchError
from loaderpool.sources.many_rows import MOST_ROWS
from tests.support.batches import Place, assert_same, indices_in, read
from tests.support.processes import wait_until

WORKERS = (0, 1, 3)


class Table:
    """A source whose row i is the number i. Each call adds its indices to a log file, as a line."""

    def __init__(self, log: Path, size: int, pause_s: float = 0.0) -> None:
        self.log, self.size, self.pause_s = log, size, pause_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was read by itself")

    def __getitems__(self, indices: list[int]) -> Any:
        with self.log.open("a") as file:
            file.write(f"{indices}\n")
        time.sleep(self.pause_s)
        return [self.row(index) for index in indices]

    def row(self, index: int) -> Any:
        return np.float64(index)

    def calls(self) -> list[str]:
        """Return the calls for several rows, which excludes the first sample. Clears the log."""
        lines = self.log.read_text().splitlines()
        self.log.unlink()
        return [line for line in lines if "," in line]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("size", "batch_size"), [(1003, 700), (401, 3), (300, 64)])
def test_the_plan_alone_decides_the_calls(
    tmp_path: Path, on: Place, workers: int, size: int, batch_size: int
) -> None:
    with lp.Loader(
        range(size), np.float64, batch_size=batch_size, shuffle=True, workers=0
    ) as loader:
        expected = [read(loader) for _ in range(3)]
    calls = [
        [
            str([*map(int, batch[at : at + MOST_ROWS])])
            for batch in batches
            for at in range(0, len(batch), MOST_ROWS)
        ]
        for batches in expected
    ]
    table = Table(tmp_path / "log", size)
    with lp.Loader(table, batch_size=batch_size, shuffle=True, **on(workers)) as loader:
        assert_same([read(loader) for _ in range(2)], expected[:2])
        made = table.calls()
    # batches of the next epoch may be prefetched
    assert sorted({*made} - {*calls[2]}) == sorted(calls[0] + calls[1])
    assert len({*made}) == len(made)


def test_slow_batches_are_split_at_fixed_rows(tmp_path: Path, on: Place) -> None:
    size = 3 * MOST_ROWS + 5
    table = Table(tmp_path / "log", 2 * size, pause_s=0.15)
    with lp.Loader(table, batch_size=size, **on(3)) as loader:
        assert indices_in(read(loader, 2)) == [*range(2 * size)] * 2
    calls = [eval(line) for line in table.calls()]
    assert {call[0] % size for call in calls} == {0, MOST_ROWS, 2 * MOST_ROWS, 3 * MOST_ROWS}
    assert {len(call) for call in calls} == {MOST_ROWS, 5}


class Random(Table):
    """A source that draws a random number for each row of a call, with one draw for all rows."""

    def __init__(self, log: Path, size: int, own: bool) -> None:
        super().__init__(log, size)
        self.own = np.random.default_rng(1) if own else None

    def __getitems__(self, indices: list[int]) -> Any:
        super().__getitems__(indices)
        draws = (np.random if self.own is None else self.own).random(len(indices))
        return [np.array([index, noise]) for index, noise in zip(indices, draws, strict=True)]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("batch_fn", [None, np.stack])
def test_random_rows_are_equal_with_any_workers(
    tmp_path: Path, on: Place, own: bool, batch_fn: Any
) -> None:
    found = []
    for workers in WORKERS:
        table = Random(tmp_path / "log", 600, own)
        with lp.Loader(
            table, batch_fn=batch_fn, batch_size=290, shuffle=True, **on(workers)
        ) as loader:
            found.append(read(loader, 2))
    noise = np.concatenate(found[0])[:, 1]
    assert len(set(noise.tolist())) == len(noise)
    for each in found[1:]:
        assert_same(each, found[0])


def add_noise(item: Any, rng: np.random.Generator) -> Any:
    return item, rng.random()


def test_functions_draw_the_same_numbers_with_any_source(tmp_path: Path, on: Place) -> None:
    with lp.Loader(range(50), add_noise, batch_size=8, shuffle=True, workers=0) as loader:
        expected = np.concatenate([noise for _, noise in loader])
    for workers in WORKERS:
        table = Random(tmp_path / "log", 50, own=True)
        with lp.Loader(table, add_noise, batch_size=8, shuffle=True, **on(workers)) as loader:
            assert np.concatenate([noise for _, noise in loader]).tolist() == expected.tolist()


class BadRow(Table):
    """A source whose row 13 raises, both alone and in a call with other rows."""

    def row(self, index: int) -> Any:
        if index == 13:
            raise ZeroDivisionError("row 13")
        return super().row(index)


async def later(item: Any) -> Any:
    return item


MANY_CALLS: list[dict[str, Any]] = [
    {},
    {"fn": float},
    {"fn": float, "threads": 4},
    {"fn": later, "threads": 4},
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", MANY_CALLS)
def test_an_unreadable_row_is_found(
    tmp_path: Path, on: Place, workers: int, how: dict[str, Any]
) -> None:
    table, more = BadRow(tmp_path / "log", 30), {"batch_size": 10, **how, **on(workers)}
    with lp.Loader(table, **more) as loader, pytest.raises(SampleError) as raised:
        read(loader)
    assert isinstance(raised.value, ZeroDivisionError) and raised.value.index == 13
    with lp.Loader(table, on_error="skip", **more) as loader:
        assert indices_in(read(loader)) == [*range(13), *range(14, 30)]
    with lp.Loader(table, on_error="replace", **more) as loader:
        assert indices_in(read(loader)) == [*range(13), 14, *range(14, 30)]


def test_an_error_of_batch_fn_names_the_row(tmp_path: Path, on: Place) -> None:
    with (
        lp.Loader(
            BadRow(tmp_path / "log", 30), batch_fn=np.stack, batch_size=10, **on(2)
        ) as loader,
        pytest.raises(SampleError, match=r"source\[13\]"),
    ):
        read(loader)


class Stopping(Table):
    """A source whose row 13 raises StopIteration."""

    def row(self, index: int) -> Any:
        return next(iter([]) if index == 13 else iter([super().row(index)]))


def test_row_that_raises_stop_iteration_is_not_missing(tmp_path: Path, on: Place) -> None:
    with (
        lp.Loader(
            Stopping(tmp_path / "log", 30), batch_fn=np.stack, batch_size=10, **on(2)
        ) as loader,
        pytest.raises(SampleError, match="StopIteration"),
    ):
        read(loader)


class OnlySingleRows(Table):
    """A source that raises in each call for several rows."""

    def __getitems__(self, indices: list[int]) -> Any:
        if len(indices) > 1:
            raise OSError("too many rows")
        return super().__getitems__(indices)


def test_a_failed_call_is_repeated_row_by_row(tmp_path: Path, on: Place) -> None:
    with lp.Loader(OnlySingleRows(tmp_path / "log", 30), batch_size=10, **on(2)) as loader:
        assert indices_in(read(loader)) == [*range(30)]


class Deadly(Table):
    """A source whose row 13 ends the process, or hangs."""

    def __init__(self, log: Path, size: int, hangs: bool) -> None:
        super().__init__(log, size)
        self.hangs = hangs

    def row(self, index: int) -> Any:
        if index == 13:
            if self.hangs:
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().row(index)


@pytest.mark.parametrize(("hangs", "threads"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_only_the_row_that_ends_its_worker_is_skipped(
    tmp_path: Path, hangs: bool, threads: int
) -> None:
    with lp.Loader(
        Deadly(tmp_path / "log", 30, hangs),
        np.float64,
        batch_size=10,
        workers=1,
        threads=threads,
        on_error="skip",
        limits=lp.Limits(timeout_s=0.5 if hangs else None),
    ) as loader:
        for _ in range(2):
            assert indices_in(read(loader)) == [*range(13), *range(14, 30)]


def test_the_error_of_a_timeout_names_the_read(tmp_path: Path) -> None:
    with (
        lp.Loader(
            Deadly(tmp_path / "log", 30, hangs=True),
            batch_size=10,
            workers=1,
            limits=lp.Limits(timeout_s=0.3),
        ) as loader,
        pytest.raises(SampleError, match="read of 10 rows from there on"),
    ):
        read(loader)


def slow(item: Any) -> Any:
    time.sleep(0.4)
    return item


async def slow_async(item: Any) -> Any:
    await asyncio.sleep(0.4)
    return item


@pytest.mark.parametrize(("fn", "threads"), [(slow, 1), (slow_async, 1), (slow_async, 4)])
def test_the_read_and_each_call_have_their_own_limit(tmp_path: Path, fn: Any, threads: int) -> None:
    with lp.Loader(
        Table(tmp_path / "log", 8, pause_s=0.4),
        fn,
        batch_size=2,
        workers=1,
        threads=threads,
        limits=lp.Limits(timeout_s=0.7),
    ) as loader:
        assert indices_in(read(loader)) == [*range(8)]


class FixedResult(Table):
    """A source that returns `result` for several rows, whatever their number."""

    def __init__(self, log: Path, result: Any) -> None:
        super().__init__(log, 12)
        self.result = result

    def __getitems__(self, indices: list[int]) -> Any:
        return self.result if len(indices) > 1 else [np.float64(indices[0])]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", MANY_CALLS)
@pytest.mark.parametrize(
    ("result", "got"),
    [([1.0, 2.0], "2 items for 4 rows"), ({"x": [1.0] * 4}, "a dict for 4 rows")],
)
def test_a_wrong_result_of_getitems_is_an_error(
    tmp_path: Path, on: Place, workers: int, how: dict[str, Any], result: Any, got: str
) -> None:
    for on_error in ("raise", "skip"):
        with (
            lp.Loader(
                FixedResult(tmp_path / "log", result),
                batch_size=4,
                on_error=on_error,
                **how,
                **on(workers),
            ) as loader,
            pytest.raises(SourceError, match=f"must return a list .* returned {got}"),
        ):
            read(loader)


@pytest.mark.parametrize("result", [np.arange(4.0), (0.0, 1.0, 2.0, 3.0)])
def test_the_result_may_be_an_array_or_tuple(tmp_path: Path, result: Any) -> None:
    with lp.Loader(FixedResult(tmp_path / "log", result), batch_size=4, workers=0) as loader:
        assert indices_in(read(loader)) == [0, 1, 2, 3] * 3


class Refilled(Table):
    """A source whose calls all write into the same memory."""

    memory = np.empty((MOST_ROWS, 1))

    def __getitems__(self, indices: list[int]) -> Any:
        self.memory[: len(indices)] = np.array(indices)[:, np.newaxis]
        return list(self.memory[: len(indices)])


@pytest.mark.parametrize("workers", [0, 1])
def test_each_call_may_write_into_the_same_memory(tmp_path: Path, on: Place, workers: int) -> None:
    table = Refilled(tmp_path / "log", 30_000)
    with lp.Loader(table, batch_size=50, **on(workers)) as loader:
        assert indices_in(read(loader)) == [*range(30_000)]


class RefilledAndBad(Refilled):
    """The same source, except that a call with row 13 raises."""

    def __getitems__(self, indices: list[int]) -> Any:
        if 13 in indices:
            raise ZeroDivisionError("row 13")
        return super().__getitems__(indices)


def test_rows_that_are_read_alone_may_be_in_the_same_memory(tmp_path: Path, on: Place) -> None:
    table = RefilledAndBad(tmp_path / "log", 30)
    with lp.Loader(table, batch_size=10, on_error="skip", **on(1)) as loader:
        assert indices_in(read(loader)) == [*range(13), *range(14, 30)]


@pytest.mark.parametrize("workers", [0, 1])
def test_function_with_a_generator_may_refill_its_result(
    tmp_path: Path, on: Place, workers: int
) -> None:
    result = np.empty(1)

    def fill(item: Any, rng: np.random.Generator) -> Any:
        result[:] = item
        return result

    with lp.Loader(Table(tmp_path / "log", 5_000), fill, batch_size=50, **on(workers)) as loader:
        assert indices_in(read(loader)) == [*range(5_000)]


@pytest.mark.parametrize("fn", [float, later])
def test_only_uncached_rows_are_read(tmp_path: Path, on: Place, fn: Any) -> None:
    table, more = Table(tmp_path / "log", 12), {"batch_size": 4, "cache": tmp_path / "cache"}
    with lp.Loader(table, fn, **more, **on(0)) as loader:
        next(iter(loader))
        assert table.calls() == ["[1, 2, 3]"]  # row 0 is the first sample, which is cached
    with lp.Loader(table, fn, **more, shuffle=True, seed=5, **on(1)) as loader:
        assert sorted(indices_in(read(loader, 2))) == sorted([*range(12)] * 2)
        read_rows = [index for line in table.calls() for index in eval(line)]
        assert len(set(read_rows)) == len(read_rows) and not {0, 1, 2, 3} & {*read_rows}


@pytest.mark.parametrize("own", [False, True])
def test_replay_makes_the_same_row(tmp_path: Path, on: Place, own: bool) -> None:
    table = Random(tmp_path / "log", 600, own)
    with lp.Loader(table, add_noise, batch_size=290, shuffle=True, **on(2)) as loader:
        for rows, noise in loader:
            for at in (0, 3, 200, 261):
                if at < len(rows):
                    row, drawn = lp.replay(loader, int(rows[at, 0]))
                    assert row.tolist() == rows[at].tolist() and drawn == noise[at]


def test_replay_raises_the_error_of_the_row(tmp_path: Path) -> None:
    with (
        lp.Loader(BadRow(tmp_path / "log", 30), batch_size=10, workers=0) as loader,
        pytest.raises(ZeroDivisionError),
    ):
        lp.replay(loader, 13)


class Plain:
    """A source without `__getitems__`."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return np.float64(index)


class Wrapper(Plain):
    """A wrapper that passes on all attributes of its table, so also `__getitems__`."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


class Overridden(Table):
    """A subclass that overrides only `__getitem__`, so `__getitems__` may return other rows."""

    def __getitem__(self, index: int) -> Any:
        return np.float64(index)


class Disabled(Plain):
    """A source that disables `__getitems__`."""

    __getitems__ = None


def test_sources_without_useful_getitems_are_read_by_row(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    table = Table(tmp_path / "log", 20)
    sources = [
        Wrapper(table),
        Overridden(tmp_path / "log", 20),
        Disabled(),
        torch.utils.data.Subset(Plain(), range(20)),
        torch.utils.data.StackDataset(Plain(), Plain()),
    ]
    for source in sources:
        with lp.Loader(source, batch_size=5, workers=0) as loader:
            assert len(read(loader)) == 4
    assert not table.log.exists()
    subset = torch.utils.data.Subset(table, range(10, 20))
    with lp.Loader(subset, batch_size=5, workers=0) as loader:
        assert indices_in(read(loader)) == [*range(10, 20)]
    assert len(table.calls()) == 2


def test_without_batch_size_rows_are_read_singly() -> None:
    class Elements(Plain):
        def __getitems__(self, indices: list[int]) -> Any:
            raise AssertionError

    with lp.Loader(Elements(), batch_size=None, workers=0) as loader:
        assert indices_in(read(loader)) == [*range(20)]


class Counted(Table):
    """A source that notes how many of its calls ran at the same time."""

    running: list[int] = []  # one entry for each running call of this process

    def __getitems__(self, indices: list[int]) -> Any:
        self.running.append(1)
        rows = super().__getitems__(indices)
        self.log.with_name(f"most {len(self.running)}").touch()
        self.running.pop()
        return rows


def test_threads_read_several_batches_at_once(tmp_path: Path) -> None:
    table = Counted(tmp_path / "log", 400, pause_s=0.02)
    with lp.Loader(table, float, batch_size=20, workers=1, threads=4) as loader:
        assert indices_in(read(loader)) == [*range(400)]
    assert max(int(path.name[5:]) for path in tmp_path.glob("most *")) >= 3
    assert all(len(eval(line)) == 20 for line in table.calls())


def test_reads_are_not_counted_as_slow_calls(tmp_path: Path) -> None:
    def call(item: Any) -> Any:
        time.sleep(0.001)
        return item

    for threads in (1, 3):
        with lp.Loader(
            Table(tmp_path / "log", 400, pause_s=0.1),
            call,
            batch_size=50,
            workers=1,
            threads=threads,
        ) as loader:
            read(loader, 2)
            calls = loader.statistics().calls
            assert calls.slowest and calls.slowest[0].seconds < 0.08


class Tensors:
    """A source of tensors of PyTorch. Row `odd` has another shape or dtype, or a gradient."""

    def __init__(self, odd: Any = None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Any:
        import torch

        return [
            {
                "x": self.odd if index == 70 and self.odd is not None else torch.full((3,), index),
                "y": torch.tensor(index / 7),
            }
            for index in indices
        ]


@pytest.mark.parametrize("workers", WORKERS)
def test_tensors_of_one_call_are_stacked(on: Place, workers: int) -> None:
    pytest.importorskip("torch")
    with lp.Loader(Tensors(), batch_size=40, **on(workers)) as loader:
        batches = read(loader, 2)
    assert [batch["x"].shape for batch in batches] == [(40, 3), (40, 3), (20, 3)] * 2
    for name, expected in {"x": [*range(100)], "y": np.float32(np.arange(100) / 7)}.items():
        rows = np.concatenate(
            [batch[name].reshape(len(batch[name]), -1)[:, 0] for batch in batches]
        )
        assert np.array_equal(rows, [*expected, *expected])


def test_rows_of_a_tensor_dataset_are_read_together(on: Place) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import TensorDataset

    class Rows(TensorDataset):
        """Read row by row, because a subclass may do more than index its tensors."""

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)

    tensors = torch.arange(300).reshape(100, 3) / 7, torch.arange(100), torch.arange(100) % 2 == 0

    def double(item: Any, rng: np.random.Generator) -> Any:
        assert type(item) is tuple and {type(part) for part in item} == {torch.Tensor}
        item[0].mul_(2)  # changes no row of the dataset
        return (*item, rng.random())

    for fn in (None, double):
        found = []
        for kind in (Rows, TensorDataset):
            for workers in (0, 2):
                settings = {"batch_size": 40, "shuffle": True, **on(workers)}
                with lp.Loader(kind(*(each.clone() for each in tensors)), fn, **settings) as loader:
                    found.append(read(loader, 1 if fn else 2))
        for other in found[1:]:
            for batch, expected in zip(other, found[0], strict=True):
                for part, values in zip(batch, expected, strict=True):
                    assert part.dtype == values.dtype and np.array_equal(part, values)


def test_replaced_tensors_of_a_dataset_are_read() -> None:
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.zeros(10))
    for workers in (0, 2):
        with lp.Loader(dataset, batch_size=10, workers=workers) as loader:
            assert not any(part.any() for part in read(loader)[0])
            dataset.tensors = (torch.ones(10),)
            assert all(part.all() for part in read(loader)[0])
            dataset.tensors = (torch.zeros(10),)


@pytest.mark.parametrize("odd", ["shape", "smaller", "dtype", "gradient"])
def test_tensor_that_does_not_fit_its_batch_is_named(odd: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = {
        "shape": torch.zeros(4, dtype=torch.int64),
        "smaller": torch.zeros(2, dtype=torch.int64),
        "dtype": torch.zeros(3),
        "gradient": torch.zeros(3, requires_grad=True),
    }[odd]
    with (
        lp.Loader(Tensors(tensor), batch_size=40, workers=0) as loader,
        pytest.raises(SpecMismatchError, match="70"),
    ):
        read(loader)


ARRAYS = {
    "one": lambda path: np.arange(300.0).reshape(100, 3),
    "tuple": lambda path: (np.arange(300, dtype=np.uint8).reshape(100, 3), np.arange(100) % 2 == 0),
    "nested": lambda path: {"x": (np.arange(100.0), np.arange(100)), "y": np.ones((100, 2, 2))},
    "columns": lambda path: (np.arange(300.0).reshape(3, 100).T, np.arange(100)),
    "reversed": lambda path: (np.arange(300.0).reshape(100, 3)[::-1], np.arange(100)),
    "big-endian": lambda path: (np.arange(100, dtype=">i4"), np.arange(100)),
    "file": lambda path: (np.memmap(path, np.float32, "w+", shape=(100, 3)), np.arange(100)),
    "zipped": lambda path: lp.zip_sources(np.arange(100.0), {"y": np.arange(100)}),
    "list": lambda path: (np.arange(100.0), [*range(100)]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_in_memory_give_the_same_rows_as_items(
    kind: str, workers: int, tmp_path: Path, on: Place
) -> None:
    source = ARRAYS[kind](tmp_path / "array")
    if kind == "file":
        source[0][:] = np.arange(300).reshape(100, 3)
    found = []
    for fn in (None, lambda item: item):  # a function gets items, row by row
        with lp.Loader(source, fn, batch_size=40, shuffle=True, **on(workers)) as loader:
            found.append(read(loader, 2))
    assert_same(*found)


def test_arrays_in_another_order_than_the_spec_are_not_mixed_up() -> None:
    source = {"x": np.arange(100), "y": -np.arange(100)}
    spec = {name: lp.ArraySpec((None,), np.int64) for name in ("y", "x")}
    with lp.Loader(source, batch_size=40, element_spec=spec, workers=0) as loader:
        for batch in read(loader):
            assert np.array_equal(batch["y"], -batch["x"]) and batch["x"].min() >= 0


class OfTensors:
    """A dataset that returns a view of its tensor, made by a function of dataset and index."""

    def __init__(self, view: Any) -> None:
        self.torch = pytest.importorskip("torch")
        self.view, self.calls = view, 0
        self.flat = self.torch.arange(100 * 4, dtype=self.torch.float32)
        self.x = self.flat.view(100, 2, 2).clone()  # no view, but a tensor of its own

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.view(self, index)


ORDER = np.random.default_rng(0).permutation(100).repeat(2)  # each item twice in a row


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("view", [
    lambda dataset, index: dataset.x[index],
    lambda dataset, index: dataset.flat.view(100, 2, 2)[index],
    lambda dataset, index: dataset.x[99 - index],
    lambda dataset, index: dataset.x[index].T,
    lambda dataset, index: dataset.x[index : index + 1, 0].expand(2, 2),
    lambda dataset, index: dataset.x[index].view(dataset.torch.int32),
    lambda dataset, index: dataset.x.view(50, 2, 2, 2)[index % 50, 0],
    lambda dataset, index: dataset.x[index].clone(),
    lambda dataset, index: dataset.x[0].fill_(index),
], ids=["rows", "flat", "others", "turned", "expanded", "bits", "halves", "copies", "refilled"]
)  # fmt: skip
@pytest.mark.parametrize("order", [None, ORDER], ids=["once", "twice"])
def test_views_of_a_tensor_are_copied_before_they_change(
    view: Any, order: Any, workers: int, on: Place
) -> None:
    dataset = OfTensors(view)
    expected = [dataset[index].numpy().copy() for index in (range(100) if order is None else order)]
    settings = {"batch_size": 50, "order": order, **on(workers)}
    with lp.Loader(OfTensors(view), **settings) as loader:
        for _ in range(2):
            assert np.array_equal(np.concatenate(read(loader)), expected)


def test_two_calls_for_an_item_that_change_its_row_give_two_rows() -> None:
    dataset = OfTensors(lambda dataset, index: dataset.x[index].fill_(dataset.calls))
    with lp.Loader(dataset, batch_size=50, order=ORDER, workers=0) as loader:
        for _ in range(2):
            rows = np.concatenate(read(loader))
            assert np.array_equal(rows[1::2], rows[::2] + 1)


@pytest.mark.parametrize("odd", [
    lambda dataset: dataset.x[7].view(dataset.torch.int32),
    lambda dataset: dataset.x[7][:1],
], ids=["bits", "smaller"])  # fmt: skip
def test_view_of_a_tensor_that_does_not_fit_its_batch_is_named(odd: Any) -> None:
    dataset = OfTensors(
        lambda each, index: each.x[index] if index != 7 or each.calls < 20 else odd(each)
    )
    with (
        lp.Loader(dataset, batch_size=10, workers=0) as loader,
        pytest.raises(SpecMismatchError, match="source index 7"),
    ):
        read(loader, 2)


def with_former(dataset: Any, index: int) -> Any:
    dataset.x[index - 1].fill_(-1)
    return dataset.x[index].fill_(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("view", [
    lambda dataset, index: dataset.x.fill_(index)[index],
    lambda dataset, index: (np.float32(index), dataset.x.fill_(index)[index]),
    lambda dataset, index: {"x": dataset.x[index].fill_(index), "y": dataset.y.fill_(index)[index]},
    with_former,
], ids=["all", "second", "dict", "former"])  # fmt: skip
def test_view_of_a_tensor_that_each_call_changes_is_copied_at_once(
    view: Any, workers: int, on: Place
) -> None:
    dataset = OfTensors(view)
    dataset.y = dataset.torch.zeros(100)
    with lp.Loader(dataset, batch_size=25, **on(workers)) as loader:
        for batch in read(loader, 2):
            parts = [*batch.values()] if isinstance(batch, dict) else [*batch][-1:]
            for part in parts if isinstance(batch, (dict, tuple)) else [batch]:
                values = part.reshape(25, -1)
                assert (values[0] % 25 == 0).all() and (np.diff(values, axis=0) == 1).all()


def test_views_of_an_empty_tensor_are_empty_rows() -> None:
    torch = pytest.importorskip("torch")

    def rows() -> Any:
        empty = torch.zeros(100, 0)
        yield from (empty[index] for index in range(100))

    with lp.Loader.from_generator(rows, batch_size=10, workers=0) as loader:
        assert [batch.shape for batch in loader] == [(10, 0)] * 10


def test_abandoned_run_stops_calls_that_a_cache_makes(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def slow(row: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{row}\n")
        time.sleep(0.002)
        return row

    def abandoned() -> None:
        with pytest.raises(lp.errors.ClosedError):
            next(iter(loader))

    table = Table(tmp_path / "reads", 1000)
    with lp.Pool(1) as pool:
        loader = lp.Loader(table, slow, batch_size=1000, cache=tmp_path, workers=pool)
        other = lp.Loader(range(10), batch_size=10, workers=pool)
        read(other)
        thread = threading.Thread(target=abandoned)
        thread.start()
        wait_until(lambda: log.exists() and len(log.read_text().split()) > 200)
        loader.close()
        read(other, 5)  # by the same worker, when it has stopped
        thread.join()
    assert len(log.read_text().split()) < 1000


WRONG = [None, "2.5", b"2.5", (), {}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("at", [None, 0, 1, "x"])
@pytest.mark.parametrize("kind", ["list", "function", "__getitems__"])
def test_a_block_of_wrong_leaves_is_an_error(
    wrong: Any, at: Any, kind: str, tmp_path: Path
) -> None:
    parts = {None: lambda x: x, 0: lambda x: (x, 1), 1: lambda x: (1, x), "x": lambda x: {"x": x}}

    def item(index: Any) -> Any:
        return parts[at](1.0 if index < 100 else wrong)

    class Items(Table):
        def row(self, index: int) -> Any:
            return item(index)

    source: Any = [*map(item, range(200))] if kind == "list" else range(200)
    if kind == "__getitems__":
        source = Items(tmp_path / "log", 200)
    fn = item if kind == "function" else None
    with (
        lp.Loader(source, fn, batch_size=50, workers=0) as loader,
        pytest.raises(SpecMismatchError, match="source index 100") as caught,
    ):
        read(loader)
    assert at is None or ("['x']" if at == "x" else f"[{at}]") in str(caught.value)


@pytest.mark.parametrize("wrong", [
    np.ones(3), 1.5, [np.ones(3), np.ones(2)], (np.ones(3),), (np.ones(3), np.ones(4)), None,
], ids=["array", "number", "list", "short", "part", "none"])  # fmt: skip
def test_result_that_differs_from_its_tuple_is_an_error(wrong: Any) -> None:
    def item(index: int) -> Any:
        return wrong if index == 70 else (np.ones(3), np.ones(2))

    with (
        lp.Loader(range(100), item, batch_size=50, workers=0) as loader,
        pytest.raises(SpecMismatchError, match="source index 70") as caught,
    ):
        read(loader)
    assert "type tuple" not in str(caught.value)
