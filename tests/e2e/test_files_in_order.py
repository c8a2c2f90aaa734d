"""Compressed files in a Loader, and generators with stated numbers of items: bits, resume, lengths,
errors.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, indices_in, kill_worker, read
from tests.support.child import run_child
from tests.support.record_files import (
    COMPRESS,
    number_of,
    numbered,
    numbered_members,
    numbered_records,
    tar_bytes,
    tfrecord_bytes,
)

ROWS = [40, 33, 0, 25, 40]
TOTAL = sum(ROWS)
SOURCES: dict[str, Any] = {"tfrecord": lp.TFRecords, "tar": lp.TarSamples}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    for file, rows in enumerate(ROWS):
        first = sum(ROWS[:file])
        # The empty tar file has a member, but no sample.
        members = numbered_members(first, rows) or [("README", b"")]
        (folder / f"{file}.tfrecord").write_bytes(tfrecord_bytes(numbered_records(first, rows)))
        (folder / f"{file}.tfrecord.gz").write_bytes(
            COMPRESS["gzip"](tfrecord_bytes(numbered_records(first, rows)))
        )
        if rows:
            (folder / f"{file}.tar.gz").write_bytes(COMPRESS["xz"](tar_bytes(members)))
    return folder


def paths(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*.{ending}"))


# ---- compressed files


@pytest.mark.parametrize("ending", SOURCES)
@pytest.mark.parametrize("shuffle", [False, True, 12])
def test_all_workers_give_the_bits_that_this_process_gives(
    on: Place, folder: Path, ending: str, shuffle: bool | int
) -> None:
    def made(workers: int) -> list[Any]:
        source = SOURCES[ending](paths(folder, f"{ending}.gz"))
        return read(
            lp.Loader(source, numbered, batch_size=7, shuffle=shuffle, seed=1, **on(workers)),
            passes=2,
        )

    expected = made(0)
    numbers = indices_in(expected)
    epochs = numbers[:TOTAL], numbers[TOTAL:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [*range(TOTAL)]
    assert (epochs[0] == epochs[1]) == (shuffle is False)
    in_their_order = all(
        a < b
        for batch in expected
        for a, b in itertools.pairwise(batch[0].tolist())
        if a // 40 == b // 40
    )
    assert in_their_order == isinstance(shuffle, bool)
    assert_same(made(2), expected)
    assert_same(made(3), expected)


@pytest.mark.parametrize("shuffle", [False, True, 12])
def test_a_training_goes_on_in_the_middle_of_compressed_files(
    on: Place, folder: Path, tmp_path: Path, shuffle: bool | int
) -> None:
    def loader(files: list[Path], workers: int, **more: Any) -> lp.Loader:
        source = lp.TFRecords(files, **more)
        return lp.Loader(source, numbered, batch_size=6, shuffle=shuffle, **on(workers))

    files = paths(folder, "tfrecord.gz")
    with loader(files, 0) as whole:
        expected = read(whole, passes=2)
    copies = [tmp_path / path.name for path in files]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    for taken in (1, 9, 20):
        with loader(files, 2) as first:
            batches = iter(first)
            got = read([next(batches) for _ in range(taken)])
            state = json.loads(json.dumps(first.state_dict()))
            del batches
        with loader(copies, 3) as second:
            second.load_state_dict(state)
            assert_same(got + read(second, passes=2), expected)
    with loader(files[:-1], 1) as other, pytest.raises(lp.StateError, match="different settings"):
        other.load_state_dict(state)
    with (
        loader(files, 1, shard_lengths=ROWS) as stated,
        pytest.raises(lp.StateError, match="different settings"),
    ):
        stated.load_state_dict(state)


def test_a_worker_that_dies_loses_no_record(on: Place, folder: Path) -> None:
    files = paths(folder, "tfrecord.gz")
    with lp.Loader(lp.TFRecords(files), numbered, batch_size=5, shuffle=9, workers=2) as loader:
        expected = read(loader)
        loader.epoch = 0
        got = []
        for number, batch in enumerate(loader):
            got += read([batch])
            if number == 6:
                kill_worker(loader)
        assert_same(got, expected)


def test_processes_share_compressed_files(on: Place, folder: Path) -> None:
    files = paths(folder, "tfrecord.gz")
    got = []
    for index in range(2):
        with lp.Loader(
            lp.TFRecords(files),
            number_of,
            batch_size=4,
            shuffle=True,
            shard=lp.Shard(2, index),
            **on(2),
        ) as loader:
            got.append(set(indices_in(read(loader))))
    assert got[0] | got[1] == {*range(TOTAL)} and not got[0] & got[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_named_after_the_batches_before_it(
    on: Place, folder: Path, tmp_path: Path, workers: int
) -> None:
    records = numbered_records(0, 40)
    path = tmp_path / "x.gz"
    path.write_bytes(COMPRESS["gzip"](tfrecord_bytes(records)[:-1]))
    with lp.Loader(lp.TFRecords(path), number_of, batch_size=8, **on(workers)) as loader:
        got = []
        with pytest.raises(
            lp.SampleError, match=rf"record 40 of {path} \(at byte \d+ of the decomp"
        ) as caught:
            for batch in loader:
                got += batch.tolist()
        assert isinstance(caught.value, lp.SourceError)
        assert got == [*range(32)]


def test_workers_read_without_tensorflow(folder: Path) -> None:
    code = f"""
        import sys
        import loaderpool as lp
        def names(record):
            import sys
            return "tensorflow" in sys.modules
        files = {[str(path) for path in paths(folder, "tfrecord.gz")]}
        with lp.Loader(lp.TFRecords(files), names, workers=1) as loader:
            assert not any(batch.any() for batch in loader)
        assert "tensorflow" not in sys.modules
    """
    run_child(code).check()


def test_settings_that_need_an_index_are_refused(folder: Path) -> None:
    files = paths(folder, "tfrecord.gz")
    for settings, message in (
        ({"cache": "memory"}, "cache needs a source with __len__ and __getitem__"),
        ({"threads": 2}, "threads=2 is not supported with TFRecords"),
        (
            {"buckets": lp.Buckets([1], [1])},
            "buckets needs a source with __len__ and __getitem__, got TFRecords",
        ),
    ):
        with pytest.raises(lp.ArgumentError, match=message):
            lp.Loader(lp.TFRecords(files), number_of, workers=0, **settings)  # type: ignore[arg-type]


def test_files_of_one_shard_are_read_by_generators_of_ones_own(on: Place, folder: Path) -> None:
    files = paths(folder, "tfrecord.gz")
    with lp.Loader.from_generator(
        lp.TFRecords, shards=files, cycle_length=2, fn=number_of, **on(2)
    ) as loader:
        assert sorted(indices_in(read(loader))) == [*range(TOTAL)]
    groups = [files[:3], files[3:]]

    def together(group: list[Path]) -> Any:
        return lp.interleave(group, lp.TFRecords)

    with lp.Loader.from_generator(
        together, shards=groups, fn=number_of, batch_size=4, **on(2)
    ) as loader:
        got = read(loader)
    assert sorted(indices_in(got)) == [*range(TOTAL)] and got[0].tolist() == [0, 40, 1, 41]


# ---- stated numbers of items

SHARDS = [
    range(100 * shard, 100 * shard + rows)
    for shard, rows in enumerate([7, 20, 0, 13, 8, 1, 16, 5, 12])
]
LENGTHS = [len(shard) for shard in SHARDS]


def of_shard(shard: range) -> Iterator[int]:
    yield from shard


WAYS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "in a window": {"shuffle": 6},
    "dropping": {"drop_remainder": True, "shuffle": True},
    "elements": {"batch_size": None, "shuffle": True},
    "all at once": {"cycle_length": 100, "shuffle": True},
    "a process's share": {"shard": lp.Shard(2, 1), "shuffle": True},
    "in any order": {"deterministic": False, "shuffle": True},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_each_epoch_has_the_stated_number_of_batches(on: Place, way: str, workers: int) -> None:
    settings = {"batch_size": 4, "cycle_length": 3, "shard_lengths": LENGTHS, **WAYS[way]}
    with lp.Loader.from_generator(of_shard, shards=SHARDS, **settings, **on(workers)) as loader:
        epochs = [read(loader) for _ in range(5)]
        assert {len(epoch) for epoch in epochs} == {len(loader)}
        assert loader.epoch == 5
        if "drop" not in way and "share" not in way:
            everything = sorted(number for shard in SHARDS for number in shard)
            assert all(sorted(indices_in(epoch)) == everything for epoch in epochs)
        if settings.get("shuffle"):
            assert indices_in(epochs[0]) != indices_in(epochs[1])


def test_orders_of_shards_differ_in_each_epoch_with_stated_numbers(on: Place) -> None:
    shards = [[shard] for shard in range(40)]
    with lp.Loader.from_generator(
        iter, shards=shards, shard_lengths=1, cycle_length=4, batch_size=1, shuffle=True, **on(2)
    ) as loader:
        epochs = [indices_in(read(loader)) for _ in range(6)]
    assert all(sorted(epoch) == [*range(40)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6 and len({epoch[0] for epoch in epochs}) > 2


@pytest.mark.parametrize("shuffle", [False, 5])
def test_stated_numbers_hold_for_the_rest_of_an_epoch(on: Place, shuffle: bool | int) -> None:
    settings: dict[str, Any] = {
        "shards": SHARDS,
        "shard_lengths": LENGTHS,
        "batch_size": 4,
        "cycle_length": 3,
    }
    with lp.Loader.from_generator(of_shard, **settings, shuffle=shuffle, **on(0)) as loader:
        expected, length = read(loader, passes=2), len(loader)
    for taken in (3, length - 1, length):
        with lp.Loader.from_generator(of_shard, **settings, shuffle=shuffle, **on(2)) as loader:
            batches = iter(loader)
            got = read([next(batches) for _ in range(taken)])
            state = loader.state_dict()
            assert state["epoch"] == (taken == length)
            del batches
        with lp.Loader.from_generator(of_shard, **settings, shuffle=shuffle, **on(3)) as loader:
            loader.load_state_dict(state)
            rest = read(loader)
            assert len(rest) == (length - taken or length)
            assert_same(got + rest, expected[: taken + len(rest)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            [*LENGTHS[:-1], 13],
            r"shard 8 \(range\(800, 812\)\) has only 12 items, but shard_lengths states 13",
        ),
        ([*LENGTHS[:-1], 11], r"shard 8 .* has more than 11 items, but shard_lengths states 11"),
        ([*LENGTHS[:-1], 0], r"shard 8 .* has more than 0 items"),
        ([8, *LENGTHS[1:]], r"shard 0 .* has only 7 items"),
        ([*LENGTHS[:2], 3, *LENGTHS[3:]], r"shard 2 .* has only 0 items"),
    ],
)
def test_shards_with_fewer_or_more_items_are_named(
    on: Place, lengths: list[int], message: str, workers: int
) -> None:
    settings: dict[str, Any] = {
        "shards": SHARDS,
        "shard_lengths": lengths,
        "batch_size": 4,
        "cycle_length": 1,
    }
    with lp.Loader.from_generator(of_shard, **settings, **on(workers)) as loader:
        got = []
        with pytest.raises(lp.SampleError, match=message) as caught:
            # Like Keras, take a number of batches, and never request the end.
            for batch in itertools.islice(loader, len(loader)):
                got += batch.tolist()
        assert isinstance(caught.value, lp.SourceError)
    whole = [number for shard in SHARDS for number in shard]
    assert got == whole[: len(got)], "batches before it come"


def test_a_length_is_unknown_where_rows_may_be_left_out_or_nothing_is_stated() -> None:
    settings: dict[str, Any] = {"shards": SHARDS, "workers": 0}
    for more, message in (
        ({}, "Pass shard_lengths= to state"),
        ({"shard_lengths": LENGTHS, "on_error": "skip"}, 'unknown with on_error="skip"'),
    ):
        loader = lp.Loader.from_generator(of_shard, **settings, **more)
        with pytest.raises(TypeError, match=message):
            len(loader)


def test_wrong_stated_numbers_are_refused() -> None:
    for settings, message in (
        ({"shard_lengths": 5}, "shard_lengths needs shards"),
        (
            {"shards": SHARDS, "shard_lengths": [1, 2]},
            "shard_lengths must have one number for each of 9 shards, got 2",
        ),
        ({"shards": SHARDS, "shard_lengths": 0}, "shard_lengths states no items for this loader"),
        (
            {"shards": SHARDS, "shard_lengths": 1, "drop_remainder": True, "batch_size": 50},
            "drop_remainder=True leaves",
        ),
    ):
        with pytest.raises(lp.ArgumentError, match=message):
            lp.Loader.from_generator(of_shard, workers=0, **settings)  # type: ignore[arg-type]
