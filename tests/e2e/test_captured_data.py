"""Lists and dicts that functions capture: a warning for large ones, and one copy in memory for
shared ones.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tarfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import read
from tests.support.notes import notes
from tests.support.processes import descendants, read_pss

ITEMS = 10_000


def records(count: int = ITEMS) -> list[dict[str, Any]]:
    return [
        {"path": f"data/train/{i:06d}.jpg", "label": i % 1000, "weight": i / 7}
        for i in range(count)
    ]


def test_a_shared_list_equals_its_original() -> None:
    given = records(2_000)
    shared = lp.share(given)
    assert list(shared) == given and len(shared) == 2_000
    assert shared[-1] == given[-1] and shared[5:7] == given[5:7]
    assert given[7] in shared and shared.index(given[7]) == 7
    with pytest.raises(IndexError):
        shared[2_000]


def test_a_shared_dict_equals_its_original() -> None:
    given = {each["path"]: [at % 640, at % 480] for at, each in enumerate(records(2_000))}
    shared = lp.share(given)
    assert dict(shared) == given and list(shared) == list(given) and len(shared) == 2_000
    assert set(shared.keys()) == set(given)
    assert "nothing" not in shared and shared.get("nothing", 3) == 3
    with pytest.raises(KeyError):
        shared["nothing"]


def test_an_empty_list_or_dict_can_be_shared() -> None:
    assert list(lp.share(())) == [] and dict(lp.share({})) == {}


@pytest.mark.parametrize(
    "change", ["x[0] = 1", "del x[0]", "x.append(1)", "x += [1]", "x.sort()", "x.update({})"]
)
def test_what_is_shared_cannot_be_changed(change: str) -> None:
    for shared in (lp.share([3, 2]), lp.share({0: "a"})):
        with pytest.raises((TypeError, AttributeError)):
            exec(change, {"x": shared})


@dataclasses.dataclass
class Record:
    path: str
    image: np.ndarray[Any, Any]


def test_elements_of_a_class_and_their_large_arrays_are_shared_too() -> None:
    images = [np.full((200, 200), i, np.float64) for i in range(4)]
    shared = lp.share([Record(f"{i}.jpg", images[i % 4]) for i in range(8)])
    assert shared[5].path == "5.jpg" and (shared[5].image == images[1]).all()
    with pytest.raises(ValueError, match="read-only"):
        shared[5].image[0] = 1

    def load(i: int) -> Any:
        record = shared[i]
        assert not record.image.flags.writeable and not record.image.flags.owndata
        return record.image[0, :2]

    with lp.Loader(range(8), load, batch_size=4, workers=2) as loader:
        assert [list(map(float, row)) for batch in loader for row in batch] == [
            [i % 4] * 2 for i in range(8)
        ]
        assert notes(loader.statistics(), "copied into") == []


def test_what_cannot_be_shared_is_named_by_its_index() -> None:
    with pytest.raises(lp.UnpicklableError, match=r"element 1, of type lock, .* cannot pickle"):
        lp.share([1, threading.Lock()])
    with pytest.raises(lp.UnpicklableError, match="one by one"):
        lp.share([lambda: 1])


@pytest.mark.slow
def test_a_shared_list_takes_no_more_memory_than_as_the_source() -> None:
    count = 50_000
    training_set = records(count)
    shared = lp.share(training_set)
    table = lp.share({each["path"]: each for each in training_set})
    expected = sum(i % 1000 for i in range(count))
    loaders: dict[str, Any] = {
        "source": lambda: lp.Loader(
            training_set, lambda item: item["label"], batch_size=1000, workers=4, shuffle=True
        ),
        "list": lambda: lp.Loader(
            range(count), lambda i: shared[i]["label"], batch_size=1000, workers=4, shuffle=True
        ),
        "dict": lambda: lp.Loader(
            range(count),
            lambda i: table[f"data/train/{i:06d}.jpg"]["label"],
            batch_size=1000,
            workers=4,
            shuffle=True,
        ),
        "as the source": lambda: lp.Loader(
            shared, lambda item: item["label"], batch_size=1000, workers=4
        ),
    }
    taken: dict[str, int] = {}
    for name, make in loaders.items():
        with make() as loader:
            for _ in range(2):
                assert sum(int(batch.sum()) for batch in loader) == expected
            taken[name] = sum(map(read_pss, descendants(os.getpid())))
    # As Python objects, a list of these takes 50 MB more. A shared dict also has its keys and their
    # positions.
    assert taken["list"] < taken["source"] + 15e6, taken
    assert taken["dict"] < taken["source"] + 30e6, taken
    assert taken["as the source"] < taken["source"] + 15e6, taken


def test_a_large_list_is_warned_of_in_the_caller_s_line_with_the_line_that_mends_it() -> None:
    training_set = [f"data/train/{i:07d}.jpg" * 4 for i in range(250_000)]
    with pytest.warns(lp.LargeDataWarning) as warned:
        lp.Loader(
            range(8), lambda i: len(random.choice(training_set)), batch_size=4, workers=1
        ).close()
    (warning,) = warned
    text = str(warning.message)
    assert warning.filename == __file__
    assert text.startswith("fn → closure variable 'training_set' of function test_a_large_list")
    assert "a list of 250,000 elements, and each worker" in text
    assert text.endswith("training_set = lp.share(training_set)")
    training_set = lp.share(training_set)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lp.Loader(
            range(8), lambda i: len(random.choice(training_set)), batch_size=4, workers=1
        ) as loader:
            assert len(read(loader)) == 2


def test_global_generators_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw, load = random.random, lambda i, rng: draw() + np.random.rand() + rng.random()
        lp.Loader(range(8), load, batch_size=4, workers=1).close()


def test_lists_and_dicts_in_dicts_are_named_as_code_would_write_them() -> None:
    numbers = list(range(3_000_000))
    tables = {"names": dict(enumerate(f"data/train/{i:07d}.jpg" * 4 for i in range(250_000)))}
    with pytest.warns(lp.LargeDataWarning) as warned:
        lp.Loader(
            range(8), lambda i: len(tables["names"][i]) + numbers[i], batch_size=4, workers=1
        ).close()
    fixes = sorted(str(each.message).partition("To share one copy: ")[2] for each in warned)
    assert fixes == ["numbers = lp.share(numbers)", "tables['names'] = lp.share(tables['names'])"]


def test_what_the_loader_itself_reads_is_not_warned_of() -> None:
    names = [f"data/train/{i:07d}.jpg" * 4 for i in range(250_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lp.Loader(
            range(8), lambda i: len(random.choice(names)), batch_size=4, workers=0
        ).close()  # nothing is copied
        for source in (names, {"name": names, "number": list(range(250_000))}):
            lp.Loader(source, lambda item: 1, batch_size=4, workers=1).close()


def test_a_captured_memoryview_is_refused_by_name() -> None:
    view = memoryview(np.arange(4))
    with pytest.raises(
        lp.UnpicklableError, match=r"closure variable 'view' of function .*numpy\.asarray"
    ):
        lp.Loader(range(3), lambda i: np.int64(view[i]), batch_size=3, workers=2)


def test_a_field_without_a_default_has_none_in_a_worker_either() -> None:
    @dataclasses.dataclass
    class Settings:
        size: int

    def has_none(_: int) -> bool:
        return dataclasses.fields(Settings)[0].default is dataclasses.MISSING

    with lp.Loader(range(3), has_none, batch_size=3, workers=1) as loader:
        assert next(iter(loader)).all()


class Table:
    """Holds a large list, and can be a source or a function of any kind."""

    shape = (8,)
    dtype = np.dtype(np.float32)
    num_batches = 4

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock
        self.rows = list(range(250_000)) if lock is None else []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return np.zeros((2, 3), np.float32)

    def load(self, index: int) -> int:
        return self.rows[index]

    def __call__(self, index: int) -> int:
        return self.rows[index]


WRAPPED: dict[str, tuple[Callable[[Any], lp.Loader], str]] = {
    "object": (lambda table: lp.Loader([table][0], batch_size=2, workers=1), "source"),
    "column": (
        lambda table: lp.Loader({"x": table, "y": [0] * 8}, batch_size=2, workers=1),
        "source → column ['x']",
    ),
    "inner column": (
        lambda table: lp.Loader({"x": {"u": table}, "y": [0] * 8}, batch_size=2, workers=1),
        "source → column ['x']['u']",
    ),
    "tuple": (
        lambda table: lp.Loader((np.zeros(8), table), batch_size=2, workers=1),
        "source → column [1]",
    ),
    "sequence": (lambda table: lp.Loader.from_sequence(table, workers=1), "source"),
    "mix": (
        lambda table: lp.Loader(lp.mix([[1, 2], table]), batch_size=2, workers=1),
        "source → source [1]",
    ),
    "zip": (
        lambda table: lp.Loader(lp.zip_sources(range(8), table), batch_size=2, workers=1),
        "source → source [1]",
    ),
    "named zip": (
        lambda table: lp.Loader(
            lp.zip_sources({"a": range(8), "b": table}), batch_size=2, workers=1
        ),
        "source → source ['b']",
    ),
    "mix of zips": (
        lambda table: lp.Loader(lp.mix([lp.zip_sources(range(8), table)]), batch_size=2, workers=1),
        "source → source [0] → source [1]",
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_paths_name_no_wrapper_of_ours(kind: str) -> None:
    make, path = WRAPPED[kind]
    with pytest.raises(lp.UnpicklableError) as caught:
        make(Table(threading.Lock()))
    assert f"workers: {path} → attribute .lock of Table, of type _thread.lock. " in str(
        caught.value
    )
    with pytest.warns(lp.LargeDataWarning) as warned:
        make(Table()).close()
    assert [str(each.message).partition(" is a list of ")[0] for each in warned] == [
        f"{path} → attribute .rows of Table"
    ]


def test_a_stream_of_files_is_named_by_its_arguments() -> None:
    lock = threading.Lock()
    stream = lp.interleave(["a", "b"], lambda file: [int(lock.locked())] * 4)
    with lp.Loader(stream, lambda item: item, batch_size=4, workers=1) as loader:
        assert len(read(loader)) == 2
        (note,) = (each for each in loader.statistics().notes if "lock" in each)
    assert "source → open_fn → closure variable 'lock' of function " in note


class Labelled(lp.TarSamples):
    """An archive with an object of a user's class."""


