"""Tar files by sample, as WebDataset writes them."""

from __future__ import annotations

import io
import re
import tarfile
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.sources.files import FileSource, Record, refuse_compressed

# Key and field: up to the first dot after the last slash, and all after that dot. WebDataset's own rule.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_BLOCK_BYTES = 512
_DAMAGE = (tarfile.TarError, ValueError)
"""What `tarfile` raises for headers that are damaged; of numbers in extended ones some Pythons raise the second."""
_LOOK_BYTES = 1 << 20
"""How much after the end mark is looked at: writers fill it up with zeros, to some KiB mostly."""


class TarSamples(FileSource):
    """Source of samples in uncompressed tar files in WebDataset format, as dicts of bytes.

    Adjacent members with the same name up to the first dot form one sample: `a/1.jpg` and `a/1.seg.png` become
    `{"__key__": "a/1", "jpg": ..., "seg.png": ...}`.

    Args:
        paths: As in `FileSource`.

    Raises:
        ArgumentError: If no member of a file has a dot in its name.
        SourceError: If a file is cut, damaged or not a tar file. Reading a sample raises it if a member is a link
            to another sample, or if two have the same name.
    """

    kind, unit = "tar", "sample"

    def index(self, path: str) -> npt.NDArray[np.int64]:
        """Return the offsets of the samples in a file."""
        refuse_compressed(path, "a sample")
        starts: list[int] = []
        key, at, end = "", 0, 0
        with open(path, "rb") as file:
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
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
            _check_end(path, at, file.read(_LOOK_BYTES))
        if at and not key:
            raise ArgumentError(f"paths: found no samples in {path}: no member has a dot in its name")
        return np.array([*starts, end], np.int64)

    def read(self, handle: Any, record: Record) -> dict[str, Any]:
        """Return one sample as a dict of its members."""
        sample: dict[str, Any] = {}
        with tarfile.open(fileobj=io.BytesIO(handle.read(record)), mode="r:") as tar:
            for member in tar:
                if (name := _name_of(member)) is None:
                    continue
                if name[1] in sample:
                    raise SourceError(f"{self.where(record)} has two members {brief(name[1])}")
                content: Any = tar.extractfile(member)  # of a link, to what this sample has
                sample.setdefault("__key__", name[0])
                sample[name[1]] = content.read()
            end = tar.offset
        if end != record.length:  # a damaged header ends the reading as the end of a file does
            raise SourceError(f"{self.where(record)}: the header at byte {record.start + end} is damaged")
        return sample


def _name_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return a member's key and field; None where it is part of no sample."""
    name = None if member.isdir() else _NAME.fullmatch(member.name)
    return None if name is None else (name[1], name[2].lower())


def _check_end(path: str, at: int, found: bytes) -> None:
    """Raise where what is at this byte, which `tarfile` takes for the end, is none."""
    if len(found) < _BLOCK_BYTES or any(found[:_BLOCK_BYTES]):
        raise _damaged(path, at, "expected a header or the end-of-archive marker")
    if found.count(0) != len(found):
        raise SourceError(
            f"{path} has data after its end-of-archive marker, at byte {at}. If cat joined several files, pass them "
            "one by one, or join them with tar --concatenate."
        )


def _damaged(path: str, at: int, what: str) -> SourceError:
    return SourceError(
        f"{path} is truncated or damaged at byte {at} ({what}), or is no tar file. The data after this byte cannot "
        "be read."
    )
