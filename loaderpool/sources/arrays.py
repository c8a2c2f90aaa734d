"""Arrays of libraries other than NumPy, read by row: zarr, tensorstore, xarray, dask, SciPy."""

from __future__ import annotations

import numbers
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from loaderpool.errors import SourceError
from loaderpool.sources.indexing import Indexed

# Libraries whose rows are lazy objects, which `ArrayRows` reads into NumPy arrays.
_LAZY = ("dask", "tensorstore", "xarray")
# Libraries whose arrays may be stored in chunks. `decoded.ChunkedRows` reads such arrays.
_CHUNKED = (*_LAZY, "h5py", "zarr")


def is_of(obj: object, package: str, *names: str) -> TypeGuard[Any]:
    """True if an object is an instance of a class of a package. Does not import the package.

    Args:
        obj: any object.
        package: top-level package.
        names: names of the classes; without names, any class of the package.
    """
    homes = ((base.__module__.partition(".")[0], base.__name__) for base in type(obj).__mro__)
    return any(home == package and (not names or name in names) for home, name in homes)


class Array(Indexed, Protocol):
    """Array with at least one axis, of any library. Its `len` may raise TypeError."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class ArrayRows:
    """Rows of an array. Lazy rows are read into NumPy arrays at once."""

    __slots__ = ("_is_lazy", "items")

    def __init__(self, items: Array) -> None:
        self.items = items
        self._is_lazy = _is_lazy(items)

    def __len__(self) -> int:
        return int(self.items.shape[0])

    def __getitem__(self, index: int) -> object:
        return self._in_memory(self.items[index])

    def _in_memory(self, rows: Any) -> Any:
        return _read(rows) if self._is_lazy else rows

    def forget_blocks(self) -> None:
        """Do nothing, because these rows keep no decoded blocks."""

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the user's array, for messages (`walk.parts_of`)."""
        return [("", self.items)]

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayRows, (self.items,)


class SparseRows:
    """Rows of a sparse array, as dense rows. SciPy is not needed to read them.

    Args:
        starts: `int[rows + 1]`, the start of each row in `places` and `values`.
        places: `int[values]`, the column of each value.
        values: `dtype[values]`. Values with the same place are added.
        width: length of a row.
    """

    __slots__ = ("_arrays", "_width")

    def __init__(
        self,
        starts: npt.NDArray[Any],
        places: npt.NDArray[Any],
        values: npt.NDArray[Any],
        width: int,
    ) -> None:
        self._arrays, self._width = (starts, places, values), width

    def __len__(self) -> int:
        return len(self._arrays[0]) - 1

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        starts, places, values = self._arrays
        if not 0 <= index < len(self):
            raise IndexError(index)
        here = slice(starts[index], starts[index + 1])
        row = np.zeros(self._width, values.dtype)
        np.add.at(row, places[here], values[here])
        return row

    def __reduce__(self) -> tuple[Any, ...]:
        return SparseRows, (*self._arrays, self._width)


def has_rows(value: object) -> TypeGuard[Array]:
    """Return True if a value is a dense or sparse array with at least one axis."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    if isinstance(value, type):
        return False
    try:
        axes = len(getattr(value, "shape", ()))
    # TensorFlow raises ValueError for an unknown number of axes.
    except (TypeError, ValueError):
        return False
    return axes > 0 and (hasattr(type(value), "__getitem__") or is_sparse(value))


def read_rows(array: Array) -> Indexed:
    """Return an array as a sequence of its rows; most arrays are such a sequence already.

    Args:
        array: a value for which `has_rows` is true.

    Raises:
        SourceError: the number of rows is unknown, or the rows cannot be read.
    """
    if isinstance(array, np.ndarray):
        return array
    if is_sparse(array):
        return _sparse_rows(array)
    is_lazy = _is_lazy(array)
    if not is_lazy and _has_length(array):
        return array
    if isinstance(array.shape[0], numbers.Integral):
        return ArrayRows(array)
    cure = (
        "call source.compute_chunk_sizes() first"
        if is_lazy
        else "pass range(n), and index it in fn"
    )
    raise SourceError(
        f"source is a {type(array).__name__} of shape {array.shape}, whose length is unknown: "
        f"{cure}"
    )


def is_chunked(value: Array) -> bool:
    """Return True if `decoded.ChunkedRows` reads the rows of an array."""
    library = type(value).__module__.partition(".")[0]
    return library in _CHUNKED and isinstance(value.shape[0], numbers.Integral)


def _is_lazy(value: object) -> bool:
    return any(is_of(value, package) for package in _LAZY)


def is_sparse(value: object) -> TypeGuard[Any]:
    return is_of(value, "scipy") and hasattr(value, "tocsr")


def _sparse_rows(array: Any) -> Indexed:
    if len(array.shape) == 1:
        return np.asarray(array.toarray())
    if len(array.shape) > 2:
        raise SourceError(
            f"source is a sparse {type(array).__name__} of shape {array.shape}: pass one of two "
            "axes, such as source.reshape(len, -1), and reshape its rows in fn"
        )
    csr = array.tocsr()  # returns the array itself if it is in CSR format
    return SparseRows(csr.indptr, csr.indices, csr.data, int(array.shape[1]))


def _has_length(array: Array) -> bool:
    try:
        len(array)
    except TypeError:  # there is no `__len__`, or it refuses
        return False
    return True


def _read(row: object) -> object:
    if getattr(row, "chunks", None) is not None and hasattr(row, "compute"):
        # A row of dask. Its default scheduler would start one thread per CPU in each worker.
        row = row.compute(scheduler="synchronous")
    return np.asarray(row)
