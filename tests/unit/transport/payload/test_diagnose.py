"""Objects that cannot be sent are named: the payload's key, the path to the variable, its type, and
advice.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import LoaderpoolError, UnpicklableError
from loaderpool.transport.payload.ship import ship

LOCK = threading.Lock()


def refusal(**payload: Any) -> UnpicklableError:
    with pytest.raises(UnpicklableError) as caught:
        ship(payload)
    error = caught.value
    assert isinstance(error, LoaderpoolError) and isinstance(error, TypeError)
    assert error.__cause__ is not None
    return error


def numbers() -> Iterator[int]:
    yield 1


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self, i: int) -> int:
        return i


class Slotted:
    __slots__ = ("db",)

    def __init__(self, db: Any) -> None:
        self.db = db


@dataclasses.dataclass
class Item:
    name: str
    handle: Any


def local_functions() -> dict[str, Callable[..., Any]]:
    """Return functions that are pickled by value, each of which holds a lock in another way."""
    lock = threading.Lock()

    def closure(i: int) -> int:
        with lock:
            return i

    def outer(i: int) -> int:
        return closure(i)

    def default(i: int, guard: Any = lock) -> int:
        return i

    def keyword(i: int, *, guard: Any = lock) -> int:
        return i

    def attribute(i: int) -> int:
        return i

    attribute.guard = lock  # type: ignore[attr-defined]

    def global_(i: int) -> Any:
        return LOCK

    class Local:
        guard = lock

        def __call__(self, i: int) -> int:
            return i

    return {
        "closure": closure,
        "outer": outer,
        "default": default,
        "keyword": keyword,
        "attribute": attribute,
        "global": global_,
        "class": Local(),
        "cached": functools.lru_cache(closure),
        "partial": functools.partial(max, 1, key=closure),
    }


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("closure", "closure variable 'lock' of function local_functions.<locals>.closure"),
        (
            "outer",
            "closure variable 'closure' of function local_functions.<locals>.outer → closure variable 'lock'",
        ),
        ("default", "default of 'guard' of local_functions.<locals>.default"),
        ("keyword", "default of 'guard' of local_functions.<locals>.keyword"),
        ("attribute", "attribute .guard of function local_functions.<locals>.attribute"),
        ("global", "global 'LOCK' used by local_functions.<locals>.global_"),
        ("class", "attribute .guard of class local_functions.<locals>.Local"),
        (
            "cached",
            "the cached function local_functions.<locals>.closure → closure variable 'lock'",
        ),
        ("partial", "argument 'key' of the partial → closure variable 'lock' of function"),
    ],
)
def test_a_lock_that_a_function_holds_is_named_by_its_variable(form: str, path: str) -> None:
    text = str(refusal(source=range(3), fn=local_functions()[form]))
    assert "fn → " in text and path in text
    assert "of type _thread.lock" in text and "cannot pickle '_thread.lock' object" in text
    assert "setup=" in text and "inside the function" in text


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ([1, 2, 3, threading.Lock(), 5], "source → item 3 of the list, of type _thread.lock"),
        ((1, [2, threading.Lock()]), "source → item 1 of the tuple → item 1 of the list, "),
        ({"a": 1, "b": threading.Lock()}, "source → item 'b' of the dict, "),
        ({(1, threading.Lock()): 1}, "source, of type dict"),
        ({threading.Lock()}, "source → item 0 of the set, "),
        (Holder(a=1, db=threading.Lock()), "source → attribute .db of Holder, "),
        (Slotted(threading.Lock()), "source → attribute .db of Slotted, "),
        (
            [Item("x", None), Item("y", threading.Lock())],
            "source → item 1 of the list → attribute .handle of Item, ",
        ),
        (collections.deque([0, threading.Lock()]), "source → item 1 of the deque, "),
        (collections.OrderedDict(x=threading.Lock()), "source → item 'x' of the OrderedDict, "),
        (np.array([None, threading.Lock()], dtype=object), "source → item 1 of the array, "),
        (
            Holder(db=threading.Lock()).method,
            "the object of the method Holder.method → attribute .db of Holder, ",
        ),
        ([numbers()], "source → item 0 of the list, of type generator"),
    ],
)
def test_a_part_of_the_source_is_named_by_its_place(source: Any, path: str) -> None:
    assert path in str(refusal(fn=len, source=source))


class Rows:
    """A data set of the user that keeps something open."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (Rows(threading.Lock()), "source → attribute .handle of Rows, of type _thread.lock"),
        (
            (np.arange(4), Rows(threading.Lock())),
            "source → item 1 of the tuple → attribute .handle of Rows, ",
        ),
    ],
)
def test_a_path_names_no_attribute_of_loaderpool(source: Any, path: str) -> None:
    with pytest.raises(UnpicklableError) as raised:
        lp.Loader(source, workers=1)
    assert path in str(raised.value)


@pytest.mark.parametrize("library", ["netCDF4", "h5netcdf"])
def test_an_open_netcdf_file_comes_with_advice_of_its_own(library: str, tmp_path: Path) -> None:
    module = pytest.importorskip(library)
    file = getattr(module, "Dataset", None) or module.File
    with file(tmp_path / "x.nc", "w") as dataset:
        text = str(refusal(source=range(3), fn=functools.partial(max, dataset)))
    assert "Open the file in setup=" in text and "xarray.open_dataset(path)[name]" in text


