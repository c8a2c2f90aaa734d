"""Slots of batches: the number of batches in one, and whether workers may share one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loaderpool.element.spec import sample_spec
from loaderpool.memory.layout import BatchForm, batch_form
from loaderpool.supervisor.forms import spec_of_batches


def form_of(sample: Any, *, batch_size: int = 4, **more: Any) -> BatchForm:
    """Return the form for samples like this one."""
    seen = sample_spec(sample)
    spec = spec_of_batches(seen, seen, padding=(), ragged=False, static_rows=None)
    settings = {
        "batch_bytes_seen": 100,
        "may_leave_rows_out": False,
        "may_replace_rows": False,
        **more,
    }
    return batch_form(spec, "sample", batch_size=batch_size, **settings)


def test_a_batch_is_cut_into_rows_only_where_each_row_stands_for_itself() -> None:
    assert form_of(np.zeros(3)).can_split
    assert not form_of(np.zeros(3), may_replace_rows=True).can_split
    assert not form_of(np.zeros(3), batch_size=1).can_split
    assert not form_of("text").can_split


@pytest.mark.parametrize(
    ("row_bytes", "max_chunk"),
    [
        (0, 1024),
        (10, 1024),
        (1 << 9, 256),
        (1 << 12, 64),
        (1 << 14, 16),
        (1 << 18, 1),
        (1 << 24, 1),
    ],
)
def test_only_tiny_batches_are_chunked(row_bytes: int, max_chunk: int) -> None:
    form = form_of(np.zeros(row_bytes, np.uint8))
    assert form.max_chunk == max_chunk
    assert form.slot_bytes >= max_chunk * 4 * row_bytes
    assert form_of(np.zeros(row_bytes, np.uint8), may_leave_rows_out=True).max_chunk == 64
