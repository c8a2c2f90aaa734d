"""`FileSource`: common base of all sources over files, and of formats that users define."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from loaderpool.errors import (
    ArgumentError,
    LoaderpoolError,
    SourceError,
    brief,
    readable_bytes,
    shortened,
)
from loaderpool.hints import known_names_only
from loaderpool.sources.in_order import (
    Compression,
    InOrder,
    ReadFailedError,
    compression_of,
    head_of,
    local_chunks,
)
from loaderpool.sources.indexing import position_of
from loaderpool.sources.remote import is_of_this_process, is_url, remote_chunks
from loaderpool.sources.stream import ReplicatedSource, checked_lengths
from loaderpool.sources.tables import import_extra
from loaderpool.system import ranks
from loaderpool.system.hashes import blake2b
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.progress import Progress

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_PLAIN = frozenset({bool, int, str, tuple, type(None)})
_SHORT_OFFSETS = 1 << 32
"""Size of a file in bytes from which on offsets need more than 32 bits."""
_MOST_OPEN = 64
"""Maximum number of open files in a process, over all its sources. Smaller: a shuffle over many
files opens a file for most items. Larger: a process comes close to the 1024 descriptors that many
systems allow it, and the caches of HDF5 files need more memory."""
_ADVICE = (
    "Create the source again. To change a file while it is read, write a new file and rename it."
)


class Record(NamedTuple):
    """Location of a record."""

    path: str  # Absolute path of the file.
    number: int  # Number of the record in the file, from 0.
    # Position of the first byte; equal to `number` if `index` returned a number of records.
    start: int
    length: int  # Length in bytes; 1 if `index` returned a number of records.


class FileSource:
    """Base class of sources that read records of files by index. Subclass it for your own format.

    Each file is indexed once, when the source is made; the index takes 4 or 8 bytes per record,
    shared by all workers. A shuffle covers all records of all files. Each process keeps up to 64
    files open. A file that has changed is refused. See docs/guide/data/custom-sources.md.

    If the class defines `read_records`, files may be compressed or at URLs. All files are then read
    in order, by one generator for each file, as in `Loader.from_generator`. `shuffle=True` shuffles
    the order of the files, and `shuffle=n` also the records within a window of `n`.

    Args:
        paths: One path or URL, or a list of these, read in order. Patterns are not expanded: pass
            `sorted(glob.glob(...))`.
        makes: Plain values besides the files that determine the records. A saved state is compared
            with them, the class and the file sizes.
        shard_lengths: Number of records of each file, or one number for all, so that loaders of
            files that are read in order have a length. If a file has fewer or more, reading it is a
            `SourceError`.
        storage_options: Options of the URLs' file system, as in fsspec, such as `{"anon": True}`.

    Attributes:
        kind: Class attribute: name of the format in messages, such as `"HDF5"`.
        unit: Class attribute: name of a record in messages, such as `"line"`.
        paths: Absolute paths.

    Raises:
        SourceError: If a file or record is damaged, or has changed.
        OSError: If a file cannot be opened.
    """

    kind = "data"
    unit = "record"
    # Module that reading needs; "": none. It is imported in the main process and in the supervisor,
    # so that workers inherit it.
    _library = ""

    @known_names_only
    def __init__(
        self,
        paths: Paths,
        *,
        makes: object = (),
        shard_lengths: int | Sequence[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._import_library()
        self.paths = _checked_paths(paths, self.kind)
        self._makes = makes
        self._handles = _Handles()
        self._stamps = tuple(Stamp(0, 0) if is_url(path) else Stamp.of(path) for path in self.paths)
        self._shard_lengths = None
        if shard_lengths is not None:
            self._shard_lengths = checked_lengths(shard_lengths, len(self.paths), "files")
        self._storage_options = self._checked_options(storage_options)
        self._first_records: tuple[int, ...] = ()
        self._in_order = self._needs_order()
        if self._in_order:
            return
        self._index_files()
        if not len(self):
            raise ArgumentError(f"paths: found no {self.unit}s in {self._described}")

    # ---- methods that a subclass defines ----

    def index(self, path: str) -> int | npt.ArrayLike:
        """Return the number of records in a file, or their offsets as a list or an array.

        Offsets are the position of each record's first byte, and the end of the last record.
        """
        raise NotImplementedError(f"{type(self).__name__} must define index(path)")

    def open(self, path: str) -> Any:
        """Open a file in this process and return what `read` needs; by default, to read bytes.

        The result must close itself when nothing refers to it, as Python's files do.
        """
        return PositionedFile(path)

    def read(self, handle: Any, record: Record) -> object:
        """Return the item of a record, not a view of `handle`.

        Several threads may call this at once.

        Args:
            handle: Result of `open`; by default, `handle.read(record)` returns the bytes of the
                record.
            record: Location of the record: `path`, its `number` in the file, `start` and `length`
                in bytes. If `index` returns a number of records, use `path` and `number`, and
                define `open`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define read(handle, record)")

    def read_records(self, file: Any, path: str) -> Iterable[Any]:
        """Yield the records of a file from front to back.

        Optional: otherwise compressed files and URLs are refused.

        Args:
            file: Binary file to read from, decompressed.
            path: Its path or URL.
        """
        raise NotImplementedError(f"{type(self).__name__} must define read_records(file, path)")

    def compression_of(self, head: bytes) -> Compression | None:
        """Return the compression that a file's first 16 bytes show, or None."""
        return compression_of(head)

    def where(self, record: Record) -> str:
        """Return the name of a record in messages, such as "row 2 of /data/x.h5"."""
        if self._starts is None:
            return f"{self.unit} {record.number} of {record.path}"
        return f"{self.unit} {record.number + 1} of {record.path} (at byte {record.start})"

    # ---- the source itself ----

    def __len__(self) -> int:
        if not self._in_order:
            return self._first_records[-1]
        if self._shard_lengths is None:
            raise TypeError(
                f"the number of {self.unit}s is unknown, because {self._in_order}. Pass "
                "shard_lengths= to state it"
            )
        return sum(self._shard_lengths)

    @property
    def first_records(self) -> tuple[int, ...]:
        """Index of the first record of each file, and the number of all records."""
        return self._first_records

    def __bool__(self) -> bool:
        return True  # without this, `bool` would call `__len__`, which may raise

    def __iter__(self) -> Iterator[Any]:
        if self._in_order:
            return itertools.chain.from_iterable(map(_ReadInOrder(self), self.paths))
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: SupportsIndex) -> Any:
        if self._in_order:
            raise SourceError(
                f"{self!r} cannot be indexed, because {self._in_order}. Pass it to a Loader, or "
                "iterate"
            )
        position = position_of(index, len(self))
        # `bisect_right` skips files without records.
        file = bisect.bisect_right(self._first_records, position) - 1
        number = position - self._first_records[file]
        start, end = number, number + 1
        if self._starts is not None:
            start, end = self._starts[position + file : position + file + 2].tolist()
        record = Record(self.paths[file], number, start, end - start)
        handle = self._handle(file)
        try:
            return self.read(handle, record)
        except (LoaderpoolError, NotImplementedError):
            raise
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise SourceError(
                f"{self.where(record)} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def __repr__(self) -> str:
        if self._in_order:
            return f"<{self.unit}s of {self._described}, read in order>"
        return f"<{len(self)} {self.unit}{'s' * (len(self) != 1)} of {self._described}>"

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._import_library()

    @property
    def _described(self) -> str:
        return (
            self.paths[0]
            if len(self.paths) == 1
            else f"{len(self.paths)} files from {self.paths[0]} on"
        )

    @property
    def _loaderpool_fingerprint(self) -> str:
        """Fingerprint of the records, for saved states.

        It uses neither local paths nor times. So it is the same in each process, and for copies of
        the files in another place.
        """
        sizes: list[Any] = [stamp.size for stamp in self._stamps]
        facts: tuple[Any, ...] = self._makes, sizes, self._first_records
        if self._in_order:  # the size of a remote file is unknown, so its name counts
            names = [path.rpartition("/")[2] if is_url(path) else "" for path in self.paths]
            facts = *facts, names, self._shard_lengths
        return blake2b(repr(facts).encode(), digest_size=8).hexdigest()

    @property
    def _loaderpool_generators(self) -> ReplicatedSource | None:
        """Generators to use if the files are read in order. None if they are read by index."""
        if not self._in_order:
            return None
        source = ReplicatedSource(
            _ReadInOrder(self), self.paths, None, shard_lengths=self._shard_lengths
        )
        source.reads_files = True
        source.only_here = next((path for path in self.paths if is_of_this_process(path)), None)
        return source

    def _needs_order(self) -> str:
        """Return why the files must be read in order, or "" if they are read by index."""
        can = type(self).read_records is not FileSource.read_records
        for path in self.paths:
            if is_url(path):
                if not can:
                    raise ArgumentError(
                        f"paths: {path} is a URL, from which {type(self).__name__} cannot read. "
                        "Download the file, and pass its path"
                    )
                return f"{path} is a URL"
            if can and (found := self.compression_of(head_of(path))) is not None:
                if found.make is None:
                    raise ArgumentError(
                        f"paths: {path} is a {found.name} file. Extract it, and pass the result"
                    )
                return f"{path} is compressed"
        return ""

    def _checked_options(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        if options is None:
            return {}
        if not isinstance(options, Mapping):
            raise ArgumentError(
                f"storage_options must be a dict of fsspec's options, got {brief(options)}"
            )
        if not any(map(is_url, self.paths)):
            raise ArgumentError(f"storage_options needs URLs in paths, got {self.paths[0]}")
        return dict(options)

    def _import_library(self) -> None:
        if self._library:
            import_extra(self._library, type(self).__name__)

    def _index_files(self) -> None:
        # Ranks share only the indexes of loaderpool's own classes. The index of a user's class may
        # depend on more than these facts.
        if type(self).__module__.startswith("loaderpool.") and ranks.are_here():
            from loaderpool.sources.shared_index import shared_index

            settings = {name: each for name, each in vars(self).items() if type(each) in _PLAIN}
            facts = repr((type(self), self._stamps, self._versions(), settings))
            found = shared_index(facts, self.kind, self._made_index)
        else:
            found = self._made_index()
        self._first_records, self._starts = found

    def _versions(self) -> list[tuple[int, int]]:
        """Return numbers that change if another file with an equal stamp takes a path.

        They differ between machines, so only processes of one machine compare them.
        """
        return [(each.st_ino, each.st_ctime_ns) for each in map(os.stat, self.paths)]

    def _made_index(self) -> tuple[tuple[int, ...], npt.NDArray[Any] | None]:
        """Index all files. Return `first_records`, and the offsets of all files in one array.

        Each file has one more offset than records. So if record i of all files is in file f, its
        offset is element i + f of the array.
        """
        sizes = [stamp.size for stamp in self._stamps]
        dtype = np.uint32 if max(sizes) < _SHORT_OFFSETS else np.int64
        counts: list[int] = []
        pieces: list[npt.NDArray[Any]] = []
        progress = Progress(
            f"finding {self.unit}s: {{done}} of {readable_bytes(sum(sizes))} were read in {{time}}"
        )
        for path, stamp, end in zip(
            self.paths, self._stamps, itertools.accumulate(sizes), strict=True
        ):
            with self._named(path):
                found = self.index(path)
                if isinstance(found, (int, np.integer)):
                    counts.append(int(found))
                else:
                    offsets = self._checked_offsets(found, stamp.size)
                    pieces.append(offsets.astype(dtype))
                    counts.append(len(offsets) - 1)
                stamp.check(path)
            if path is not self.paths[-1]:
                progress.reach(readable_bytes(end))
        for path, count, stated in zip(
            self.paths, counts, self._shard_lengths or counts, strict=True
        ):
            if count != stated:
                raise SourceError(
                    f"{path} has {count} {self.unit}s, but shard_lengths states {stated}"
                )
        starts = np.concatenate(pieces) if pieces else None
        if starts is not None:
            starts.flags.writeable = False
        return tuple(itertools.accumulate(counts, initial=0)), starts

    def _checked_offsets(self, found: npt.ArrayLike, size: int) -> npt.NDArray[Any]:
        offsets = np.asarray(found)
        if offsets.shape == (0,):
            return np.zeros(1, np.int64)
        is_list = offsets.ndim == 1 and offsets.dtype.kind in "iu"
        if (
            not is_list
            or offsets[0] < 0
            or offsets[-1] > size
            or (offsets[1:] < offsets[:-1]).any()
        ):
            raise SourceError(
                f"{type(self).__name__}.index must return a number of records, or ascending "
                f"offsets up to the file size ({size}), got {brief(found)}"
            )
        return offsets

    def _handle(self, file: int) -> object:
        """Return this process's open handle of a file; open the file if there is none.

        Several threads may call this at once. No lock is needed, because each step is one call of a
        dict method. A dropped handle closes itself when the last thread has finished reading from
        it.
        """
        if _recent_in != os.getpid():
            _forget_inherited()
        key = id(self._handles), file
        try:
            handle = self._handles[file]
            _recent.move_to_end(key)
            return handle
        except KeyError:  # not open, or just dropped by another thread
            pass
        path = self.paths[file]
        self._stamps[file].check(path)
        with self._named(path):
            handle = self._handles.setdefault(file, self.open(path))
        _recent[key] = weakref.ref(self._handles)
        with contextlib.suppress(KeyError):  # another thread has dropped it since
            _recent.move_to_end(key)  # the key may be an old one, of a deleted source with this id
        while len(_recent) > _MOST_OPEN:
            (_, oldest), reference = _recent.popitem(last=False)
            if (handles := reference()) is not None:
                handles.pop(oldest, None)
        return handle

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Convert errors of the format's code to a `SourceError` that names the file."""
        try:
            yield
        except (LoaderpoolError, ImportError, NotImplementedError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # formats raise OSErrors without errno
                raise
            if is_of_a_handler(error):
                raise
            raise SourceError(
                f"{path} cannot be read as {self.kind} ({type(error).__name__}: {error}). The file "
                "is truncated, damaged, or has another format."
            ) from error


class BlockFileSource(FileSource):
    """Base of sources over files that are decoded in blocks of rows (`decoded.KeptBlocks`)."""

    def blocks_of(self, path: str) -> npt.ArrayLike:
        """Return the first row of each block of a file."""
        raise NotImplementedError

    def rows_of(self, handle: Any, path: str, rows: list[int]) -> Sequence[Any]:
        """Return the items of several rows of one file.

        Args:
            handle: Result of `open`.
            path: Path of the file.
            rows: Numbers of the rows in the file.
        """
        raise NotImplementedError

    def read_rows(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of these indices. Each block that contains some is decoded once."""
        if len(indices) == 1:  # `__getitem__` raises errors that name the row
            return [self[indices[0]]]
        files = np.searchsorted(self._first_records, indices, side="right") - 1
        found: list[Any] = [None] * len(indices)
        for file in np.unique(files).tolist():
            places = np.flatnonzero(files == file).tolist()
            first = self._first_records[file]
            rows = [indices[place] - first for place in places]
            items = self.rows_of(self._handle(file), self.paths[file], rows)
            for place, item in zip(places, items, strict=True):
                found[place] = item
        return found


class _ReadInOrder:
    """Generator function of a loader: reads one file of a source from front to back."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.__qualname__ = type(source).__name__  # name in messages

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the user's source, for messages (`walk.parts_of`)."""
        return [("", self._source)]

    def __call__(self, path: str) -> Iterator[Any]:
        source, number = self._source, 0
        if is_url(path):
            chunks = remote_chunks(path, source._storage_options)
        else:
            source._stamps[source.paths.index(path)].check(path)
            chunks = local_chunks(path)
        try:
            with InOrder(chunks, path, source.compression_of) as file:
                for item in source.read_records(file, path):
                    number += 1
                    yield item
        except ReadFailedError as error:
            raise SourceError(f"{source.unit} {number + 1} of {path} {error}") from error
        except (LoaderpoolError, ImportError, NotImplementedError):
            raise
        except Exception as error:
            if is_of_a_handler(error) or (isinstance(error, OSError) and error.errno):
                raise
            raise SourceError(
                f"{source.unit} {number + 1} of {path} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error


# ---- open files ----


class Stamp(NamedTuple):
    """Size and modification time of a file when it was indexed."""

    size: int
    modified_ns: int

    @staticmethod
    def of(path: str) -> Stamp:
        """Return the present stamp of a file."""
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise SourceError(
                f"{path} is a directory: pass the files in it, such as "
                f"sorted(glob.glob({brief(path + '/*', 200)}))"
            )
        return Stamp(status.st_size, status.st_mtime_ns)

    def check(self, path: str) -> None:
        """Raise SourceError if the file's present stamp differs."""
        if (now := Stamp.of(path)) != self:
            sizes = (
                f"was {self.size} bytes, now {now.size}"
                if now.size != self.size
                else "same size, another time"
            )
            raise SourceError(f"{path} has changed since it was indexed ({sizes}). {_ADVICE}")


class _Handles(dict[int, Any]):
    """Open handles of one source in this process, by number of the file. Pickled empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Handles, ()


# Open handles of all sources, by id of `_Handles` and number of the file. The most recently used
# handle is the last one.
_recent: OrderedDict[tuple[int, int], weakref.ref[_Handles]] = OrderedDict()
_recent_in = os.getpid()


def _forget_inherited() -> None:
    """Close all inherited handles. Called in a forked process, before it opens a file.

    Otherwise HDF5 would return the inherited file instead of opening it again.
    """
    global _recent_in
    for reference in list(_recent.values()):
        if (handles := reference()) is not None:
            handles.clear()
    _recent.clear()
    _recent_in = os.getpid()


_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_lock = threading.Lock()


def _read_in_turn(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Seek and read, under a lock for the threads of this process. For Windows, without `pread`."""
    with _lock:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, nbytes)


# read_at(descriptor, nbytes, offset) returns at most `nbytes` bytes from `offset` on.
read_at = os.pread if hasattr(os, "pread") else _read_in_turn


class PositionedFile:
    """An open file, read by position.

    Ownership: owns the descriptor, and closes it with the last reference. In a forked process it is
    not closed, because the descriptor's number may belong to another file there.
    """

    __slots__ = ("_descriptor", "_owner")

    def __init__(self, path: str) -> None:
        self._owner = 0
        self._descriptor = os.open(path, _READ_ONLY)
        self._owner = os.getpid()

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, close: Callable[[int], None] = os.close
    ) -> None:
        if self._owner == getpid():
            close(self._descriptor)

    def read(self, record: Record) -> bytes:
        """Return exactly the record's bytes."""
        data = read_at(self._descriptor, record.length, record.start)
        # A signal, a network file system or a truncated file may return fewer bytes.
        while len(data) < record.length:
            more = read_at(self._descriptor, record.length - len(data), record.start + len(data))
            if not more:
                raise SourceError(
                    f"{record.path} ends before byte {record.start + record.length}. {_ADVICE}"
                )
            data += more
        return data


# ---- paths ----


def _checked_paths(paths: Paths, kind: str) -> tuple[str, ...]:
    """Return absolute paths in the given order.

    Patterns are refused, because the order of their matches varies by machine.
    """
    given: Sequence[Any] = paths if isinstance(paths, (list, tuple)) else [paths]
    if not given:
        raise ArgumentError(
            f"paths is empty: pass at least one {kind} file. If it comes from glob, check the "
            "pattern."
        )
    try:
        texts = [os.fsdecode(path) for path in given]
    except TypeError:
        raise ArgumentError(
            f"paths must be a path, or a list of paths, got {brief(paths)} of type "
            f"{type(paths).__name__}"
        ) from None
    return tuple(text if is_url(text) else _checked_path(text) for text in texts)


def _checked_path(path: str) -> str:
    """Return the absolute path of a file. A missing file is an error only when it is opened."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: the path contains a NUL character
        if any(sign in path for sign in "*?["):
            raise ArgumentError(
                f"paths: there is no file {shortened(path)}. Patterns are not expanded: pass "
                f"sorted(glob.glob({brief(path)}))"
            ) from None
        return os.path.abspath(path)
    # Reading such a file may block for ever.
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode):
        raise ArgumentError(
            f"paths: {shortened(path)} is a pipe, socket or device: write its data to a regular "
            "file first"
        )
    return os.path.abspath(path)
