"""The form of a loader's batches: their spec, how a slot holds them, and how they are read out of it again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderpool.config import UnitKind
from loaderpool.element.spec import ElementSpec, RaggedArray
from loaderpool.memory.layout import Block, FixedLayout, VaryingLayout, aligned, read_varying, varying_nbytes

# Of each component of a fixed form: where it begins in a slot, and the bytes of one row of it.
SlotPlaces = tuple[tuple[int, int], ...]

# A chunk is at most this large: smaller makes tiny batches pay per batch again, larger leaves the cache.
_CHUNK_BYTES = 1 << 20
CHUNK_BATCHES = 64
# Of batches that small and all of one size there may be more in it, in half as much memory.
_SMALL_CHUNK_BYTES = 1 << 19
_SMALL_CHUNK_BATCHES = 1024
_INT64, _BYTE = np.dtype(np.int64), np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class BatchForm:
    """Spec and storage of one loader's batches; made in the trainer, read in every worker."""

    spec: ElementSpec  # of a batch, batch axis included
    unit: UnitKind  # what one call of the function makes
    batch_rows: int  # rows of a full batch; 1 for units that are whole elements
    fixed: FixedLayout | None  # None: varying
    max_chunk: int  # most batches that one ticket may cover
    can_split: bool  # whether a ticket may cover some rows of a batch
    slot_bytes: int  # bytes of a slot; a varying batch may outgrow it
    padding: tuple[Any, ...] = ()  # what fills up each component, as `padding_of` has it; False: its rows are alike

    def padding_at(self, component: int) -> Any:
        """Return what fills up rows of this component; None: the default. False: they have one shape."""
        return self.padding[component] if self.padding else False

    @property
    def places(self) -> SlotPlaces | None:
        """Where the components of a fixed form begin in a slot, and the bytes of a row of each; None: it is varying."""
        return None if self.fixed is None else tuple(zip(self.fixed.offsets, self.fixed.row_bytes, strict=True))

    @functools.cached_property
    def block_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Dtypes of the blocks of a varying batch, in order."""
        dtypes: list[np.dtype[Any]] = []
        for component in self.spec.components:
            dtypes += [_INT64, _BYTE] if component.text is not None else [component.dtype]
            if component.ragged:
                dtypes.append(_INT64)
        return tuple(dtypes)

    @functools.cached_property
    def may_be_padded(self) -> bool:
        """Whether any component may have padding in it that is counted: text is stored without."""
        return any(
            component.text is None and self.padding_at(number) is not False
            for number, component in enumerate(self.spec.components)
        )

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of a full batch, where they are known beforehand."""
        return self.fixed.used_bytes(self.batch_rows) if self.fixed is not None else None

    @functools.cached_property
    def has_plain_rows(self) -> bool:
        """Whether each row has one known shape and size, so that it can be written before the next one is made."""
        return self.unit == "sample" and _are_plain(self.spec) and all(pad is False for pad in self.padding)

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a plain row in each component."""
        return FixedLayout(*_row_layout(self.spec), 1).row_bytes

    def row_arrays(self, buffer: Any, base: int, rows: int, capacity: int) -> list[npt.NDArray[Any]] | None:
        """The components of one batch of plain rows, still to be written, as arrays on a slot; None: it has no room.

        Args:
            buffer: the arena, or a slot's memory.
            base: the slot's first byte in it.
            rows: of the batch, from its first row on.
            capacity: bytes of the slot.
        """
        if self.fixed is not None:
            return self.fixed.arrays(buffer, base, rows)
        arrays: list[npt.NDArray[Any]] = []
        shapes, dtypes = _row_layout(self.spec)
        blocks = [Block((rows, *shape), dtype, arrays.append) for shape, dtype in zip(shapes, dtypes, strict=True)]
        layout = VaryingLayout([(rows, blocks)])
        if layout.nbytes > capacity:
            return None
        layout.write(buffer, base)
        return arrays

    def used_bytes(self, anchor: npt.NDArray[np.uint8], rows: int) -> int:
        """Return the bytes from the slot's start to the end of the data in it, `rows` rows of a fixed form."""
        if self.fixed is None:
            return varying_nbytes(anchor)
        return self.fixed.offsets[-1] + self.fixed.row_bytes[-1] * rows

    def read(self, anchor: npt.NDArray[np.uint8], rows: int, count: int) -> Iterator[tuple[int, Sequence[Any]]]:
        """Read the batches in a slot: for each its rows and its components, as views of `anchor` (text is copied out).

        Args:
            anchor: the slot's bytes.
            rows: rows of each batch in it (varying slots tell themselves).
            count: how many batches a fixed slot holds.
        """
        if self.fixed is None:
            return ((own, self._components(blocks)) for own, blocks in read_varying(anchor, self.block_dtypes))
        arrays = self.fixed.arrays(anchor, 0, rows * count)
        if count == 1:
            return iter([(rows, arrays)])
        # All in C, for a tiny batch costs hardly more than its turn here.
        by_batch = [array.reshape(count, rows, *array.shape[1:]) for array in arrays]
        return zip(itertools.repeat(rows), zip(*by_batch, strict=True))

    def _components(self, blocks: list[npt.NDArray[Any]]) -> list[Any]:
        components: list[Any] = []
        rest = iter(blocks)
        for component in self.spec.components:
            values = next(rest)
            if component.text is not None:
                values = read_text(values, next(rest), component.text)
            components.append(RaggedArray(values, next(rest)) if component.ragged else values)
        return components