def test_a_generator_comes_with_advice_of_its_own() -> None:
    assert "Pass the generator function" in str(refusal(source=numbers()))


@pytest.mark.parametrize("mode", ["r", "rb", "w", "r+b"])
def test_open_files_are_refused_whatever_their_mode(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with open(tmp_path / "file", mode) as file:
        text = str(refusal(source=[file.name, file]))
    assert "item 1 of the list, of type _io." in text and "setup=" in text


class RaisesInReduce:
    def __reduce__(self) -> Any:
        raise ValueError("connection is open")


class RaisesInGetstate:
    def __getstate__(self) -> Any:
        return {}["missing"]


@pytest.mark.parametrize(
    ("item", "told", "cause"),
    [
        (RaisesInReduce(), "raised ValueError: connection is open", ValueError),
        (RaisesInGetstate(), "raised KeyError: 'missing'", KeyError),
    ],
)
def test_what_the_users_own_pickling_raises_is_told_and_is_the_cause(
    item: Any, told: str, cause: type
) -> None:
    error = refusal(source=[0, item])
    assert f"item 1 of the list, of type {__name__}.{type(item).__name__}" in str(error)
    assert told in str(error)
    assert isinstance(error.__cause__, cause)


def test_a_structure_nested_too_deeply_is_named_by_its_first_levels() -> None:
    nested: list[Any] = []
    for _ in range(
        sys.getrecursionlimit() * 200
    ):  # in Python 3.14, the depth of the C stack is the limit
        nested = [nested]
    text = str(refusal(source=[1, nested]))
    assert "source → item 1 of the list, of type list" in text and "recursion" in text
    assert "Store the data in a flat list or in arrays, with indices instead of references" in text


# ---- the path to the object


def test_a_path_walks_no_cycle_and_finds_the_part_that_is_the_cause() -> None:
    engine, preparer = Holder(), Holder()
    engine.preparer, preparer.engine = preparer, engine  # type: ignore[attr-defined]
    engine.lock = threading.Lock()  # type: ignore[attr-defined]
    assert "source → attribute .lock of Holder, of type _thread.lock" in str(refusal(source=engine))
    del engine.lock  # type: ignore[attr-defined]
    preparer.reference = weakref.ref(engine)  # type: ignore[attr-defined]
    text = str(refusal(source=engine))
    assert (
        "source → attribute .preparer of Holder → attribute .reference of Holder, of type weakref."
        in text
    )

    items: list[Any] = [1]
    items += [items, {"whole": items}, threading.Lock()]
    assert "source → item 3 of the list, of type _thread.lock" in str(refusal(source=items))

    def calls_itself(i: int) -> Any:
        return calls_itself(i) if i else LOCK

    assert "fn → global 'LOCK' used by" in str(refusal(source=range(3), fn=calls_itself))


def of_library(module: str, name: str = "Compiled", **members: Any) -> Any:
    """Return a class that seems to come from an installed library."""
    return type(name, (), {"__module__": module, **members})


def test_parts_inside_of_a_librarys_object_are_not_shown_nor_advised_on() -> None:
    """For example, a cfunc of Numba holds a generator far inside."""
    compiled = of_library("numpy.linalg")()
    compiled.compiler = Holder.__new__(of_library("numpy.linalg", "Compiler"))
    compiled.compiler.registries = [{"functions": numbers()}]
    text = str(refusal(source=range(3), fn=functools.partial(max, compiled)))
    assert (
        "argument 0 of the partial, of type numpy.linalg.Compiled. Pickling it raised TypeError"
        in text
    )
    assert "from_generator" not in text and "setup=" in text
    # The user's object inside it is named.
    compiled.compiler.registries = [Holder(lock=threading.Lock())]
    text = str(refusal(source=range(3), fn=functools.partial(max, compiled)))
    assert "item 0 of the list → attribute .lock of Holder, of type _thread.lock" in text


def refuses(self: Any) -> Any:
    raise TypeError("no default __reduce__ due to non-trivial __cinit__")


@pytest.mark.parametrize(
    ("module", "told"),
    [
        ("h5py.h5r", "An HDF5 reference belongs to its open file. "),
        ("h5py._hl.dataset", "An open HDF5 file cannot "),
    ],
)
def test_a_reference_of_hdf5_is_no_open_file(module: str, told: str) -> None:
    text = str(refusal(source=[of_library(module, "Reference", __reduce__=refuses)()]))
    assert told in text and "setup=" in text


def test_real_references_of_hdf5_are_no_open_files(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", data=np.arange(10))
        for reference in (data.ref, data.regionref[2:4]):
            assert "An HDF5 reference belongs to its open file. " in str(
                refusal(source=[reference])
            )
        assert "An open HDF5 file cannot be sent" in str(refusal(source=[data]))


def test_a_compiled_callback_of_numba_is_not_taken_for_a_generator() -> None:
    numba = pytest.importorskip("numba")
    square = numba.cfunc("float64(float64)")(lambda x: x * x)
    text = str(refusal(source=range(3), fn=functools.partial(max, square)))
    assert "of type numba.core.ccallback.CFunc" in text and "from_generator" not in text
