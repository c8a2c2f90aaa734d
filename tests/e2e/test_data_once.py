"""Data stands in memory once: packed items, shared arrays and adopted ones give the same bits as a serial run."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np

import loaderpool as lp
from tests.support.batches import assert_same, read
from tests.support.processes import descendants, read_pss

ITEMS = 30_000


def records() -> list[dict[str, Any]]:
    return [{"path": f"data/train/{i:06d}.jpg", "label": i % 1000, "weight": i / 7} for i in range(ITEMS)]


def of_record(record: dict[str, Any], rng: np.random.Generator) -> Any:
    return {"x": np.float64(record["weight"]) + rng.random(3), "label": record["label"], "path": record["path"]}


def kill_supervisor(loader: lp.Loader) -> None:
    worker = loader.statistics().workers[0].pid
    with open(f"/proc/{worker}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)


def tree_pss() -> int:
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            total += read_pss(pid)
        except (OSError, ProcessLookupError):
            continue
    return total


# -- packed items


def test_packed_items_give_the_bits_of_a_serial_run() -> None:
    settings: dict[str, Any] = {"batch_size": 500, "shuffle": True, "seed": 3}
    expected = read(lp.Loader(records(), of_record, workers=0, **settings), passes=2)
    with lp.Loader(records(), of_record, workers=2, **settings) as loader:
        assert_same(read(loader, passes=2), expected)


def test_packed_columns_and_batch_functions_give_the_bits_of_a_serial_run() -> None:
    def batch(rows: list[Any]) -> Any:
        return np.array([row["record"]["label"] + row["n"] for row in rows]), [row["text"] for row in rows]

    source = {"record": records(), "n": np.arange(ITEMS), "text": tuple(f"é{i}" * 5 for i in range(ITEMS))}
    source["text"] = list(source["text"])
    expected = read(lp.Loader(source, batch_fn=batch, batch_size=400, workers=0))
    with lp.Loader(source, batch_fn=batch, batch_size=400, workers=2) as loader:
        assert_same(read(loader), expected)


def test_packed_items_outlive_their_supervisor() -> None:
    expected = read(lp.Loader(records(), of_record, batch_size=100, workers=0))
    with lp.Loader(records(), of_record, batch_size=100, workers=2) as loader:
        batches = iter(loader)
        found = read([next(batches)])
        kill_supervisor(loader)
        assert_same(found + read(batches), expected)
        assert loader.statistics().supervisor_restarts == 1


def test_workers_that_read_packed_items_take_no_memory_of_their_own_for_them() -> None:
    items = [{"path": f"data/train/{i:07d}.jpg", "label": i % 1000} for i in range(200_000)]
    gc.collect()
    before = read_pss(os.getpid())
    with lp.Loader(items, lambda item: item["label"], batch_size=1000, workers=4, shuffle=True) as loader:
        grown = []
        for _ in range(3):
            assert sum(int(batch.sum()) for batch in loader) == sum(i % 1000 for i in range(200_000))
            grown.append(tree_pss() - before)
    # Unpacked it is 200 MB; the interpreters alone are 50.
    assert grown[0] < 110e6 and grown[2] < grown[0] + 10e6, grown