def read_text(
    lengths: npt.NDArray[np.int64], blob: npt.NDArray[np.uint8], text: Literal["str", "bytes"]
) -> npt.NDArray[np.object_]:
    """Return an object array of str or bytes from lengths of the array's shape and the UTF-8 data end to end."""
    data = blob.tobytes()
    out = np.empty(lengths.size, object)
    start = 0
    for position, length in enumerate(lengths.ravel().tolist()):
        piece = data[start : start + length]
        out[position] = piece.decode("utf-8", "surrogateescape") if text == "str" else piece
        start += length
    return out.reshape(lengths.shape)


def batch_form(
    spec: ElementSpec,
    unit: UnitKind,
    *,
    batch_size: int | None,
    batch_bytes_seen: int,
    may_leave_rows_out: bool,
    may_replace_rows: bool,
    rows_vary: bool = False,
    padding: tuple[Any, ...] = (),
) -> BatchForm:
    """The form for a batch spec: fixed where every row has one known shape and no row may be missing, else varying.

    Args:
        spec: of a batch.
        unit: what one call of the function makes.
        batch_size: most rows of a batch, None for whole elements.
        batch_bytes_seen: what a batch like the sample seen would take; sizes varying slots.
        may_leave_rows_out: `on_error="skip"`.
        may_replace_rows: `on_error="replace"`: the next good row must be in the same ticket.
        rows_vary: not all batches but the last have `batch_size` rows.
        padding: as `BatchForm` has it.
    """
    components = spec.components
    is_alike = _are_plain(spec) and all(pad is False for pad in padding)
    is_fixed = unit == "sample" and not may_leave_rows_out and not rows_vary and is_alike
    rows = batch_size or 1
    if not is_fixed:
        # Half as much again for batches larger than the one seen, and for headers; what outgrows it still arrives.
        batch_bytes = aligned(batch_bytes_seen + batch_bytes_seen // 2 + 512 * (1 + len(components)))
        max_chunk = max(1, min(CHUNK_BATCHES, _CHUNK_BYTES // batch_bytes))
        slot_bytes = batch_bytes * max_chunk
        return BatchForm(spec, unit, rows, None, max_chunk, can_split=False, slot_bytes=slot_bytes, padding=padding)
    row_shapes, dtypes = _row_layout(spec)
    batch_bytes = FixedLayout(row_shapes, dtypes, rows).used_bytes(rows)
    few = min(CHUNK_BATCHES, _CHUNK_BYTES // max(1, batch_bytes))
    many = min(_SMALL_CHUNK_BATCHES, _SMALL_CHUNK_BYTES // max(1, batch_bytes))
    max_chunk = max(1, few, many)
    fixed = FixedLayout(row_shapes, dtypes, rows * max_chunk)
    can_split = not may_replace_rows and rows > 1
    return BatchForm(spec, unit, rows, fixed, max_chunk, can_split, fixed.slot_bytes)


def _are_plain(spec: ElementSpec) -> bool:
    return all(c.text is None and not c.ragged and None not in c.shape[1:] for c in spec.components)


def _row_layout(spec: ElementSpec) -> tuple[tuple[tuple[int, ...], ...], tuple[np.dtype[Any], ...]]:
    """Return the shapes and dtypes of the components of a plain row."""
    shapes = tuple(tuple(int(n) for n in c.shape[1:] if n is not None) for c in spec.components)
    return shapes, tuple(c.dtype for c in spec.components)
