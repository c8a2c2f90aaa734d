"""Samples into the blocks of a varying batch: stacked, padded, ragged or text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ArraySpec, fill_value, mismatch
from loaderpool.memory.layout import Block

_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


def collate(
    values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int], pad: Any
) -> list[Block]:
    """Return the blocks of one component of a batch of samples.

    Args:
        values: one array per row, already of the component's dtype (text: object arrays) and shape.
        component: its spec, batch axis included.
        path: its path in the element, for errors.
        indices: source index of each row, for errors.
        pad: what fills it up, None for the default; False: rows have one shape.

    Raises:
        SpecMismatchError: shapes differ, and it is neither padded nor ragged.
    """
    if component.ragged:
        return _ragged(values, component, path, indices)
    if pad is not False:
        return _padded(values, component, path, pad)
    shape = values[0].shape if values else tuple(n or 0 for n in component.shape[1:])
    for value, index in zip(values, indices, strict=True):
        if value.shape != shape:
            expected = ArraySpec(shape, component.dtype, component.text)
            raise mismatch(path, index, expected, value.shape, value.dtype, "rows")
    if component.text is not None:
        flat: list[Any] = []
        for value in values:
            flat.extend(value.ravel().tolist())
        return _text_blocks(flat, (len(values), *shape))

    def stack(out: npt.NDArray[Any]) -> None:
        for row, value in enumerate(values):
            out[row] = value

    return [Block((len(values), *shape), component.dtype, stack)]


def blocks_of_array(value: npt.NDArray[Any], component: ArraySpec) -> list[Block]:
    """Return the blocks of a component that the function returned as a whole batch."""
    if component.text is not None:
        return _text_blocks(value.ravel().tolist(), value.shape)

    def copy(out: npt.NDArray[Any]) -> None:
        out[...] = value

    return [Block(value.shape, component.dtype, copy)]


def _ragged(values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int]) -> list[Block]:
    inner = values[0].shape[1:] if values else tuple(n or 0 for n in component.shape[2:])
    for value, index in zip(values, indices, strict=True):
        if value.ndim == 0 or value.shape[1:] != inner:
            expected = ArraySpec((None, *inner), component.dtype, component.text)
            raise mismatch(path, index, expected, value.shape, value.dtype, "ragged")
    lengths = [len(value) for value in values]

    def splits(out: npt.NDArray[Any]) -> None:
        out[0] = 0
        np.cumsum(lengths, out=out[1:])

    joined = _joined(values, (sum(lengths), *inner), component)
    return [*joined, Block((len(values) + 1,), _INT64, splits)]


def _joined(values: Sequence[npt.NDArray[Any]], shape: tuple[int, ...], component: ArraySpec) -> list[Block]:
    """Return all rows' own rows end to end."""
    if component.text is not None:
        return _text_blocks([piece for value in values for piece in value.ravel().tolist()], shape)

    def join(out: npt.NDArray[Any]) -> None:
        start = 0
        for value in values:
            out[start : start + len(value)] = value
            start += len(value)

    return [Block(shape, component.dtype, join)]


def _padded(values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, pad: Any) -> list[Block]:
    """Pad rows to the shape that holds them all, or to the lengths that the spec has."""
    largest = tuple(
        max((value.shape[axis] for value in values), default=0) if length is None else length
        for axis, length in enumerate(component.shape[1:])
    )
    unpadded = sum(value.size for value in values)
    is_full = unpadded == len(values) * math.prod(largest)
    filler = None if is_full else fill_value(pad, component, path)

    def fill(out: npt.NDArray[Any]) -> None:
        if not is_full:
            out[...] = filler
        for row, value in enumerate(values):
            corner: tuple[Any, ...] = (row, *map(slice, value.shape))
            out[corner] = value

    if component.text is not None:
        texts = np.empty((len(values), *largest), object)
        fill(texts)
        return _text_blocks(texts.ravel().tolist(), texts.shape)
    return [Block((len(values), *largest), component.dtype, fill, unpadded)]


def _text_blocks(texts: list[Any], shape: tuple[int, ...]) -> list[Block]:
    pieces = [piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogateescape") for piece in texts]
    blob = b"".join(pieces)
    lengths = [len(piece) for piece in pieces]

    def fill_lengths(out: npt.NDArray[Any]) -> None:
        out.reshape(-1)[:] = lengths

    def fill_blob(out: npt.NDArray[Any]) -> None:
        out[:] = np.frombuffer(blob, np.uint8)

    return [Block(shape, _INT64, fill_lengths), Block((len(blob),), _BYTE, fill_blob)]
