"""Trace files: written whole or not at all, and compressed where their name says so."""

from __future__ import annotations

import gzip
from pathlib import Path

from loaderpool.system.whole_file import why_no_file, write_whole

_COMPRESSED = ".gz"
_GZIP_LEVEL = 6


def check_trace_path(path: Path) -> str:
    """Return why no trace can be written there, as an answer to "path is ..."; "": it can be."""
    if problem := why_no_file(path, "trace.json"):
        return problem
    if not path.name.endswith((".json", f".json{_COMPRESSED}")):
        return f"{str(path)!r} must end in .json or .json.gz, which viewers open"
    return ""


def write_trace(path: Path, text: str) -> None:
    """Write a trace; where that fails, what stood there before still does.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode()
    if path.name.endswith(_COMPRESSED):
        data = gzip.compress(data, _GZIP_LEVEL)
    write_whole(path, data)


def read_text(path: Path) -> str:
    """Return what a file has, compressed or not.

    Raises:
        OSError: it cannot be read.
        EOFError, ValueError: it is damaged.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return data.decode()
