"""Blocks of rows that a source stores together: chunks of HDF5 and zarr, row groups of Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.sources.arrays import ArrayRows
from loaderpool.sources.indexing import Sized
from loaderpool.sources.tables import Columns


def block_starts(source: Any, rows: int | None) -> npt.NDArray[np.int64] | None:
    """Return the first row of each block of a source: int64[blocks], ascending from 0.

    Args:
        source: Source that `as_source` has returned.
        rows: Rows of a block; None: ask the source.

    Returns:
        None if the source does not know its blocks.
    """
    if rows is not None:
        return np.arange(0, len(source), rows, dtype=np.int64)
    for part in _parts(source):
        if hasattr(type(part), "blocks_of"):
            files = zip(part.paths, part.first_records, strict=False)
            return np.concatenate([first + np.array(part.blocks_of(path)) for path, first in files])
        chunks = getattr(part, "chunks", None)
        if isinstance(chunks, tuple) and chunks and isinstance(chunks[0], int):
            return np.arange(0, len(source), chunks[0], dtype=np.int64)
    return None


def _parts(source: Any) -> Iterator[Any]:
    """Yield a source and the objects that it reads rows of: columns, arrays, the user's object."""
    yield source
    if isinstance(source, (Sized, Columns, ArrayRows)):
        for _, part in source.user_parts():
            yield from _parts(part)
