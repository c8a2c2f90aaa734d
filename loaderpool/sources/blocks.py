"""Blocks of rows that a source stores together: chunks of HDF5 and zarr, row groups of Parquet."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


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
    blocks_of = getattr(type(source), "blocks_of", None)
    if blocks_of is not None:
        files = zip(source.paths, source.first_records, strict=False)
        return np.concatenate([first + np.array(blocks_of(source, path)) for path, first in files])
    parts = getattr(source, "user_parts", None)  # columns, or the array whose rows are read
    for _, array in [("", source)] if parts is None else parts():
        chunks = getattr(array, "chunks", None)
        if isinstance(chunks, tuple) and chunks and isinstance(chunks[0], int):
            return np.arange(0, len(source), chunks[0], dtype=np.int64)
    return None
