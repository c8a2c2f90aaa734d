"""Rows of datasets in HDF5 files by index."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, SupportsIndex

from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SourceError, SpecMismatchError
from loaderpool.sources.extras import import_extra
from loaderpool.sources.file_records import fingerprint_of
from loaderpool.sources.kept_open import KeptOpen
from loaderpool.sources.open_files import Stamp, check_stamp, missing
from loaderpool.sources.parts import position_of, row_in_part
from loaderpool.sources.paths import checked_paths, described_paths
from loaderpool.system import machine

_KEPT_OPEN = 32
"""Files open at once in a process, of all such sources. Fewer: a shuffle over many files opens one for most rows, which
takes a millisecond. More: each has caches of its own."""

_LEAST_CACHE_BYTES = 1 << 20
"""Of a dataset's chunk cache; HDF5's own default."""
_MOST_CACHE_BYTES = 64 << 20
"""Smaller: larger chunks are decompressed for each of their rows. Larger: each worker has one for each dataset."""


class HDF5:
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

    __slots__ = ("__weakref__", "_cache_bytes", "_ends", "_names", "_owner", "_paths", "_stamps", "_structure")

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        keys: Any,
    ) -> None:
        structure, names = _checked_keys(keys)
        absolute = checked_paths(paths, "HDF5")
        _import_h5py()
        ends, stamps, chunk_bytes = [], [], 0
        for path in absolute:
            stamp = Stamp.of(path)  # here a file that is not there is named
            rows, largest = _look_into(path, names)
            check_stamp(path, stamp, path)
            ends.append(rows)
            stamps.append(stamp)
            chunk_bytes = max(chunk_bytes, largest)
        ends = list(itertools.accumulate(ends))
        if not ends[-1]:
            raise ArgumentError(f"keys: {_listed(names)} in {described_paths(absolute)} have no rows")
        # For two chunks: where rows are read in pieces by several workers, the end of one and the start of the next.
        cache_bytes = min(max(2 * chunk_bytes, _LEAST_CACHE_BYTES), _MOST_CACHE_BYTES)
        self._set(absolute, structure, names, tuple(ends), tuple(stamps), cache_bytes)

    def _set(
        self,
        paths: tuple[str, ...],
        structure: Structure,
        names: tuple[str, ...],
        ends: tuple[int, ...],
        stamps: tuple[Stamp, ...],
        cache_bytes: int,
    ) -> None:
        self._paths, self._structure, self._names = paths, structure, names
        self._ends, self._stamps, self._cache_bytes = ends, stamps, cache_bytes
        self._owner = _open.new_owner()
        weakref.finalize(self, _open.forget, self._owner).atexit = False

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        number, row = row_in_part(position_of(index, len(self)), self._ends)
        file = _open.get(self._owner, number, self._opened)
        file.check()
        values: list[Any] = []
        try:
            for dataset in file.datasets:
                values.append(dataset[row])  # one by one: how many there are says which one failed
        except Exception as error:  # HDF5 has no type of its own for what is damaged
            name = self._names[len(values)]
            raise SourceError(
                f"row {row} of {name!r} in {self._paths[number]} cannot be read: {type(error).__name__}: {error}"
            ) from error
        return self._structure.unflatten(values)

    def _opened(self, number: int) -> _OpenFile:
        return _OpenFile(self._paths[number], self._stamps[number], self._names, self._cache_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._paths, self._structure, self._names, self._ends, self._stamps, self._cache_bytes)

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {_listed(self._names)} in {described_paths(self._paths)}>"

    @property
    def _loaderpool_fingerprint(self) -> str:
        return fingerprint_of(self._names, self._ends, [stamp.size for stamp in self._stamps])


def _restored(*state: Any) -> HDF5:
    _import_h5py()  # once in the supervisor, so that workers inherit it
    rows = HDF5.__new__(HDF5)
    rows._set(*state)
    return rows


def _import_h5py() -> Any:
    return import_extra("h5py", what="HDF5", extra="hdf5")


class _OpenFile:
    """A file that this process has open. Ownership: closes it with the last reference.

    Also in a fork of the process, for HDF5 opens no file a second time: while it has the inherited one, any code that
    opens the path gets that. What is closed is the fork's own copy of the descriptor.
    """

    def __init__(self, path: str, stamp: Stamp, names: tuple[str, ...], cache_bytes: int) -> None:
        self._owner = os.getpid()
        self._path, self._stamp = path, stamp
        self._file = self._descriptor = self._identity = None
        try:
            check_stamp(path, stamp, path)
            self._file = _import_h5py().File(path, "r", rdcc_nbytes=cache_bytes)
            self.datasets = [self._file[name] for name in names]
        except SourceError:
            raise
        except FileNotFoundError as error:
            raise SourceError(missing(path, error)) from error
        except Exception as error:
            raise SourceError(f"{path} cannot be opened as HDF5: {type(error).__name__}: {error}") from error
        with contextlib.suppress(Exception):  # not every driver of HDF5's has one
            self._descriptor = self._file.id.get_vfd_handle()
            self._identity = _identity_of(self._descriptor)

    def check(self) -> None:
        """Raise SourceError where the file is not as it was."""
        check_stamp(self._path, self._stamp, self._path if self._descriptor is None else self._descriptor)

    def __del__(self) -> None:
        if self._file is None:
            return
        if self._owner == os.getpid() or (self._identity and self._identity == _identity_of(self._descriptor)):
            self._file.close()
        else:
            # A fork that has closed the descriptor, and may have something else under its number, that is not to close.
            _lost.append(self._file)


def _identity_of(descriptor: Any) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except (OSError, TypeError):
        return None
    return status.st_dev, status.st_ino


_lost: list[Any] = []
_open: KeptOpen[_OpenFile] = KeptOpen(machine.descriptors_to_keep(_KEPT_OPEN))


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
