"""Samples into the blocks of a packed batch: stacked, padded, ragged or text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import Block
from loaderpool.spec import ArraySpec, mismatch

__all__ = ["blocks_of_array", "collate"]

_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


def collate(
    values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int], pad: Any
) -> list[Block]:
    """The blocks of one component of a batch of samples.

    Args:
        values: one array per row, already of the component's dtype (text: object arrays).
        component: its spec, batch axis included.
        path: its path in the element, for errors.
        indices: source index of each row, for errors.
        pad: the pad value, or False.

    Raises:
        SpecMismatchError: shapes differ and neither `pad` nor `ragged` is set.
    """
    if component.ragged:
        return _ragged(values, component, path, indices)
    if pad is not False and component.text is None and None in component.shape[1:]:
        return _padded(values, component, path, indices, pad)
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
    """The blocks of a component that the function returned as a whole batch."""
    if component.text is not None:
        return _text_blocks(value.ravel().tolist(), value.shape)

    def copy(out: npt.NDArray[Any]) -> None:
        out[...] = value

    return [Block(value.shape, component.dtype, copy)]


def _ragged(values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int]) -> list[Block]:
    inner = values[0].shape[1:] if values else tuple(n or 0 for n in component.shape[2:])
    for value, index in zip(values, indices, strict=True):
        if value.ndim == 0 or value.shape[1:] != inner:
            expected = ArraySpec((None, *inner), component.dtype)
            raise mismatch(path, index, expected, value.shape, value.dtype, "ragged")
    lengths = [len(value) for value in values]

    def join(out: npt.NDArray[Any]) -> None:
        start = 0
        for value, length in zip(values, lengths, strict=True):
            out[start : start + length] = value
            start += length

    def splits(out: npt.NDArray[Any]) -> None:
        out[0] = 0
        np.cumsum(lengths, out=out[1:])

    return [
        Block((sum(lengths), *inner), component.dtype, join),
        Block((len(values) + 1,), _INT64, splits),
    ]


def _padded(
    values: Sequence[npt.NDArray[Any]], component: ArraySpec, path: str, indices: Sequence[int], pad: Any
) -> list[Block]:
    ndim = len(component.shape) - 1
    for value, index in zip(values, indices, strict=True):
        fits = value.ndim == ndim and all(
            given is None or given == actual for given, actual in zip(component.shape[1:], value.shape, strict=False)
        )
        if not fits:
            expected = ArraySpec(component.shape[1:], component.dtype)
            raise mismatch(path, index, expected, value.shape, value.dtype, "given")
    largest = tuple(max((value.shape[axis] for value in values), default=0) for axis in range(ndim))
    fill_value = pad_value_for(component, pad, path)

    def fill(out: npt.NDArray[Any]) -> None:
        out[...] = fill_value
        for row, value in enumerate(values):
            corner: tuple[Any, ...] = (row, *map(slice, value.shape))
            out[corner] = value

    return [Block((len(values), *largest), component.dtype, fill, sum(value.size for value in values))]


def pad_value_for(component: ArraySpec, pad: Any, path: str) -> Any:
    """The pad value in the component's dtype.

    Raises:
        SpecMismatchError: the dtype cannot hold it.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # NaN into an int is caught by the comparison
            value = np.asarray(pad).astype(component.dtype)
        if value.shape == () and (value == np.asarray(pad) or (pad != pad and value != value)):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise SpecMismatchError(
        f"component {path or '(the whole element)'}: the pad value {pad!r} does not fit its dtype {component.dtype}"
    )


def _text_blocks(texts: list[Any], shape: tuple[int, ...]) -> list[Block]:
    pieces = [piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogateescape") for piece in texts]
    blob = b"".join(pieces)
    lengths = [len(piece) for piece in pieces]

    def fill_lengths(out: npt.NDArray[Any]) -> None:
        out.reshape(-1)[:] = lengths

    def fill_blob(out: npt.NDArray[Any]) -> None:
        out[:] = np.frombuffer(blob, np.uint8)

    return [Block(shape, _INT64, fill_lengths), Block((len(blob),), _BYTE, fill_blob)]
