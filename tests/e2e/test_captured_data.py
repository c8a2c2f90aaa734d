"""Lists and dicts that functions capture stand in memory once, give the bits of a serial run, and are told of."""

from __future__ import annotations

import os
import random
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.tools.doctor.payload_checks import cargo_checks
from tests.e2e.test_data_once import kill_supervisor
from tests.support.batches import assert_same, read
from tests.support.child import run_child
from tests.support.processes import descendants, read_pss

ITEMS = 30_000


def records(count: int = ITEMS) -> list[dict[str, Any]]:
    return [{"path": f"data/train/{i:06d}.jpg", "label": i % 1000, "weight": i / 7} for i in range(count)]


def make_loader(workers: int, **settings: Any) -> lp.Loader:
    """A function that captures a list and a dict, and writes into both's elements."""
    training_set = records()
    sizes = {each["path"]: [at % 640, at % 480] for at, each in enumerate(training_set)}

    def setup() -> None:
        training_set[0]["weight"] = 0.5

    def load(i: int, rng: np.random.Generator) -> Any:
        record = training_set[i]
        record["half"] = record["weight"] / 2
        sizes[record["path"]].sort()
        return {
            "x": training_set[i]["half"] + rng.random(3),
            "label": record["label"],
            "size": sizes.get(training_set[i]["path"]),
            "path": record["path"],
        }

    return lp.Loader(range(ITEMS), load, batch_size=500, shuffle=True, seed=3, setup=setup, workers=workers, **settings)


def test_captured_data_gives_the_bits_of_a_serial_run() -> None:
    with make_loader(0) as serial:
        expected = read(serial, passes=2)
    with make_loader(2) as loader:
        assert_same(read(loader, passes=2), expected)
        statistics = loader.statistics()
    names = sorted(each.partition(":")[0] for each in statistics.captured_packed)
    inner = "of function make_loader.<locals>.load"
    assert names == [f"fn → closure variable 'sizes' {inner}", f"fn → closure variable 'training_set' {inner}"]
    assert all("30,000 elements" in each and each.endswith(" bytes") for each in statistics.captured_packed)
    assert statistics.captured_not_packed == () and statistics.items_packed == 0


def test_captured_data_outlives_its_supervisor_and_is_there_in_a_replaced_loader() -> None:
    with make_loader(0) as serial:
        expected = read(serial)
    with make_loader(2) as loader:
        batches = iter(loader)
        found = read([next(batches)])
        kill_supervisor(loader)
        assert_same(found + read(batches), expected)
        with loader.replace(workers=3) as other:
            assert_same(read(other), expected)
            assert len(other.statistics().captured_packed) == 2


def test_threads_of_a_worker_share_captured_elements() -> None:
    with make_loader(0) as serial, make_loader(2, worker_options=lp.WorkerOptions(threads=3)) as loader:
        assert_same(read(loader), read(serial))


def test_a_captured_list_takes_no_more_memory_than_as_the_source() -> None:
    count = 200_000
    training_set = records(count)
    table = {each["path"]: each for each in training_set}
    expected = sum(i % 1000 for i in range(count))
    loaders: dict[str, Any] = {
        "source": lambda: lp.Loader(training_set, lambda item: item["label"], batch_size=1000, workers=4, shuffle=True),
        "list": lambda: lp.Loader(
            range(count), lambda i: training_set[i]["label"], batch_size=1000, workers=4, shuffle=True
        ),
        "dict": lambda: lp.Loader(
            range(count), lambda i: table[f"data/train/{i:06d}.jpg"]["label"], batch_size=1000, workers=4, shuffle=True
        ),
    }
    taken: dict[str, int] = {}
    for name, make in loaders.items():
        with make() as loader:
            for _ in range(2):
                assert sum(int(batch.sum()) for batch in loader) == expected
            taken[name] = sum(map(read_pss, descendants(os.getpid())))
    # Unpacked, a list of these is 200 MB more; a packed dict has its keys as well, and where they are.
    assert taken["list"] < taken["source"] + 15e6, taken
    assert taken["dict"] < taken["source"] + 30e6, taken


