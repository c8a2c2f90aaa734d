"""The samples of tar files by index, as WebDataset writes them."""

from __future__ import annotations

import array
import functools
import io
import os
import re
import tarfile
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.damaged_tail import DamagedTail, check_rule
from loaderpool.sources.file_records import FileRecords
from loaderpool.sources.paths import checked_paths
from loaderpool.sources.record_index import FileScan, head_of, index_records, refuse_compressed
from loaderpool.system.reading import read_at

# Key and field: up to the first dot behind the last slash, and all behind that dot. WebDataset's own rule.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_BLOCK_BYTES = 512
_DAMAGE = (tarfile.TarError, ValueError)
"""What `tarfile` raises for headers that are damaged; of numbers in extended ones some Pythons raise the second."""
_TOLD_SAMPLES = 64
"""Samples from one word about how far the scan is to the next: some ms."""
_LOOK_BYTES = 1 << 20
"""How much behind the end mark is looked at: writers fill it up with zeros, to some KiB mostly."""


class TarSamples(FileRecords):
    """Samples of uncompressed tar files, of several one after the other, as dicts of bytes; any is read at once.

    As WebDataset has it, a sample is the members, one behind the other, whose names are the same up to the first dot
    behind the last slash. That is its key; what is behind that dot, in lower case, names the field. `a/1.jpg` and
    `a/1.seg.png` are `{"__key__": "a/1", "jpg": …, "seg.png": …}`. Folders, and names without such a dot or with
    nothing before it, are no part of any sample.

    The headers are read once, when this is made, and where samples begin is kept: 4 bytes a sample, 8 where the files
    have 4 GiB or more together. Workers share that, and each opens the files for itself; they must stay as they are. A
    tar file has no checksums of its data: a damaged member is seen by what decodes it.

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.
        damaged_tail: what is done where a file ends without the mark that ends a tar file, or a header is damaged, so
            that nothing behind it can be found: "raise", or "skip" to have the samples before it, without the last one
            of them, of which members may be lost.

    Raises:
        ArgumentError: there is no sample in any file, a file is compressed, there is no path, or a wrong value.
        SourceError: a file is damaged, cut or no tar file, or is written to meanwhile; the members of a sample are not
            next to each other; two of them have one name; a member is a link. When a sample is read: its headers are
            damaged, or the file has changed.
        OSError: a file cannot be opened.
    """

    __slots__ = ()

    _records = "samples"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        damaged_tail: Literal["raise", "skip"] = "raise",
    ) -> None:
        tail = DamagedTail(check_rule(damaged_tail))
        absolute = checked_paths(paths, "tar")
        index = index_records(absolute, functools.partial(_scan, tail=tail))
        super().__init__(absolute, index, (tuple(tail.skipped),))
        if not len(self):
            lost = f": {'; '.join(tail.skipped[:3])}" if tail.skipped else ""
            raise ArgumentError(
                f"paths: there is no sample (a member with a dot in its name) in {self._described}{lost}"
            )

    def _makes(self) -> tuple[Any, ...]:
        return ()

    @property
    def skipped_tails(self) -> tuple[str, ...]:
        """What `damaged_tail="skip"` left out: for each such file its path, the bytes, and what is wrong with them."""
        skipped: tuple[str, ...] = self._settings[0]
        return skipped

    def _item(self, data: bytes, file: int, number: int, offset: int) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        where = f"sample {number + 1} of {self._paths[file]}"
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                for member in tar:
                    name = _NAME.fullmatch(member.name) if member.isreg() else None
                    if name is not None:
                        content = tar.extractfile(member)
                        assert content is not None  # of a regular member
                        sample.setdefault("__key__", name[1])
                        sample[name[2].lower()] = content.read()
                end = tar.offset
        except _DAMAGE as error:
            raise SourceError(f"{where} (at byte {offset}): {error}; the file is damaged") from error
        if end != len(data):  # a damaged header ends the reading as the end of a file does
            raise SourceError(f"{where}: the header at byte {offset + end} is damaged")
        return sample


