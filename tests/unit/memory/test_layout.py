"""Where rows lie in a slot: aligned, apart from each other, and read back as they were written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loaderpool.core.delivery import Delivery, aligned_empty
from loaderpool.core.forms import spec_of_batches, with_batches
from loaderpool.element.spec import ArraySpec, ElementSpec, RaggedArray, sample_spec, widened
from loaderpool.element.structure import Structure
from loaderpool.memory.layout import (
    ALIGNMENT_BYTES,
    BatchForm,
    Block,
    FixedLayout,
    VaryingLayout,
    aligned,
    batch_form,
    read_text,
    read_varying,
    varying_counts,
    varying_nbytes,
)

LAYOUTS = [
    FixedLayout(((),), (np.dtype(bool),), 1),
    FixedLayout(((3,), (), (2, 5)), (np.dtype(np.uint8), np.dtype(np.float64), np.dtype(np.int16)), 7),
    FixedLayout(((0, 4), (1,)), (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)), 33),
    FixedLayout(((),) * 9, (np.dtype(np.complex128),) * 9, 5),
]


# ---- fixed ----


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_components_are_aligned_and_do_not_overlap(layout: FixedLayout) -> None:
    ends = [
        offset + row_bytes * layout.capacity_rows
        for offset, row_bytes in zip(layout.offsets, layout.row_bytes, strict=True)
    ]
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in layout.offsets)
    assert all(end <= offset for end, offset in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.slot_bytes


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


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_alignment_rounds_up(nbytes: int, rounded: int) -> None:
    assert aligned(nbytes) == rounded


# ---- varying ----


def block(array: np.ndarray[Any, Any]) -> Block:
    def fill(out: Any) -> None:
        out[...] = array

    return Block(array.shape, array.dtype, fill)


def written(batches: list[list[np.ndarray[Any, Any]]], base: int = 0) -> tuple[Any, VaryingLayout]:
    layout = VaryingLayout([(len(arrays[0]), [block(array) for array in arrays]) for arrays in batches])
    slot = aligned_empty(base + layout.nbytes)
    slot[...] = 0xAA
    layout.write(slot, base)
    return slot[base:], layout


BATCHES: list[list[np.ndarray[Any, Any]]] = [
    [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], np.int8)],
    [np.empty((0, 3), np.float32), np.empty(0, np.int8)],
    [np.arange(900, dtype=np.float32).reshape(300, 3), np.arange(300).astype(np.int8)],
    [np.ones((1, 3), np.float32), np.array([7], np.int8)],
]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_packed_batches_are_read_as_they_were_written(count: int) -> None:
    slot, layout = written(BATCHES[:count], base=ALIGNMENT_BYTES)
    read = list(read_varying(slot, [np.dtype(np.float32), np.dtype(np.int8)]))
    assert [rows for rows, _ in read] == [len(arrays[0]) for arrays in BATCHES[:count]]
    for (_, blocks), arrays in zip(read, BATCHES[:count], strict=True):
        for one, other in zip(blocks, arrays, strict=True):
            assert one.shape == other.shape and one.tobytes() == other.tobytes()
            assert one.ctypes.data % ALIGNMENT_BYTES == 0 and one.flags.writeable
            assert not one.size or np.shares_memory(one, slot)
    assert varying_nbytes(slot) == layout.nbytes


def test_a_block_of_no_axes_and_one_of_many() -> None:
    scalar, deep = np.array(3.5), np.arange(64).reshape((2,) * 6)
    layout = VaryingLayout([(1, [block(scalar), block(deep)])])
    slot = aligned_empty(layout.nbytes)
    layout.write(slot, 0)
    [(rows, [one, other])] = list(read_varying(slot, [scalar.dtype, deep.dtype]))
    assert rows == 1 and one.shape == () and one[()] == 3.5 and np.array_equal(other, deep)


def test_a_batch_tells_its_rows_and_its_padding() -> None:
    """Only padded blocks count; a block without padding in it counts as padded all the same."""

    def padded(shape: tuple[int, ...], unpadded: int) -> Block:
        return Block(shape, np.dtype(np.int16), lambda out: out.fill(0), unpadded)

    ragged = block(np.arange(50.0))
    batches = [
        (3, [padded((3, 4), 7), ragged, padded((3, 2, 2), 12)]),
        (2, [ragged, ragged, ragged]),
        (0, [padded((0, 0), 0), ragged, padded((0, 0, 0), 0)]),
    ]
    layout = VaryingLayout(batches)
    slot = aligned_empty(layout.nbytes)
    layout.write(slot, 0)
    assert varying_counts(slot) == [(3, 24, 5), (2, 0, 0), (0, 0, 0)]


# ---- text ----


@pytest.mark.parametrize(
    "texts", [["a", "", "é\0x", "日本語" * 50, "\udc80"], [b"", b"\0\0", b"\xff" * 300, b"x", b"\n"], [""] * 5]
)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5, 1)])
def test_text_is_read_from_lengths_and_one_blob(texts: list[Any], shape: tuple[int, ...]) -> None:
    pieces = [text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape") for text in texts]
    lengths = np.array([len(piece) for piece in pieces]).reshape(shape)
    blob = np.frombuffer(b"".join(pieces), np.uint8)
    read = read_text(lengths, blob, "bytes" if isinstance(texts[0], bytes) else "str")
    assert read.shape == shape and read.ravel().tolist() == texts


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


def test_used_bytes_reach_to_the_end_of_the_last_row() -> None:
    form = with_batches(form_of((np.zeros(3), np.zeros(100, np.uint8))), 3)
    assert form.fixed is not None
    slot = aligned_empty(form.slot_bytes)
    for rows in (1, 4, 12):
        last = form.fixed.arrays(slot, 0, rows)[-1]
        end = last.ctypes.data + last.nbytes - slot.ctypes.data
        assert form.used_bytes(slot, rows) == end <= form.slot_bytes


def test_a_ragged_component_is_values_and_row_splits() -> None:
    spec = ElementSpec(Structure.of(0), (ArraySpec((None, None), np.int32, ragged=True),))
    form = batch_form(
        spec, "sample", batch_size=3, batch_bytes_seen=9, may_leave_rows_out=False, may_replace_rows=False
    )
    layout = VaryingLayout([(3, [block(np.arange(5, dtype=np.int32)), block(np.array([0, 2, 2, 5]))])])
    slot = aligned_empty(layout.nbytes)
    layout.write(slot, 0)
    [(rows, [ragged])] = list(form.read(slot, 3, 1))
    assert rows == 3 and isinstance(ragged, RaggedArray)
    assert [row.tolist() for row in ragged] == [[0, 1], [], [2, 3, 4]]