def test_a_large_list_that_cannot_be_packed_is_warned_of_in_the_caller_s_line_with_the_cure() -> None:
    training_set = [f"data/train/{i:07d}.jpg" * 4 for i in range(120_000)]
    with pytest.warns(lp.LargeDataWarning) as warned:
        loader = lp.Loader(range(8), lambda i: len(random.choice(training_set)), batch_size=4, workers=1)
    with loader:
        assert len(read(loader)) == 2
        (told,) = loader.statistics().captured_not_packed
    (warning,) = warned
    text = str(warning.message)
    assert warning.filename == __file__ and text == told
    assert text.startswith("fn → closure variable 'training_set' of function test_a_large_list")
    assert "120,000 elements, about " in text and "does not read it element by element" in text
    assert "Make it the source" in text


def test_under_no_workers_there_is_nothing_to_warn_of() -> None:
    training_set = [f"data/train/{i:07d}.jpg" * 4 for i in range(120_000)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lp.Loader(range(8), lambda i: len(random.choice(training_set)), batch_size=4, workers=0) as loader:
            assert len(read(loader)) == 2


def test_a_source_of_a_million_ints_is_advised_to_be_a_range() -> None:
    with pytest.warns(lp.LargeDataWarning, match=r"source is a list of 1,000,000 ints.*: make it range\(1000000\)"):
        loader = lp.Loader(list(range(1_000_000)), lambda i: i, batch_size=4, workers=1)
    loader.close()


def test_a_list_that_a_generator_iterates_is_named_by_it() -> None:
    training_set = [f"data/train/{i:07d}.jpg" * 4 for i in range(120_000)]

    def generate() -> Any:
        yield from (len(each) for each in training_set[:8])
        yield from map(len, training_set)

    with pytest.warns(lp.LargeDataWarning, match=r"make_generator → closure variable 'training_set' of function"):
        loader = lp.Loader.from_generator(generate, batch_size=4, workers=1)
    with loader:
        assert len(next(iter(loader))) == 4


def test_the_doctor_tells_what_is_packed_and_what_is_not() -> None:
    training_set, names = records(), [f"data/train/{i:07d}.jpg" * 4 for i in range(120_000)]
    loader = lp.Loader(
        range(8), lambda i: (training_set[i]["label"], len(random.choice(names))), batch_size=4, workers=0
    )
    checks = {check.name: check for check in cargo_checks(loader, free_bytes=1 << 30)}
    packed, other = checks["captured lists packed"], checks["captured list"]
    assert packed.status == "ok" and "closure variable 'training_set'" in packed.found
    assert other.status == "warn" and "closure variable 'names'" in other.found and "the source" in other.change
    assert checks["load and first sample"].status == "ok"


class Batches:
    """As Keras has them; the hook gives another list each epoch, and writes into the first."""

    def __init__(self) -> None:
        self.records = records()
        self.order = list(range(ITEMS))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return np.array([self.records[self.order[at]]["label"] for at in range(index * 100, index * 100 + 100)])

    def on_epoch_end(self) -> None:
        random.Random(len(self.order)).shuffle(self.order)
        self.records = self.records[1:] + self.records[:1]


def test_what_hooks_change_arrives_where_a_packed_list_was() -> None:
    with lp.Loader.from_sequence(Batches(), workers=0) as serial:
        expected = read(serial, passes=3)
    with lp.Loader.from_sequence(Batches(), workers=2) as loader:
        assert_same(read(loader, passes=3), expected)
        assert "attribute .records of Batches" in loader.statistics().captured_packed[0]


def test_workers_that_load_the_payload_themselves_read_packed_data_too(tmp_path: Path) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def add(value): return value + 1\n"
    )
    code = f"""
        import sys, warnings
        sys.path.insert(0, {str(tmp_path)!r})
        import loaderpool as lp, starts_a_thread
        warnings.simplefilter("ignore", lp.WorkersNotForkedWarning)
        records = [{{"path": f"data/{{i:06d}}.jpg", "label": i}} for i in range(60_000)]
        table = {{each["path"]: each["label"] for each in records}}

        def fn(i):
            return starts_a_thread.add(records[i]["label"] + table[records[i]["path"]])

        with lp.Loader(range(0, 60_000, 100), fn, batch_size=30, workers=2) as loader:
            assert [int(v) for b in loader for v in b] == [2 * i + 1 for i in range(0, 60_000, 100)]
            statistics = loader.statistics()
        assert statistics.workers_start == "exec", statistics.workers_start
        assert len(statistics.captured_packed) == 2, statistics
    """
    run_child(textwrap.dedent(code)).check()