def _scan(scan: FileScan, tail: DamagedTail) -> int:
    """Note where the samples of a file begin; returns where the last one ends."""
    refuse_compressed(scan.path, head_of(scan.file), "a sample", "the tar file")
    samples = _Samples(scan.path)
    file = io.BufferedReader(scan.file)
    at, what = 0, None
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                samples.add(member, tar.offset)
                at = tar.offset
                if not len(samples.starts) % _TOLD_SAMPLES:
                    scan.reached(at)
            at = tar.offset
        what = _what_is_wrong(scan, at)
    except _DAMAGE as error:
        what = str(error) if at else f"is it a tar file? {error}"
    finally:
        file.detach()
    if what is not None:
        lost = samples.drop_last()
        tail.met(scan.path, lost if lost is not None else at, scan.size, f"it is cut or damaged at byte {at} ({what})")
    samples.check_keys(scan)
    scan.add(np.array(samples.starts, np.int64))
    return samples.end


def _what_is_wrong(scan: FileScan, at: int) -> str | None:
    """Return why what is at this byte, which `tarfile` takes for the end, is none."""
    found = read_at(scan.file.fileno(), _LOOK_BYTES, at)
    if not found:
        return "the mark that ends a tar file is missing"
    if len(found) < _BLOCK_BYTES or any(found[:_BLOCK_BYTES]):
        return "the header there is none"
    if found.count(0) != len(found):
        raise SourceError(
            f"{scan.path} has more behind the mark that ends a tar file, at byte {at}: were several put together by "
            "cat? Pass them one by one, or put them together by tar --concatenate"
        )
    return None


class _Samples:
    """The samples of one file, as its members come by.

    Attributes:
        starts: where each begins.
        end: where the last one ends.
    """

    def __init__(self, path: str) -> None:
        self.starts = array.array("q")
        self.end = 0
        self._path = path
        self._hashes = array.array("q")  # of the keys: all keys would take a hundred bytes each
        self._key: str | None = None
        self._fields: set[str] = set()
        self._end_before = 0  # of the last but one

    def add(self, member: tarfile.TarInfo, end: int) -> None:
        """A member, which ends at this byte."""
        name = _NAME.fullmatch(member.name)
        if member.isdir() or name is None:
            return
        if not member.isreg():
            raise SourceError(
                f"{self._path}: the member {member.name} is a link or a device, and has no data of its own; write the "
                "file by tar --dereference --hard-dereference"
            )
        key, field = name[1], name[2].lower()
        if key != self._key:
            self._end_before = self.end
            self._key, self._fields = key, set()
            self.starts.append(member.offset)
            self._hashes.append(hash(key))
        elif field in self._fields:
            raise SourceError(
                f"{self._path}: the sample {key} has two members {field!r}, the second at byte {member.offset}"
            )
        self._fields.add(field)
        self.end = end

    def drop_last(self) -> int | None:
        """Forget the last sample, of which members may be lost; returns where it began, None where there was none."""
        if not self.starts:
            return None
        self.end = self._end_before
        self._hashes.pop()
        return self.starts.pop()

    def check_keys(self, scan: FileScan) -> None:
        """Raise SourceError where the members of a sample are not next to each other."""
        hashes = np.array(self._hashes, np.int64)
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(np.diff(hashes[order]) == 0):
            first, second = (_key_at(scan, self.starts[int(order[each])]) for each in (at, at + 1))
            if first == second:
                raise SourceError(
                    f"{self._path}: the members of the sample {first} are not next to each other (they begin at bytes "
                    f"{self.starts[int(order[at])]} and {self.starts[int(order[at + 1])]}): write the file anew, by "
                    "tar --sort=name"
                )


def _key_at(scan: FileScan, offset: int) -> str:
    with open(scan.path, "rb") as file:
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            member = tar.next()
    name = _NAME.fullmatch(member.name) if member is not None else None
    return name[1] if name is not None else ""
