"""Columns of text, lists and categories as they stand in Arrow's memory: a row is made when it is read.

They are a few arrays each, so they travel to the workers as arrays do, and are in memory once for all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

INLINE_BYTES = 12  # of a view: a longer one is a place in a buffer


class TextColumn:
    """Text or bytes, one behind the other.

    Args:
        offsets: int64[rows + 1], where each begins; the last is where all end.
        data: uint8[bytes].
        missing: bool[rows], or None where none is.
        is_text: a row is a str; else bytes.
    """

    __slots__ = ("_arrays", "_data", "_is_text", "_missing", "_offsets")

    def __init__(self, offsets: npt.NDArray[Any], data: npt.NDArray[Any], missing: Any, is_text: bool) -> None:
        self._arrays, self._is_text = (offsets, data, missing), is_text
        # Of a memoryview a number is a Python int, which takes a third of the time.
        self._offsets, self._data = offsets.data, data.data
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> str | bytes | None:
        if self._missing is not None and self._missing[row]:
            return None
        found = self._data[self._offsets[row] : self._offsets[row + 1]]
        return str(found, "utf-8") if self._is_text else bytes(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (*self._arrays, self._is_text)


class ViewColumn:
    """Text or bytes, each in place if it is short, else somewhere in one of some buffers (Arrow's views).

    Args:
        views: int32[rows, 4]: length and 12 bytes of content; or length, 4 bytes, number of buffer, offset.
        buffers: uint8[bytes] each.
        missing: bool[rows], or None where none is.
        is_text: a row is a str; else bytes.
    """

    __slots__ = ("_arrays", "_buffers", "_bytes", "_is_text", "_missing", "_views")

    def __init__(self, views: npt.NDArray[Any], buffers: list[npt.NDArray[Any]], missing: Any, is_text: bool) -> None:
        self._arrays, self._is_text = (views, buffers, missing), is_text
        self._views = views.reshape(-1).data
        self._bytes = views.reshape(-1).view(np.uint8).data
        self._buffers = [buffer.data for buffer in buffers]
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._views) // 4

    def __getitem__(self, row: int) -> str | bytes | None:
        if self._missing is not None and self._missing[row]:
            return None
        length = self._views[4 * row]
        if length <= INLINE_BYTES:
            found = self._bytes[16 * row + 4 : 16 * row + 4 + length]
        else:
            start = self._views[4 * row + 3]
            found = self._buffers[self._views[4 * row + 2]][start : start + length]
        return str(found, "utf-8") if self._is_text else bytes(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return ViewColumn, (*self._arrays, self._is_text)

    def compact(self) -> TextColumn:
        """Return the same with the rows' own bytes alone, in their order: equal for columns that are equal."""
        texts = [self[row] or b"" for row in range(len(self))]
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        missing = self._arrays[2]
        return TextColumn(offsets, np.frombuffer(b"".join(encoded), np.uint8), missing, self._is_text)


class ListColumn:
    """Lists of numbers: a row is an array of its own, which may be written to.

    Args:
        offsets: int64[rows + 1], where each begins; the last is where all end.
        values: the numbers of all.
        missing: bool[rows], or None where none is.
    """

    __slots__ = ("_arrays", "_missing", "_offsets", "_values")

    def __init__(self, offsets: npt.NDArray[Any], values: npt.NDArray[Any], missing: Any) -> None:
        self._arrays, self._values, self._offsets = (offsets, values, missing), values, offsets.data
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any] | None:
        if self._missing is not None and self._missing[row]:
            return None
        values: npt.NDArray[Any] = self._values[self._offsets[row] : self._offsets[row + 1]].copy()
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return ListColumn, self._arrays


class CodedColumn:
    """Categories: a row is one of some values.

    Args:
        codes: int64[rows], the number of each row's value.
        values: by number.
        missing: bool[rows], or None where none is.
    """

    __slots__ = ("_arrays", "_codes", "_missing", "_values")

    def __init__(self, codes: npt.NDArray[Any], values: Any, missing: Any) -> None:
        self._arrays, self._codes, self._values = (codes, values, missing), codes.data, values
        self._missing = None if missing is None else missing.data

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, row: int) -> Any:
        if self._missing is not None and self._missing[row]:
            return None
        return self._values[self._codes[row]]

    def __reduce__(self) -> tuple[Any, ...]:
        return CodedColumn, self._arrays
