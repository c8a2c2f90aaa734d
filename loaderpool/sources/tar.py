"""Tar files by sample, as WebDataset writes them."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.sources.files import FileSource, Paths, Record, refuse_compressed

# Key and field: up to the first dot after the last slash, and all after that dot. WebDataset's own rule.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_BLOCK_BYTES = 512
_DAMAGE = (tarfile.TarError, ValueError)
"""What `tarfile` raises for headers that are damaged; of numbers in extended ones some Pythons raise the second."""
_PIECE_SAMPLES = 64
"""Samples from one piece of the index to the next: some ms."""
_LOOK_BYTES = 1 << 20
"""How much after the end mark is looked at: writers fill it up with zeros, to some KiB mostly."""


class TarSamples(FileSource):
    """Samples of uncompressed tar files, in WebDataset's format, as dicts of bytes: a `FileSource`.

    Neighbours with the same name up to the first dot are a sample: `a/1.jpg` and `a/1.seg.png` are
    `{"__key__": "a/1", "jpg": …, "seg.png": …}`.

    Args:
        paths: as in `FileSource`.

    Raises:
        ArgumentError: no member of a file has a dot in its name.
        SourceError: a file is damaged, cut or no tar file. When a sample is read: a member is a link, or two have one
            name.
    """

    kind, unit = "tar", "sample"

    def __init__(self, paths: Paths) -> None:
        super().__init__(paths)

    def index(self, path: str) -> Iterator[npt.NDArray[np.int64]]:
        """Where its samples begin."""
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
                            if len(starts) == _PIECE_SAMPLES:
                                yield np.array(starts)
                                starts.clear()
                            starts.append(member.offset)
                        end = at
                    at = tar.offset
            except _DAMAGE as error:
                raise _damaged(path, at, str(error)) from error
            file.seek(at)
            _check_end(path, at, file.read(_LOOK_BYTES))
        if at and not key:
            raise ArgumentError(f"paths: there is no sample, which is a member with a dot in its name, in {path}")
        yield np.array([*starts, end])

    def read(self, handle: Any, record: Record) -> dict[str, Any]:
        """A sample, of all its members."""
        sample: dict[str, Any] = {}
        with tarfile.open(fileobj=io.BytesIO(handle.read(record)), mode="r:") as tar:
            for member in tar:
                if (name := _name_of(member)) is None:
                    continue
                if not member.isreg():
                    raise SourceError(
                        f"{self.where(record)}: the member {member.name} is a link or a device, and has no data of its "
                        "own; write the file by tar --dereference --hard-dereference"
                    )
                if name[1] in sample:
                    raise SourceError(f"{self.where(record)}: there are two members {brief(name[1])}")
                content = tar.extractfile(member)
                assert content is not None  # of a regular member
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
        raise _damaged(path, at, "there is no header, and no mark that ends a tar file")
    if found.count(0) != len(found):
        raise SourceError(
            f"{path} has more behind the mark that ends a tar file, at byte {at}: were several put together by cat? "
            "Pass them one by one, or put them together by tar --concatenate"
        )


def _damaged(path: str, at: int, what: str) -> SourceError:
    if not at:
        return SourceError(f"{path} is cut or damaged at byte 0 ({what}): is it a tar file?")
    return SourceError(
        f"{path} is cut or damaged at byte {at} ({what}), so what is behind it cannot be read. tar --extract keeps "
        "what is before it: pack that again by tar --sort=name"
    )
