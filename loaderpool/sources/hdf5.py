"""Rows of datasets in HDF5 files by index."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError, SpecMismatchError
from loaderpool.sources.extras import import_extra
from loaderpool.sources.indexed_files import IndexedFiles
from loaderpool.sources.paths import described_paths
from loaderpool.system.machine import file_identity

_LEAST_CACHE_BYTES = 1 << 20
"""Of a dataset's chunk cache; HDF5's own default."""
_MOST_CACHE_BYTES = 64 << 20
"""Smaller: larger chunks are decompressed for each of their rows. Larger: each worker has one for each dataset."""


class HDF5(IndexedFiles):
    """Rows of one dataset in HDF5 files, or of several side by side; of several files one after the other.

    Each process opens the files for itself when it reads the first row of one, and never uses what was opened before a
    fork. Files must stay as they are. Rows are what `h5py` gives: arrays, NumPy scalars, or bytes.

    Needs the extra `hdf5` (h5py).

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        keys: a dataset's name, such as "images" or "train/images"; or a tuple or dict of names (nested at will), whose
            datasets have as many rows: items are built alike.

    Raises:
        ArgumentError: a dataset is not there, or has no rows; numbers of rows differ; there is no path.
        ArgumentTypeError: an argument is of a wrong type.
        SourceError: a file is damaged, cut or no HDF5 file. When a row is read: it cannot be, or the file has changed.
        ImportError: the extra is not installed.
        OSError: a file is not there.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: Any,
    ) -> None:
        structure, names = _checked_keys(keys)
        self._structure, self._names = structure, names
        self._cache_bytes = _LEAST_CACHE_BYTES
        super().__init__(paths, kind="HDF5", makes=names)

    def look_into(self, path: str) -> list[int]:
        """How many rows a file's datasets have; what its chunks need of the cache is noted."""
        rows, chunk_bytes = _look_into(path, self._names)
        # For two chunks: where rows are read in pieces by several workers, the end of one and the start of the next.
        self._cache_bytes = max(self._cache_bytes, min(2 * chunk_bytes, _MOST_CACHE_BYTES))
        return [rows]

    def open(self, path: str, part: int) -> _OpenFile:
        """A file, as this process has it open."""
        return _OpenFile(path, self._names, self._cache_bytes)

    def item(self, opened: _OpenFile, row: int) -> Any:
        """A row of each dataset."""
        values: list[Any] = []
        try:
            for dataset in opened.datasets:
                values.append(dataset[row])  # one by one: how many there are says which one failed
        except Exception as error:  # HDF5 has no type of its own for what is damaged
            name = self._names[len(values)]
            raise SourceError(
                f"row {row} of {name!r} in {opened.path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        return self._structure.unflatten(values)

    def load_library(self) -> None:
        """Import h5py."""
        _import_h5py()

    def nothing(self) -> str:
        """The datasets are there and empty."""
        return f"keys: {_listed(self._names)} in {described_paths(self.paths)} have no rows"

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {_listed(self._names)} in {described_paths(self.paths)}>"


def _import_h5py() -> Any:
    return import_extra("h5py", what="HDF5", extra="hdf5")


class _OpenFile:
    """A file that this process has open. Ownership: closes it with the last reference.

    Also in a fork of the process, for HDF5 opens no file a second time: while it has the inherited one, any code that
    opens the path gets that. What is closed is the fork's own copy of the descriptor.
    """

    def __init__(self, path: str, names: tuple[str, ...], cache_bytes: int) -> None:
        self._owner, self.path = os.getpid(), path
        self._file = self._descriptor = self._identity = None
        self._file = _import_h5py().File(path, "r", rdcc_nbytes=cache_bytes)
        self.datasets = [self._file[name] for name in names]
        with contextlib.suppress(Exception):  # not every driver of HDF5's has one
            self._descriptor = self._file.id.get_vfd_handle()
            self._identity = file_identity(self._descriptor)

    def fileno(self) -> int | None:
        """The descriptor, or None where HDF5 tells of none."""
        return self._descriptor

    def __del__(self) -> None:
        if self._file is None:
            return
        if self._owner == os.getpid() or (self._identity and self._identity == file_identity(self._descriptor)):
            self._file.close()
        else:
            # A fork that has closed the descriptor, and may have something else under its number, that is not to close.
            _lost.append(self._file)


_lost: list[Any] = []


def _checked_keys(keys: Any) -> tuple[Structure, tuple[str, ...]]:
    if isinstance(keys, list):
        raise ArgumentTypeError("keys is a list: give a tuple of names for items that are tuples, or a dict for dicts")
    try:
        structure = Structure.of(keys, origin="keys has")
    except SpecMismatchError as error:
        raise ArgumentError(str(error)) from None
    names = tuple(structure.flatten(keys))
    for name, where in zip(names, structure.paths, strict=True):
        if not isinstance(name, str):
            raise ArgumentTypeError(f"keys{where} must be the name of a dataset, got {name!r}")
    return structure, names


def _look_into(path: str, names: tuple[str, ...]) -> tuple[int, int]:
    """How many rows the datasets have, and how large the largest chunk is, in bytes.

    Raises:
        ArgumentError: a dataset is not there, or has no rows, or their numbers of rows differ.
        SourceError: the file is damaged, or no HDF5 file.
    """
    h5py = _import_h5py()
    try:
        with h5py.File(path, "r") as file:
            found = [_measure(file, name, path, h5py) for name in names]
    except (ArgumentError, ImportError):
        raise
    except Exception as error:  # HDF5 has no type of its own for what is damaged, at any step
        raise SourceError(
            f"{path} cannot be opened as HDF5 ({type(error).__name__}: {error}): it is cut, damaged, being written to, "
            "or no HDF5 file. Nothing of a file that was cut can be read"
        ) from error
    rows = {name: count for name, (count, _) in zip(names, found, strict=True)}
    if len(set(rows.values())) > 1:
        raise ArgumentError(
            f"keys: the datasets in {path} are read side by side, and their numbers of rows differ: "
            + ", ".join(f"{name!r} has {count}" for name, count in rows.items())
        )
    return next(iter(rows.values())), max(chunk_bytes for _, chunk_bytes in found)


def _measure(file: Any, name: str, path: str, h5py: Any) -> tuple[int, int]:
    """Of one dataset its rows, and the bytes of a chunk."""
    try:
        dataset = file[name]
    except KeyError:
        others = _datasets_in(file, h5py)  # where this raises, too, the file is damaged
        if name.strip("/") in others:
            raise
        raise ArgumentError(
            f"keys: there is no {name!r} in {path}; it has {', '.join(map(repr, others[:8])) or 'no dataset'}"
        ) from None
    if isinstance(dataset, h5py.Group):
        inner = ", ".join(repr(f"{name}/{each}") for each in _datasets_in(dataset, h5py)[:8]) or "none"
        raise ArgumentError(f"keys: {name!r} in {path} is a group; its datasets are {inner}")
    if not isinstance(dataset, h5py.Dataset):
        raise ArgumentError(f"keys: {name!r} in {path} is a {type(dataset).__name__} of HDF5's, no dataset")
    if not dataset.shape:
        raise ArgumentError(f"keys: {name!r} in {path} is a single value and has no rows")
    return len(dataset), 0 if dataset.chunks is None else math.prod(dataset.chunks) * dataset.dtype.itemsize


def _datasets_in(group: Any, h5py: Any) -> list[str]:
    """Names of the datasets in a group."""
    names: list[str] = []

    def visit(name: str, each: Any) -> None:
        if isinstance(each, h5py.Dataset):
            names.append(name)

    group.visititems(visit)
    return names


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
