"""Rows of datasets in HDF5 files."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loaderpool.element.structure import Structure, listed
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only
from loaderpool.sources.decoded import ChunkedRows, KeptBlocks, chunk_rows, row_bytes
from loaderpool.sources.files import BlockFileSource, Paths, Record
from loaderpool.sources.tables import unequal

if TYPE_CHECKING:
    import h5py
    import numpy.typing as npt


# Package whose import registers compression filters with HDF5, in this process only.
_FILTERS = "hdf5plugin"


class HDF5(BlockFileSource):
    """Source of rows of datasets in HDF5 files, as `h5py` returns them. Needs the extra `files`.

    HDF5 decompresses whole chunks. `shuffle=True` decompresses one for almost each row; use
    `order=Blocks()` instead, or write one row per chunk (docs/guide/data/hdf5.md).

    Args:
        paths: As in `FileSource`.
        keys: Name of a dataset, such as `"train/images"`, or a tuple or dict of names; items have
            the same structure.

    Raises:
        ArgumentError: If a dataset is missing or has no rows, or if the numbers of rows differ.
        SourceError: If a file is cut, damaged or not an HDF5 file; when a row is read, if it is
            damaged.
    """

    kind, unit = "HDF5", "row"
    _library = "h5py"

    @known_names_only
    def __init__(self, paths: Paths, keys: object) -> None:
        self._structure, self._names = _checked_keys(keys)
        self._kept = [KeptBlocks() for _ in self._names]
        self._has_filters = _FILTERS in sys.modules
        super().__init__(paths, makes=self._names)

    def index(self, path: str) -> int:
        """Return the number of rows of the datasets in a file."""
        import h5py

        names = self._names
        with h5py.File(path, "r") as file:
            datasets = [_dataset(file, name, path) for name in names]
            rows = [len(dataset) for dataset in datasets]
        if has := unequal((brief(name, 60) for name in names), rows):
            raise ArgumentError(
                f"keys: the datasets in {path} must have the same number of rows, but {has}"
            )
        return rows[0]

    def blocks_of(self, path: str) -> npt.NDArray[np.int64]:
        """Return the first row of each chunk of the dataset that has the largest chunks."""
        import h5py

        with h5py.File(path, "r") as file:
            datasets = [_dataset(file, name, path) for name in self._names]
            largest = max(datasets, key=lambda each: chunk_rows(each) * row_bytes(each))
            size = len(largest)
            rows = chunk_rows(largest) or max(1, size)
        return np.arange(0, size, rows, dtype=np.int64)

    def open(self, path: str) -> tuple[h5py.File, list[ChunkedRows]]:
        """Open a file in this process; return the file and the rows of its datasets.

        The last reference closes the file. A forked process closes its inherited files before it
        opens any (`_forget_inherited`). Otherwise HDF5 would return the inherited file, because it
        does not open a file twice. This closes only the fork's copy of the descriptor.
        """
        import h5py

        if self._has_filters:  # the program has imported it, so workers need it too
            importlib.import_module(_FILTERS)
        file = h5py.File(path, "r")
        check = functools.partial(self._stamps[self.paths.index(path)].check, path)
        columns = zip(self._names, self._kept, strict=True)
        return file, [ChunkedRows(file[name], kept, path, check) for name, kept in columns]

    def read(self, handle: tuple[h5py.File, list[ChunkedRows]], record: Record) -> object:
        """Return one row of each dataset."""
        return self._structure.unflatten([column[record.number] for column in handle[1]])

    def rows_of(
        self, handle: tuple[h5py.File, list[ChunkedRows]], path: str, rows: list[int]
    ) -> Sequence[Any]:
        """Return several rows of each dataset."""
        columns = [column.read_rows(rows) for column in handle[1]]
        return [self._structure.unflatten(list(leaves)) for leaves in zip(*columns, strict=True)]


def _checked_keys(keys: object) -> tuple[Structure, tuple[str, ...]]:
    structure = Structure.of(keys, origin="keys has")
    names = tuple(structure.flatten(keys))
    for name, where in zip(names, structure.paths, strict=True):
        if not isinstance(name, str):
            advice = ""
            if isinstance(name, list) and {*map(type, name)} == {str}:
                advice = f": write {brief(tuple(name) if len(name) > 1 else name[0])}"
            raise ArgumentError(
                f"keys{where} must be the name of a dataset, or a tuple or dict of names, got "
                f"{brief(name)}{advice}"
            )
    return structure, names


def _dataset(file: h5py.File, name: str, path: str) -> h5py.Dataset:
    import h5py

    found = file.get(name)
    if isinstance(found, h5py.Dataset) and found.shape:
        return found
    names: list[str] = []
    file.visititems(
        lambda each, value: names.append(each) if isinstance(value, h5py.Dataset) else None
    )
    if found is None and name.strip("/") in names:
        return file[name]  # this raises the error that `get` has hidden
    has = f"the file has the datasets {listed(names) or 'none'}"
    raise ArgumentError(f"keys: {brief(name)} in {path} is no dataset with rows; {has}")
