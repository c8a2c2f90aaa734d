"""Read the notes about shared data in a loader's statistics."""

from __future__ import annotations

import re

from loaderpool.trainer.statistics import Statistics


def notes(statistics: Statistics, beginning: str) -> list[str]:
    """Return the rest of each note that starts with this text."""
    return [note.removeprefix(beginning) for note in statistics.notes if note.startswith(beginning)]


def bytes_shared(statistics: Statistics) -> int:
    """Return the bytes of arrays that are in memory once."""
    return _bytes(r"([\d,]+) bytes of arrays are shared", statistics)


def bytes_copied(statistics: Statistics) -> int:
    """Return the bytes of arrays that were copied into shared memory."""
    return _bytes(r"copied into shared memory: ([\d,]+) bytes", statistics)


def _bytes(pattern: str, statistics: Statistics) -> int:
    return sum(
        int(found[1].replace(",", ""))
        for note in statistics.notes
        if (found := re.match(pattern, note))
    )
