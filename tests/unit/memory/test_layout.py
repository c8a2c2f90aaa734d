"""Where rows lie in a slot: aligned, apart from each other, and read back as they were written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loaderpool.core.delivery import Delivery, aligned_empty
from loaderpool.core.forms import spec_of_batches, with_batches
from loaderpool.element.spec import sample_spec, widened
from loaderpool.memory.layout import (
    ALIGNMENT_BYTES,
    BatchForm,
    FixedLayout,
    batch_form,
)

LAYOUTS = [
    FixedLayout(((),), (np.dtype(bool),), 1),
    FixedLayout(((3,), (), (2, 5)), (np.dtype(np.uint8), np.dtype(np.float64), np.dtype(np.int16)), 7),
    FixedLayout(((0, 4), (1,)), (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)), 33),
    FixedLayout(((),) * 9, (np.dtype(np.complex128),) * 9, 5),
]


# ---- fixed ----


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
@pytest.mark.parametrize("base", [0, ALIGNMENT_BYTES, 4096])
def test_what_is_written_into_rows_is_read_from_them(layout: FixedLayout, base: int) -> None:
    buffer = bytearray(b"\xaa" * (base + layout.slot_bytes + 64))
    rows = layout.capacity_rows
    for number, array in enumerate(layout.arrays(buffer, base, rows)):
        assert array.shape == (rows, *layout.row_shapes[number]) and array.dtype == layout.dtypes[number]
        array[...] = np.asarray(number + 1).astype(array.dtype)
    for number, array in enumerate(layout.arrays(buffer, base, rows)):
        assert (array == np.asarray(number + 1).astype(array.dtype)).all()
        assert layout.row_bytes[number] * rows == array.nbytes
    assert layout.row_nbytes == sum(layout.row_bytes)
    assert buffer[:base] == b"\xaa" * base and buffer[base + layout.slot_bytes :] == b"\xaa" * 64


# ---- forms ----


def form_of(sample: Any, other: Any = None, *, batch_size: int = 4, ragged: bool = False, **more: Any) -> BatchForm:
    """The form for samples like the first, others being like the other; they are padded where `padding` says so."""
    first = sample_spec(sample)
    seen = first if other is None else widened(first, sample_spec(other))
    padding = more.get("padding", ())
    spec = spec_of_batches(first, seen, padding=padding, ragged=ragged, static_rows=None)
    settings = {"batch_bytes_seen": 100, "may_leave_rows_out": False, "may_replace_rows": False, **more}
    return batch_form(spec, "sample", batch_size=batch_size, **settings)


def test_rows_of_one_known_shape_are_fixed_and_all_else_is_packed() -> None:
    assert form_of((np.zeros(3), 1)).fixed is not None
    assert form_of((np.zeros(3), "text")).fixed is None
    assert form_of(np.zeros(3), np.zeros(4), padding=(0,)).fixed is None
    assert form_of(np.zeros(3), padding=(0,)).fixed is None  # to a given length
    assert form_of(np.zeros(3), np.zeros(4), ragged=True).fixed is None
    assert form_of(np.zeros(3), ragged=True).fixed is not None  # none was seen to vary
    assert form_of(np.zeros(3), may_leave_rows_out=True).fixed is None


def test_a_batch_is_cut_into_rows_only_where_each_row_stands_for_itself() -> None:
    assert form_of(np.zeros(3)).can_split
    assert not form_of(np.zeros(3), may_replace_rows=True).can_split
    assert not form_of(np.zeros(3), batch_size=1).can_split
    assert not form_of("text").can_split


@pytest.mark.parametrize(
    ("row_bytes", "max_chunk"),
    [(0, 1024), (10, 1024), (1 << 9, 256), (1 << 12, 64), (1 << 14, 16), (1 << 18, 1), (1 << 24, 1)],
)
def test_only_tiny_batches_are_chunked(row_bytes: int, max_chunk: int) -> None:
    form = form_of(np.zeros(row_bytes, np.uint8))
    assert form.max_chunk == max_chunk
    assert form.slot_bytes >= max_chunk * 4 * row_bytes
    assert form_of(np.zeros(row_bytes, np.uint8), may_leave_rows_out=True).max_chunk == 64


@pytest.mark.parametrize("sample", [(np.zeros(3), 1), np.zeros((2, 2), np.uint8)], ids=["two", "one"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_chunk_is_read_batch_by_batch(sample: Any, count: int) -> None:
    form = with_batches(form_of(sample), 5)
    assert form.fixed is not None and form.max_chunk == 5
    slot = aligned_empty(form.slot_bytes)
    for array in form.fixed.arrays(slot, 0, 4 * count):
        array[...] = np.arange(4 * count).reshape(-1, *[1] * (array.ndim - 1))
    delivery = Delivery(7, count, 4)
    delivery.form, delivery.anchor = form, slot
    for number, (rows, parts) in enumerate(delivery.batches()):
        assert rows == 4 and len(parts) == form.spec.structure.num_leaves
        for part in parts:
            assert part.reshape(4, -1)[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            assert np.shares_memory(part, slot)
    joined = delivery.joined()
    assert [array.shape[:2] for array in joined] == [(count, 4)] * len(joined)
