"""The values of JSON lines files by index."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from loaderpool.errors import ArgumentError, SourceError
from loaderpool.sources.file_records import FileRecords
from loaderpool.sources.line_index import scan_lines
from loaderpool.sources.paths import checked_paths
from loaderpool.sources.record_index import FileScan, head_of, index_records, refuse_compressed


class JsonLines(FileRecords):
    r"""Values of JSON lines files (one on each line, in UTF-8), of several one after the other; any is read at once.

    The files are read once, when this is made, and where lines begin is kept: 4 bytes a line, 8 where the files have
    4 GiB or more together. Workers share that, and each opens the files for itself; they must stay as they are.

    Empty lines are no items. A line is parsed when it is read, so a damaged one is an error of that item.

    Args:
        paths: one path or a list of them, read in this order; relative ones are looked up now, not in the workers.

    Raises:
        ArgumentError: there is no line in any file, a file is compressed, or there is no path.
        ArgumentTypeError: `paths` is of a wrong type.
        SourceError: a file is written to meanwhile. When an item is read: it is no JSON, or the file has changed.
        OSError: a file cannot be opened.
    """

    __slots__ = ()

    _records = "JSON lines"

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        absolute = checked_paths(paths, "JSON lines")
        super().__init__(absolute, index_records(absolute, _scan), ())
        if not len(self):
            raise ArgumentError(f"paths: there is no line in {self._described}, or only empty ones")

    def _item(self, data: bytes, file: int, number: int, offset: int) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8
            raise SourceError(
                f"{self._where(file, number, offset)} is no JSON: {type(error).__name__}: {error}"
            ) from error


def _scan(scan: FileScan) -> int:
    refuse_compressed(scan.path, head_of(scan.file), "a line", "the text file")
    scan_lines(scan, skip_blank=True)
    return scan.size
