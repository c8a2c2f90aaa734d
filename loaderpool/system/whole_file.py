"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def why_no_file(path: Path, example: str) -> str:
    """Return why no file can stand there, as an answer to "path is ..."; "": one can, as far as is seen beforehand."""
    if path.is_dir():
        return f"{str(path)!r} is a directory: name a file, such as {str(path / example)!r}"
    if not path.parent.is_dir():
        return f"the directory {str(path.parent)!r} does not exist"
    return ""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; where that fails half-way, what stood there before still does.

    Raises:
        OSError: it cannot be written there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):  # which shall name the file that the caller knows
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
