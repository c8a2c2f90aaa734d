"""Rows of varied length in one batch, as the NumPy side sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class RaggedArray:
    """A batch of rows of varied length: row i is `values[row_splits[i]:row_splits[i + 1]]`, as in `tf.RaggedTensor`.

    Attributes:
        values: dtype[sum of lengths, ...].
        row_splits: int64[rows + 1].
    """

    __slots__ = ("row_splits", "values")

    def __init__(self, values: npt.NDArray[Any], row_splits: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.row_splits = row_splits

    @property
    def dtype(self) -> np.dtype[Any]:
        """The values' dtype."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and row splits."""
        return self.values.nbytes + self.row_splits.nbytes

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"row {row} of {rows}")
        row %= rows
        return self.values[self.row_splits[row] : self.row_splits[row + 1]]

    def __repr__(self) -> str:
        return f"RaggedArray({len(self)} rows, {self.dtype}[{', '.join(map(str, self.values.shape))}])"