def test_a_compressed_file_is_named_as_the_source(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for number in range(4):
            archive.addfile(tarfile.TarInfo(f"{number}.txt"))
    source = Labelled([tmp_path / "a.tar.gz"])
    source.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        lp.UnpicklableError,
        match=r"workers: source → attribute \.lock of Labelled, of type _thread",
    ):
        lp.Loader(source, lambda item: 1, batch_size=2, workers=1)


def line_of(make: Callable[[], lp.Loader]) -> str:
    with pytest.warns(lp.LargeDataWarning) as warned:
        make().close()
    (warning,) = warned
    return str(warning.message).partition("To share one copy: ")[2]


MADE_BY_NOBODY = "obj.rows = lp.share(obj.rows), where obj is "


@pytest.mark.parametrize(
    "name", ["method", "callable", "partial", "partial of a method", "keyword"]
)
def test_the_line_names_the_object_that_has_a_variable(name: str) -> None:
    table = Table()
    functions: dict[str, Any] = {
        "method": table.load,
        "callable": table,
        "partial": functools.partial(lambda index, data: data.rows[index], data=table),
        "partial of a method": functools.partial(table.load),
        "keyword": functools.partial(lambda data, index: data.rows[index], table),
    }
    make = functools.partial(lp.Loader, range(8), functions[name], batch_size=4, workers=1)
    assert line_of(make) == "table.rows = lp.share(table.rows)"
    table.rows = lp.share(table.rows)  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().close()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Table().load, f"{MADE_BY_NOBODY}the object of the method Table.load"),
        (lambda: Table(), f"{MADE_BY_NOBODY}the object that you pass as fn"),
        (
            lambda: functools.partial(Table.load, Table()),
            f"{MADE_BY_NOBODY}argument 0 of the partial",
        ),
        (
            lambda: functools.partial(
                lambda index, data: data["x"][index], data={"x": list(range(250_000))}
            ),
            "obj['x'] = lp.share(obj['x']), where obj is argument 'data' of the partial",
        ),
        (
            lambda: functools.partial(lambda data, index: data[index], list(range(250_000))),
            "pass lp.share(...) of it instead",
        ),
        (lambda: dict(enumerate(range(250_000))).get, "pass lp.share(...) of it instead"),
    ],
    ids=["method", "callable", "partial", "item", "list", "dict"],
)
def test_the_line_says_which_object_has_no_variable(make: Callable[[], Any], line: str) -> None:
    assert line_of(lambda: lp.Loader(range(8), make(), batch_size=4, workers=1)) == line
