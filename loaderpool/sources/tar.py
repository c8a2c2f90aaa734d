"""Samples in tar files of WebDataset."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.hints import known_names_only
from loaderpool.sources.files import FileSource, Paths, PositionedFile, Record
from loaderpool.sources.in_order import InOrder
from loaderpool.system.interrupts import is_of_a_handler

# Key and field of a member's name. The key ends before the first dot after the last slash. The
# field is the text after that dot. WebDataset has the same rule.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_BLOCK_BYTES = 512
_DAMAGE = (tarfile.TarError, ValueError)
"""Errors that `tarfile` raises for damaged headers. Some Python versions raise ValueError for
numbers in extended headers."""
_PLAIN = {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
"""Types of members whose data is one range of the file."""
_LOOK_BYTES = 1 << 20
"""Number of bytes after the end-of-archive marker that are checked. Writers add zeros there, in
most cases up to some KiB."""


class TarSamples(FileSource):
    """Source of samples in tar files in WebDataset format, as dicts of bytes.

    URLs need the extra `remote`. Adjacent members with the same name up to the first dot form one
    sample: `a/1.jpg` and `a/1.seg.png` become `{"__key__": "a/1", "jpg": ..., "seg.png": ...}`.

    Uncompressed local files are read by index. If a file is compressed (gzip, bzip2, xz, zstd) or
    at a URL, all are read in order, by one generator for each file.

    Args:
        paths: As in `FileSource`.
        shard_lengths: As in `FileSource`.
        storage_options: As in `FileSource`.

    Raises:
        ArgumentError: If no member of a file has a dot in its name.
        SourceError: If a file is cut, damaged or not a tar file. Reading a sample raises it if a
            member is a link to another sample, or if two have the same name.
    """

    kind, unit = "tar", "sample"

    @known_names_only
    def __init__(
        self,
        paths: Paths,
        *,
        shard_lengths: int | Sequence[int] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(paths, shard_lengths=shard_lengths, storage_options=storage_options)

    def index(self, path: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the samples in a file."""
        starts: list[int] = []
        key, at, end = "", 0, 0
        with open(path, "rb") as file:
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    for member in _members(tar):
                        at = tar.offset
                        if (name := _name_of(member)) is None:
                            continue
                        if name[0] != key:
                            key = name[0]
                            starts.append(member.offset)
                        end = at
                    at = tar.offset
            except _DAMAGE as error:
                raise _damaged(path, at, str(error)) from error
            file.seek(at)
            if problem := _problem_at_end(at, file.read(_LOOK_BYTES)):
                raise _damaged(path, at, problem)
        if at and not key:
            raise ArgumentError(
                f"paths: found no samples in {path}: no member has a dot in its name"
            )
        return np.array([*starts, end], np.int64)

    def read(self, handle: PositionedFile, record: Record) -> dict[str, Any]:
        """Return one sample as a dict of its members."""
        sample, end = _sample_of(handle.read(record), self.where(record))
        if end != record.length:  # `tarfile` treats a damaged header as the end of the file
            raise SourceError(
                f"{self.where(record)}: the header at byte {record.start + end} is damaged"
            )
        return sample

    def read_records(self, file: InOrder, path: str) -> Iterator[dict[str, Any]]:
        """Yield each sample as a dict of its members."""
        key, number, at, end = "", 0, 0, 0
        members: list[tuple[str, tarfile.TarInfo]] = []  # fields and members of this sample

        def sample() -> dict[str, Any]:
            where = f"sample {number} of {path} (at byte {file.keep_from})"
            return _joined(key, members, file, end, where)

        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in _members(tar):
                    at = tar.offset
                    if (name := _name_of(member)) is None:
                        continue
                    if name[0] != key:
                        if members:
                            yield sample()
                        key, number, members = name[0], number + 1, []
                        file.keep_from = member.offset
                    members.append((name[1], member))
                    end = at
                at = tar.offset
        except _DAMAGE as error:
            raise _damaged_in_order(path, number, at, str(error)) from error
        if end > file.seek(end):
            raise _damaged_in_order(path, number, at, "unexpected end of data")
        if members:
            yield sample()
        elif at:
            raise SourceError(f"found no samples in {path}: no member has a dot in its name")
        file.keep_from = None
        file.seek(at)
        if problem := _problem_at_end(at, file.read(_LOOK_BYTES)):
            raise _damaged_in_order(path, number, at, problem)
        # The rest is read as well, because compressed data has its checksum at the end.
        while file.read(_LOOK_BYTES):
            pass


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members from front to back. The `TarFile` does not keep them, to save memory."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]
        yield member


def _name_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return a member's key and field, or None if it belongs to no sample."""
    name = None if member.isdir() else _NAME.fullmatch(member.name)
    return None if name is None else (name[1], name[2].lower())


def _sample_of(data: bytes, where: str) -> tuple[dict[str, Any], int]:
    """Return the sample in the bytes of its members, and the end of the last member."""
    sample: dict[str, Any] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            if (name := _name_of(member)) is None:
                continue
            if name[1] in sample:
                raise SourceError(f"{where} has two members {brief(name[1])}")
            content = tar.extractfile(member)  # a link must refer to a member of this sample
            if content is None:
                raise SourceError(f"{where} cannot be read: {brief(member.name)} is not a file")
            sample.setdefault("__key__", name[0])
            sample[name[1]] = content.read()
        return sample, tar.offset


def _joined(
    key: str, members: list[tuple[str, tarfile.TarInfo]], file: InOrder, end: int, where: str
) -> dict[str, Any]:
    """Return the sample of these members. The file has kept their bytes, from `keep_from` to `end`.

    Args:
        key: key of the sample.
        members: fields and members of the sample.
        file: the tar file.
        end: end of the last member.
        where: name of the sample, for messages.
    """
    start = file.keep_from
    assert start is not None
    fields = dict(members)
    if len(fields) < len(members) or not all(member.type in _PLAIN for member in fields.values()):
        try:
            return _sample_of(file.between(start, end), where)[0]
        except Exception as error:
            if is_of_a_handler(error) or isinstance(error, SourceError):
                raise
            raise SourceError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    sample: dict[str, Any] = {"__key__": key}
    for field, member in fields.items():
        sample[field] = file.between(member.offset_data, member.offset_data + member.size)
    return sample


_END = "expected a header or the end-of-archive marker"
_JOINED = "there is data after its end-of-archive marker"


def _problem_at_end(at: int, found: bytes) -> str:
    """Return the reason why the archive does not end at `at`, or "" if it does.

    `tarfile` also treats a damaged header as the end of the archive.

    Args:
        at: position at which `tarfile` has ended.
        found: bytes of the file from this position on.
    """
    if len(found) < _BLOCK_BYTES or any(found[:_BLOCK_BYTES]):
        return _END
    return _JOINED if found.count(0) != len(found) else ""


def _damaged_in_order(path: str, number: int, at: int, what: str) -> SourceError:
    advice = ". " + _SEPARATE if what == _JOINED else ""
    return SourceError(
        f"{path} is truncated or damaged at byte {at}, in or after sample {number} ({what}){advice}"
    )


_SEPARATE = (
    "If cat joined several files, pass them one by one, or join them with tar --concatenate."
)


def _damaged(path: str, at: int, what: str) -> SourceError:
    if what == _JOINED:
        return SourceError(
            f"{path} has data after its end-of-archive marker, at byte {at}. {_SEPARATE}"
        )
    return SourceError(
        f"{path} is truncated or damaged at byte {at} ({what}), or is no tar file. The data after "
        "this byte cannot be read."
    )
