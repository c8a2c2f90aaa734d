"""Items of a ticket that are read with one call for many rows, without a source."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import numpy as np

from loaderpool.worker.fetching import Fetched


class Reader:
    """Reads indices as items, and records its calls."""

    stops_at_errors = False
    through_cache = None
    refusal = None

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.left_out: set[int] = set()

    def read_many(self, indices: list[int]) -> list[object]:
        self.calls.append(indices)
        return [*indices]

    def begin_rows(self, epoch: int, position: int) -> None:
        """Do nothing, because nothing is random."""

    def noted(self, index: int, rows: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rows_to_read(self, epoch: int, row: int, indices: Sequence[int]) -> Sequence[int]:
        return [at for at, index in enumerate(indices) if index not in self.left_out]


def fetched(reader: Reader, rows: int = 4) -> Fetched:
    return Fetched(reader, 0, np.arange(rows), range(rows), [(0, rows)], is_alone=False)


def test_part_whose_rows_are_all_left_out_is_not_read_ahead() -> None:
    reader = Reader()
    reader.left_out = {0, 1}
    items = fetched(reader, 2)
    items.others = lambda: [items]
    assert items.read_ahead()
    assert not items.read_ahead()
    assert not reader.calls


def test_thread_that_waits_for_a_row_that_was_read_reads_nothing_else() -> None:
    reader = Reader()
    items, other = fetched(reader), fetched(reader)
    items.others = lambda: [other]
    assert items.item(0) == 0
    with items._parts[0].lock:
        thread = threading.Thread(target=items.item, args=[1])
        thread.start()
        thread.join(0.1)
    thread.join()
    assert len(reader.calls) == 1
