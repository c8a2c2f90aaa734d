"""One copy of data in memory: packed items, shared arrays and adopted arrays give the same bits as
a serial run.
"""

from __future__ import annotations

import gc
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, kill_supervisor, read, told_when
from tests.support.child import run_child
from tests.support.notes import bytes_copied, bytes_shared, notes
from tests.support.processes import descendants, read_pss

ITEMS = 12_000


def records() -> list[dict[str, Any]]:
    return [
        {"path": f"data/train/{i:06d}.jpg", "label": i % 1000, "weight": i / 7}
        for i in range(ITEMS)
    ]


def tree_pss() -> int:
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            total += read_pss(pid)
        except (OSError, ProcessLookupError):
            continue
    return total


# -- packed items


def test_workers_that_read_packed_items_take_no_memory_of_their_own_for_them() -> None:
    items = [{"path": f"data/train/{i:07d}.jpg", "label": i % 1000} for i in range(200_000)]
    gc.collect()
    before = read_pss(os.getpid())
    with lp.Loader(
        items, lambda item: item["label"], batch_size=1000, workers=4, shuffle=True
    ) as loader:
        grown = []
        for _ in range(3):
            assert sum(int(batch.sum()) for batch in loader) == sum(
                i % 1000 for i in range(200_000)
            )
            grown.append(tree_pss() - before)
    # Unpacked, it takes 200 MB. The interpreters and the packed items take 70.
    assert grown[0] < 110e6 and grown[2] < grown[0] + 10e6, grown


# -- shared and adopted arrays

ROWS = 48


def large_array() -> Any:
    """Return an array of 48 MiB, which malloc never takes from a heap."""
    return np.random.default_rng(1).integers(0, 1 << 60, (ROWS, 1 << 17), np.int64)


def expected_of(array: Any) -> list[int]:
    return [int(value) for value in array.sum(axis=1)]


def sums_of(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


@pytest.mark.parametrize("how", ["captured", "source", "column", "shared"])
def test_a_large_array_stands_in_memory_once_and_gives_the_bits_of_a_serial_run(how: str) -> None:
    array = large_array()
    expected = expected_of(array)
    if how == "shared":
        array = lp.share(array)
    loaders: dict[str, Any] = {
        "captured": (range(ROWS), lambda i: array[i].sum()),
        "shared": (range(ROWS), lambda i: array[i].sum()),
        "source": (array, lambda row: row.sum()),
        "column": ({"row": array, "n": list(range(ROWS))}, lambda item: item["row"].sum()),
    }
    source, fn = loaders[how]
    serial = read(lp.Loader(source, fn, batch_size=4, workers=0), passes=2)
    address = array.ctypes.data
    with lp.Loader(source, fn, batch_size=4, workers=2) as loader:
        assert_same(read(loader, passes=2), serial)
        statistics = loader.statistics()
        assert not notes(statistics, "copied into")
        assert (bytes_shared(statistics), bytes_copied(statistics)) == (array.nbytes, 0)
        batches = iter(loader)
        first = next(batches)
        array[:] = 0  # workers do not see this until the next epoch
        assert sums_of([first, *batches]) == expected
        assert sums_of(loader) == [0] * ROWS
        assert (
            "it has changed" in notes(loader.statistics(), "copied into")[0]
        )  # the array is not moved while training runs
    assert not array.any() and array.ctypes.data == address


def test_a_shared_and_an_adopted_array_outlive_supervisors() -> None:
    adopted, shared = large_array(), lp.share(np.arange(20_000))
    sums = expected_of(adopted)
    expected = [sums[at % ROWS] + at for at in range(20 * ROWS)]
    with lp.Loader(
        range(20 * ROWS), lambda i: adopted[i % ROWS].sum() + shared[i], batch_size=2, workers=2
    ) as loader:
        for _ in range(2):
            batches = iter(loader)
            found = sums_of([next(batches)])
            kill_supervisor(loader)
            assert found + sums_of(batches) == expected
        statistics = told_when(loader, lambda told: told.supervisor_restarts == 2)
        assert bytes_shared(statistics) == adopted.nbytes + shared.nbytes
    assert expected_of(adopted) == sums


def test_workers_that_load_the_payload_themselves_map_the_files_too(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def add(value): return value + 1\n"
    )
    code = f"""
        import sys, warnings
        sys.path.insert(0, {str(tmp_path)!r})
        import numpy as np, loaderpool as lp
        warnings.simplefilter("ignore")
        array, shared = np.ones((48, 1 << 20), np.uint8), lp.share(np.arange(20_000))
        table = lp.share({{i: {{"label": i}} for i in range(6_000)}})

        def fn(i):
            import starts_a_thread
            return starts_a_thread.add(int(array[i].sum()) + shared[i] + table[i]["label"])

        class Needs:
            def __reduce__(self): return __import__, ("starts_a_thread",)

        with lp.Loader(range(48), lambda i, _=Needs(): fn(i), batch_size=4, workers=2) as loader:
            assert [int(v) for b in loader for v in b] == [(1 << 20) + 2 * i + 1 for i in range(48)]
            statistics = loader.statistics()
        assert statistics.workers_start == "exec", statistics.workers_start
        there = "bytes of arrays are shared with the workers and not copied"
        assert any(note.endswith(there) for note in statistics.notes), statistics
    """
    run_child(textwrap.dedent(code)).check()


def test_memory_comes_back_when_loader_and_array_are_gone() -> None:
    gc.collect()
    before = tree_pss()
    for _ in range(3):
        array = large_array()
        with lp.Loader(array, lambda row: row.sum(), batch_size=4, workers=2) as loader:
            assert len(sums_of(loader)) == ROWS
        del array, loader
        gc.collect()
        assert tree_pss() < before + (20 << 20)


def test_statistics_say_what_was_copied_and_why() -> None:
    small = np.ones(100_000)
    borrowed = np.frombuffer(bytearray(20 << 20), np.uint8)
    with lp.Loader(range(4), lambda i: small[i] + borrowed[i], workers=1) as loader:
        assert sums_of(loader) == [1] * 4
        statistics = loader.statistics()
    assert (
        bytes_copied(statistics) == small.nbytes + borrowed.nbytes and bytes_shared(statistics) == 0
    )
    assert notes(statistics, "copied into shared memory: ") == [
        "20,971,520 bytes: its memory is owned by a bytearray, not by NumPy",
        "800,000 bytes: it is smaller than 16 MiB",
    ]


def test_statistics_name_a_malloc_without_mappings() -> None:
    code = """
        import numpy as np
        import loaderpool as lp
        from tests.support.notes import notes

        large = np.ones(40 << 20, np.uint8)
        with lp.Loader(range(4), lambda i: large[i], workers=1) as loader:
            assert sum(int(batch.sum()) for batch in loader) == 4
            (reason,) = notes(loader.statistics(), "copied into shared memory: ")
        assert reason.startswith("41,943,040 bytes: malloc (glibc 2."), reason
        assert reason.endswith("does not map large blocks separately"), reason
    """
    run_child(textwrap.dedent(code), env={"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}).check()
