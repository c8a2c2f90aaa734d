"""Rows of datasets in HDF5 files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from loaderpool.element.structure import Structure, listed
from loaderpool.errors import ArgumentError, brief
from loaderpool.hints import known_names_only
from loaderpool.sources.files import FileSource, Paths, Record
from loaderpool.sources.tables import unequal

if TYPE_CHECKING:
    import h5py
    import numpy.typing as npt

_LEAST_CACHE_BYTES = 1 << 20
"""Smallest size of a dataset's chunk cache: HDF5's own default."""
_MOST_CACHE_BYTES = 64 << 20
"""Largest size of a dataset's chunk cache. Smaller: larger chunks are decompressed again for each
of their rows. Larger: more memory, because each worker has a cache for each dataset."""


class HDF5(FileSource):
    """Source of rows of datasets in HDF5 files, as `h5py` returns them. Needs the extra `files`.

    Shuffled reads are slow if compressed chunks have many rows: write one row per chunk.

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
        self._cache_bytes = _LEAST_CACHE_BYTES
        super().__init__(paths, makes=self._names)

    def index(self, path: str) -> int:
        """Return the number of rows of the datasets in a file."""
        import h5py

        names = self._names
        with h5py.File(path, "r") as file:
            datasets = [_dataset(file, name, path) for name in names]
            rows = [len(dataset) for dataset in datasets]
            chunks = [
                math.prod(each.chunks) * each.dtype.itemsize
                for each in datasets
                if each.chunks is not None
            ]
        # The cache has room for two chunks: several workers may read parts of one chunk, and then
        # the rows of one worker cross into the next chunk.
        self._cache_bytes = max(
            self._cache_bytes, min(2 * max(chunks, default=0), _MOST_CACHE_BYTES)
        )
        if has := unequal((brief(name, 60) for name in names), rows):
            raise ArgumentError(
                f"keys: the datasets in {path} must have the same number of rows, but {has}"
            )
        return rows[0]

    def blocks_of(self, path: str) -> npt.NDArray[np.int64]:
        """Return the first row of each chunk of the first dataset with chunks, or 0 if none has."""
        import h5py

        with h5py.File(path, "r") as file:
            datasets = [_dataset(file, name, path) for name in self._names]
            rows = [each.chunks[0] for each in datasets if each.chunks is not None]
            size = len(datasets[0])
        return np.arange(0, size, rows[0] if rows else max(1, size), dtype=np.int64)

    def open(self, path: str) -> tuple[h5py.File, list[h5py.Dataset]]:
        """Open a file in this process; return the file and its datasets.

        The last reference closes the file. A forked process closes its inherited files before it
        opens any (`_forget_inherited`). Otherwise HDF5 would return the inherited file, because it
        does not open a file twice. This closes only the fork's copy of the descriptor.
        """
        import h5py

        file = h5py.File(path, "r", rdcc_nbytes=self._cache_bytes)
        return file, [file[name] for name in self._names]

    def read(self, handle: tuple[h5py.File, list[h5py.Dataset]], record: Record) -> object:
        """Return one row of each dataset."""
        return self._structure.unflatten([dataset[record.number] for dataset in handle[1]])


def _checked_keys(keys: object) -> tuple[Structure, tuple[str, ...]]:
    structure = Structure.of(keys, origin="keys has")
    names = tuple(structure.flatten(keys))
    for name, where in zip(names, structure.paths, strict=True):
        if not isinstance(name, str):
            raise ArgumentError(f"keys{where} must be the name of a dataset, got {brief(name)}")
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
