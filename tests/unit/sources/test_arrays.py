"""Arrays of other libraries as sources and as columns: their rows, and messages for arrays without
rows.
"""

from __future__ import annotations

import collections
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.recognise import as_source, check_length

ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)
LABELS = np.arange(6)


class OfShape:
    """Like an array of zarr 3: it has a shape, and no length."""

    def __init__(self, data: Any = ROWS) -> None:
        self.data, self.dtype = data, data.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.data.shape  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class WithoutLength(OfShape):
    """Like SciPy's sparse arrays, whose `len` is an error."""

    def __len__(self) -> int:
        raise TypeError("length is ambiguous")


class Lazy(OfShape):
    """Like tensorstore's arrays: the result of an index is read when NumPy converts it."""

    def __getitem__(self, index: int) -> Any:
        return type(self)(self.data[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.data


class Computed(Lazy):
    """Like dask's arrays: `compute` reads."""

    chunks = ((2, 2, 2), (4,))
    schedulers: list[str] = []

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("by the scheduler with threads")

    def compute(self, scheduler: str) -> Any:
        self.schedulers.append(scheduler)
        return self.data


def of(library: str, kind: type, **attributes: Any) -> type:
    """Return a class that seems to come from a library."""
    return type(kind.__name__, (kind,), {"__module__": f"{library}.core", **attributes})


class Columns(Mapping[Any, Any]):
    """Counts the accesses to each column, because an .npz file reads a column at each access."""

    def __init__(self, columns: dict[Any, Any]) -> None:
        self.columns, self.asked = columns, collections.Counter[Any]()

    def __getitem__(self, name: Any) -> Any:
        self.asked[name] += 1
        return self.columns[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


# ---- rows ----


@pytest.mark.parametrize("array", [OfShape(), WithoutLength()])
def test_an_array_without_length_has_the_rows_of_its_shape(array: Any) -> None:
    source = as_source(array)
    assert len(source) == 6
    assert np.array_equal(source[2], ROWS[2])


@pytest.mark.parametrize("library", ["tensorstore", "xarray"])
def test_a_lazy_row_is_read_into_an_array(library: str) -> None:
    row = as_source(of(library, Lazy)())[3]
    assert type(row) is np.ndarray
    assert np.array_equal(row, ROWS[3])


@pytest.mark.parametrize("library", ["dask", "xarray"])
def test_dask_computes_a_row_without_threads(library: str) -> None:
    kind = of(library, Computed, schedulers=[])
    assert np.array_equal(as_source(kind())[3], ROWS[3])
    assert kind.schedulers == ["synchronous"]


def test_rows_of_other_kinds_stay_as_their_library_gives_them() -> None:
    assert type(as_source(Lazy())[3]) is Lazy


def test_rows_can_be_read_in_another_process() -> None:
    copy = pickle.loads(pickle.dumps(as_source(OfShape())))
    assert np.array_equal(copy[5], ROWS[5])


def test_an_array_that_has_shrunk_is_refused() -> None:
    array = OfShape()
    source = as_source(array)
    array.data = ROWS[:3]
    with pytest.raises(SourceError, match="had 6 items when the loader was created, and has 3 now"):
        check_length(source, 6)


def test_arrays_without_length_are_columns() -> None:
    source = as_source({"x": OfShape(), "y": (of("xarray", Lazy)(), LABELS)})
    assert len(source) == 6
    assert np.array_equal(source[1]["x"], ROWS[1]) and np.array_equal(source[1]["y"][0], ROWS[1])
    assert type(source[1]["y"][0]) is np.ndarray
    with pytest.raises(ArgumentError, match=r"\['x'\] has 6, \['y'\] has 5"):
        as_source({"x": OfShape(), "y": OfShape(LABELS[:5])})


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_rows_of_an_array_without_length(workers: int) -> None:
    with lp.Loader(WithoutLength(), lambda row: row * 2, batch_size=6, workers=workers) as loader:
        assert np.array_equal(next(iter(loader)), ROWS * 2)


# ---- SciPy's sparse arrays ----


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_a_sparse_row_is_a_dense_array_of_one_axis(form: str, kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    rows = np.where(ROWS % 3 == 0, ROWS, 0)
    source = as_source(getattr(sparse, f"{form}_{kind}")(rows))
    assert len(source) == 6
    assert all(np.array_equal(source[at], rows[at]) for at in range(6))
    assert source[0].dtype == np.float32 and source[0].flags.writeable
    assert np.array_equal(pickle.loads(pickle.dumps(source))[4], rows[4])
    with pytest.raises(IndexError):
        source[6]


def test_values_of_one_place_are_added() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    twice = sparse.csr_array(
        (np.array([1.0, 2.0]), np.array([1, 1]), np.array([0, 2])), shape=(1, 3)
    )
    assert as_source(twice)[0].tolist() == [0, 3, 0]


def test_other_numbers_of_axes_of_sparse_arrays() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    assert as_source(sparse.coo_array(np.array([0, 5.0])))[1] == 5
    try:
        cube = sparse.coo_array(np.eye(4).reshape(2, 2, 4))
    except (TypeError, ValueError):
        pytest.skip("no sparse arrays of three axes")
    with pytest.raises(
        SourceError, match=r"sparse coo_array of shape \(2, 2, 4\): pass one of two axes"
    ):
        as_source(cube)


@pytest.mark.parametrize("workers", [0, 2])
def test_sparse_columns_beside_labels(workers: int) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with lp.Loader(
        (sparse.csr_matrix(ROWS), LABELS), batch_size=6, shuffle=True, workers=workers
    ) as loader:
        x, y = next(iter(loader))
    assert np.array_equal(x, ROWS[y])


# ---- mappings ----


@pytest.mark.parametrize(
    "make",
    [
        dict,
        collections.OrderedDict,
        collections.UserDict,
        collections.ChainMap,
        types.MappingProxyType,
        Columns,
    ],
)
def test_any_mapping_of_columns_is_a_dict_of_columns(make: Callable[[dict[str, Any]], Any]) -> None:
    source = as_source(make({"x": ROWS, "y": LABELS}))
    assert len(source) == 6
    assert type(source[4]) is dict
    assert np.array_equal(source[4]["x"], ROWS[4]) and source[4]["y"] == 4


def test_each_column_is_read_once() -> None:
    columns = Columns({"x": ROWS, "in": Columns({"y": LABELS})})
    source = as_source(columns)
    assert source[1]["in"]["y"] == source[1]["in"]["y"] == 1
    assert set(columns.asked.values()) | set(columns.columns["in"].asked.values()) == {1}


def test_a_mapping_by_number_is_read_by_index() -> None:
    assert as_source(Columns({0: ROWS[0], 1: ROWS[1]}))[1].tolist() == ROWS[1].tolist()


def test_a_mapping_of_other_things_is_refused_by_path() -> None:
    with pytest.raises(SourceError, match=r"^source\['lr'\] is a float, not an array"):
        as_source(collections.UserDict(lr=0.1, x=ROWS))
    with pytest.raises(
        SourceError, match=r"^source\['epoch'\] is an array of shape \(\), which has no rows"
    ):
        as_source({"x": ROWS, "epoch": np.array(3)})
    with pytest.raises(ArgumentError, match="source is empty: a UserDict"):
        as_source(collections.UserDict())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_npz_file_is_the_source(tmp_path: Path, workers: int) -> None:
    np.savez(tmp_path / "data.npz", x=ROWS, y=LABELS)
    with (
        np.load(tmp_path / "data.npz") as file,
        lp.Loader(file, batch_size=6, workers=workers) as loader,
    ):
        batch = next(iter(loader))
    assert np.array_equal(batch["x"], ROWS) and np.array_equal(batch["y"], LABELS)


# ---- values without rows ----


@pytest.mark.parametrize(
    ("library", "name", "message"),
    [
        (
            "xarray",
            "Dataset",
            r"is an xarray Dataset: pass the variables.*for name in \['x', 'y'\]}.*transpose",
        ),
        ("zarr", "Group", r"is a zarr Group: pass its arrays as columns"),
        ("h5py", "File", r"is an open HDF5 File: pass lp\.HDF5\(path"),
        ("dask", "DataFrame", r"is a dask DataFrame: pass source\.compute\(\)"),
    ],
)
def test_a_container_of_arrays_says_what_to_write(library: str, name: str, message: str) -> None:
    base = type("Group", (Columns,), {"__module__": f"{library}.core"})
    container = type(
        name, (base,), {"__module__": f"{library}.core", "data_vars": {"x": 1, "y": 2}}
    )
    with pytest.raises(SourceError, match=f"^source {message}"):
        as_source(container({"x": ROWS}))


def test_an_unknown_number_of_rows_says_what_to_call() -> None:
    unknown = of("dask", Computed, shape=(float("nan"), 4))
    with pytest.raises(
        SourceError, match=r"shape \(nan, 4\), whose length is unknown: call source\.compute_chunk"
    ):
        as_source(unknown())


# ---- the libraries themselves ----


def test_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr", minversion="3")
    array = zarr.create_array(store=str(tmp_path / "x.zarr"), data=ROWS, chunks=(2, 4))
    with lp.Loader({"x": array, "y": LABELS}, batch_size=6, shuffle=True, workers=2) as loader:
        batch = next(iter(loader))
    assert np.array_equal(batch["x"], ROWS[batch["y"]])
    with pytest.raises(SourceError, match="is a zarr Group"):
        as_source(zarr.open_group(str(tmp_path / "group.zarr"), mode="w"))


def test_tensorstore(tmp_path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / "x")}}
    array = tensorstore.open(spec, create=True, dtype="float32", shape=[6, 4]).result()
    array.write(ROWS).result()
    with lp.Loader(array, batch_size=6, workers=2) as loader:
        assert np.array_equal(next(iter(loader)), ROWS)


def test_xarray() -> None:
    xarray = pytest.importorskip("xarray")
    data = xarray.Dataset({"x": (("row", "column"), ROWS), "y": ("row", LABELS)})
    with lp.Loader(
        {name: data[name] for name in ["x", "y"]}, batch_size=6, shuffle=True, workers=2
    ) as loader:
        batch = next(iter(loader))
    assert np.array_equal(batch["x"], ROWS[batch["y"]])
    with pytest.raises(SourceError, match=r"is an xarray Dataset.*\['x', 'y'\]"):
        as_source(data)


def test_dask() -> None:
    dask_array = pytest.importorskip("dask.array")
    array = dask_array.from_array(ROWS, chunks=(2, 4)) * 2
    with lp.Loader(array, batch_size=6, workers=2) as loader:
        assert np.array_equal(next(iter(loader)), ROWS * 2)
    with pytest.raises(SourceError, match="compute_chunk_sizes"):
        as_source(array[array[:, 0] > 8])
