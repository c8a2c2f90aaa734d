"""Blocks of rows that a source stores together: chunks of HDF5 and zarr, row groups of Parquet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.sources.arrays import ArrayRows
from loaderpool.sources.indexing import MixRecords, Sized
from loaderpool.sources.tables import Columns


def block_starts(source: Any, rows: int | None) -> npt.NDArray[np.int64] | None:
    """Return the first row of each block of a source: int64[blocks], ascending from 0.

    Blocks begin again at the first row of each file.

    Args:
        source: Source that `as_source` has returned.
        rows: Rows of a block; None: use the blocks in which the source is stored.

    Returns:
        None if the source does not know its blocks.
    """
    size, parts = len(source), list(_parts(source))
    files = next((part for part in parts if hasattr(type(part), "first_records")), None)
    if rows is None and files is not None and hasattr(type(files), "blocks_of"):
        pairs = zip(files.paths, files.first_records, strict=False)
        starts = np.concatenate([first + np.array(files.blocks_of(path)) for path, first in pairs])
    else:
        if rows is None:
            rows = _rows_of_largest(parts)
        if rows is None:
            return None
        firsts = (0, size) if files is None else files.first_records
        pieces = [np.arange(*pair, rows) for pair in itertools.pairwise(firsts)]
        starts = np.concatenate(pieces)
    # A file without rows starts where the next one does. `zip_sources` may leave out the last rows.
    starts = np.unique(starts)
    return starts[starts < size].astype(np.int64)


def _rows_of_largest(parts: list[Any]) -> int | None:
    """Return the number of rows in a block, for the array whose blocks have the most bytes."""
    arrays = [part for part in parts if getattr(part, "stored_rows", 0)]
    largest = max(arrays, key=lambda each: each.stored_rows * each.row_bytes, default=None)
    return None if largest is None else int(largest.stored_rows)


def _parts(source: Any) -> Iterator[Any]:
    """Yield a source and the objects that it reads rows of: columns, arrays, the user's object."""
    yield source
    if isinstance(source, (Sized, Columns, ArrayRows, MixRecords)):
        for _, part in source.user_parts():
            yield from _parts(part)


def forget_blocks(source: Any) -> None:
    """Drop the decoded blocks of arrays that may have changed. Called when a pass begins."""
    for part in _parts(source):
        if isinstance(part, ArrayRows):
            part.forget_blocks()
