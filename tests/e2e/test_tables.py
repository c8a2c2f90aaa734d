"""Tables of pandas, polars and pyarrow as sources: the same batches, in workers that import none of
the three.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read
from tests.support.notes import bytes_copied

ROWS = 20_000
COLUMNS: dict[str, Any] = {
    "id": np.arange(ROWS),
    "score": np.linspace(0, 1, ROWS, dtype=np.float32),
    "is_new": np.arange(ROWS) % 3 == 0,
    "text": [f"row {row}, {'x' * (row % 40)}" for row in range(ROWS)],
}
TABLES: dict[str, Any] = {
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "polars": lambda: pl.DataFrame(COLUMNS),
    "polars in pieces": lambda: pl.concat([pl.DataFrame(COLUMNS)[:77], pl.DataFrame(COLUMNS)[77:]]),
    "pyarrow": lambda: pa.table(COLUMNS),
    "pyarrow in pieces": lambda: pa.concat_tables([pa.table(COLUMNS)[:77], pa.table(COLUMNS)[77:]]),
    "a batch of pyarrow": lambda: pa.table(COLUMNS).to_batches()[0],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_by_row_in_workers_that_need_no_library(name: str) -> None:
    settings: dict[str, Any] = {"batch_size": 500, "shuffle": True, "seed": 2}

    # pickled by value, because this module imports all three
    def sample(row: dict[str, Any]) -> Any:
        libraries = {"pandas", "polars", "pyarrow"} & sys.modules.keys()
        return row["id"], row["score"], row["is_new"], str(row["text"]), len(libraries)

    arrays = {key: np.asarray(values) for key, values in COLUMNS.items()}
    with lp.Loader(arrays, sample, workers=2, **settings) as loader:
        expected = read(loader)
    table = TABLES[name]()
    with lp.Loader(table, sample, workers=2, **settings) as loader:
        batches = read(loader)
        statistics = loader.statistics()
    assert_same(batches, expected)
    assert {int(count) for batch in batches for count in batch[4]} == {0}, (
        "a worker has imported a library of tables"
    )
    assert statistics.workers_start == "fork"
    assert not any(
        "items of the source were packed into bytes" in note for note in statistics.notes
    ), "text went as Python objects"
    # each text also has a view, or two offsets
    text_bytes = sum(map(len, COLUMNS["text"])) + 17 * ROWS
    assert name == "pandas" or bytes_copied(statistics) <= 1.5 * (
        13 * ROWS + text_bytes
    )  # buffers may be larger than their content


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_rows_without_a_function_are_batches_of_columns(library: str, workers: int) -> None:
    columns = {key: values for key, values in COLUMNS.items() if key != "text"}
    table = pl.DataFrame(columns) if library == "polars" else pa.table(columns)
    with lp.Loader(table, batch_size=5000, workers=workers) as loader:
        assert {key: spec.shape for key, spec in loader.element_spec.items()} == dict.fromkeys(
            columns, (None,)
        )
        for key, values in columns.items():
            assert_same(np.concatenate([batch[key] for batch in loader]), np.asarray(values))
    with lp.Loader(table["id"], batch_size=5000, workers=workers) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(ROWS))
