"""Fills in the source lines of a worker's traceback whose code has no file: that of a notebook's cell, above all."""

from __future__ import annotations

import linecache
import re

# As `traceback` writes a frame, in an exception group too, and as faulthandler does (which never writes the line).
_FRAME = re.compile(r'([ |]*  )File "([^"]+)", line (\d+),? in ')


def with_source_lines(text: str) -> str:
    """Tracebacks with the source line below each frame that lacks it, where this process has it.

    A worker looks for a file that may be nowhere; IPython keeps its cells' source in `linecache`, here in the trainer.
    """
    lines = text.split("\n")
    filled: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        filled.append(line)
        frame = _FRAME.match(line)
        if frame is not None and not following.startswith(f"{frame[1]}  "):
            source = _source_line(frame[2], int(frame[3]))
            filled += [f"{frame[1]}  {source}"] if source else []
    return "\n".join(filled)


def _source_line(file: str, number: int) -> str:
    if file == "<string>":  # of `python -c`, of dataclasses and of namedtuples alike: another one's line would mislead
        return ""
    try:
        return linecache.getline(file, number).strip()
    except Exception:  # whatever others have put into linecache, the error itself must come through
        return ""
