"""TFRecord files by index: the records that TensorFlow reads, and errors that name record and
byte.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import loaderpool as lp

Write = Callable[..., Path]

# Important lengths: none, that of a header, and some near the size of the buffer for headers.
LENGTHS = [
    0,
    1,
    11,
    12,
    13,
    15,
    16,
    17,
    300,
    8191,
    8192,
    8193,
    65536 - 16,
    65536,
    200_000,
    3,
    0,
    0,
    70_000,
    1,
]


def records_of(lengths: list[int], seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(length) for length in lengths]


@pytest.fixture
def write(tf: Any, tmp_path: Path) -> Write:
    """Write records with TensorFlow's own writer."""

    def write(name: str, records: list[bytes], compression: str = "") -> Path:
        path = tmp_path / name
        with tf.io.TFRecordWriter(str(path), compression) as writer:
            for record in records:
                writer.write(record)
        return path

    return write


def by_tensorflow(tf: Any, paths: list[Path]) -> list[bytes]:
    dataset = tf.data.TFRecordDataset([str(path) for path in paths])
    return [bytes(record) for record in dataset.as_numpy_iterator()]


# ---- the records ----


def test_records_are_those_of_tensorflow_in_its_order(tf: Any, write: Write) -> None:
    paths = [
        write("a", records_of(LENGTHS)),
        write("none", []),
        write("b", records_of([5] * 3000, 1)),
        write("c", [b""]),
    ]
    source = lp.TFRecords([str(paths[0]), *paths[1:]])
    expected = by_tensorflow(tf, paths)
    assert len(source) == len(expected) == len(LENGTHS) + 3000 + 1
    assert list(source) == expected
    assert [source[-1 - at] for at in range(30)] == expected[::-1][:30]
    assert list(lp.TFRecords(paths, check_crc=False)) == expected
    assert list(lp.TFRecords(paths[::-1])) == by_tensorflow(tf, paths[::-1])


# ---- damage ----


@pytest.fixture(scope="module")
def small(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with records of 5, 0 and 9 bytes."""
    path = tmp_path_factory.mktemp("small") / "small.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in (b"first", b"", b"the third"):
            writer.write(record)
    return path


RECORDS = [b"first", b"", b"the third"]
BEGINS = [0, 21, 37]
SIZE = 37 + 16 + 9


@hypothesis.given(size=st.integers(0, SIZE - 1), check_crc=st.booleans())
def test_a_file_that_is_cut_anywhere_is_refused(small: Path, size: int, check_crc: bool) -> None:
    path = small.with_name("cut")
    path.write_bytes(small.read_bytes()[:size])
    whole = sum(end <= size for end in (*BEGINS[1:], SIZE))
    if size in BEGINS[1:]:  # such a file looks whole
        assert list(lp.TFRecords(path, check_crc)) == RECORDS[:whole]
    elif size:
        with pytest.raises(
            lp.SourceError,
            match=rf"cut: record {whole + 1} \(at byte {BEGINS[whole]}\) is truncated",
        ) as caught:
            lp.TFRecords(path, check_crc)
        advice = f"head -c {BEGINS[whole]} {path} > NEW" if whole else "Is this a TFRecord file?"
        assert advice in str(caught.value)
    else:
        with pytest.raises(lp.ArgumentError, match="found no records in"):
            lp.TFRecords(path, check_crc)


@hypothesis.given(place=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
def test_any_bit_that_is_flipped_is_noticed_and_costs_no_more_than_it_must(
    small: Path, place: int, bit: int
) -> None:
    data = bytearray(small.read_bytes())
    data[place] ^= 1 << bit
    path = small.with_name("flipped")
    path.write_bytes(data)
    record = max(number for number, begin in enumerate(BEGINS) if begin <= place)
    # the length or its checksum is damaged, so the next records cannot be found
    if place - BEGINS[record] < 12:
        with pytest.raises(
            lp.SourceError,
            match=rf"record {record + 1} \(at byte {BEGINS[record]}\) is truncated or",
        ):
            lp.TFRecords(path)
        return
    source = lp.TFRecords(path)
    for number, expected in enumerate(RECORDS):
        if number != record:
            assert source[number] == expected
            continue
        with pytest.raises(
            lp.SourceError,
            match=rf"record {record + 1} of .*flipped \(at byte {BEGINS[record]}\) is dam",
        ):
            source[number]
    unchecked = lp.TFRecords(path, check_crc=False)
    begin = BEGINS[record] + 12
    assert unchecked[record] == bytes(data[begin : begin + len(RECORDS[record])])


def test_a_damaged_file_among_sound_ones_is_named_and_its_sound_part_read_by_the_advice(
    write: Write,
) -> None:
    paths = [write(name, [name.encode(), b"last"]) for name in ("a", "b", "c")]
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    with pytest.raises(
        lp.SourceError, match=rf"{paths[1]}: record 2 \(at byte 17\) .*: head -c 17 "
    ) as caught:
        lp.TFRecords(paths)
    command = str(caught.value).partition("run: ")[2].replace("NEW", str(paths[1].with_name("new")))
    subprocess.run(command, shell=True, check=True)
    assert list(lp.TFRecords([paths[0], paths[1].with_name("new")])) == [b"a", b"last", b"b"]


def test_a_length_that_would_go_on_past_the_end_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<QI", 2**64 - 1, 0) + b"0123456789")
    with pytest.raises(lp.SourceError, match="its length of 18446744073709551615 exceeds the file"):
        lp.TFRecords(path, check_crc=False)


# ---- refused ----


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("check_crc", [True, False])
def test_compressed_records_are_those_of_tensorflow(
    tf: Any, write: Write, kind: str, check_crc: bool
) -> None:
    path = write("x", records_of(LENGTHS), kind)
    expected = tf.data.TFRecordDataset(str(path), kind).as_numpy_iterator()
    assert (
        list(lp.TFRecords(path, check_crc))
        == [bytes(record) for record in expected]
        == records_of(LENGTHS)
    )


def test_a_record_as_long_as_a_compressed_file_begins_is_none(write: Write) -> None:
    """Its length is written as the bytes 1f 8b 08 00 ..., with which a gzip file starts."""
    path = write("x", [b"a" * 0x088B1F, b"b"])
    assert path.read_bytes()[:3] == b"\x1f\x8b\x08"
    assert [len(record) for record in lp.TFRecords(path)] == [0x088B1F, 1]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(lp.SourceError, match="record 2"):
        lp.TFRecords(path)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(lp.ArgumentError, match="check_crc must be True or False, got 1"):
        lp.TFRecords("x", 1)  # type: ignore[arg-type]


def test_the_package_for_checksums_is_asked_for_only_where_it_is_used(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("x", [b"abc"])
    monkeypatch.setitem(__import__("sys").modules, "google_crc32c", None)
    with pytest.raises(
        ImportError, match=r"TFRecords needs google_crc32c, .*: pip install 'loaderpool\[files\]'"
    ):
        lp.TFRecords(path)
    assert lp.TFRecords(path, check_crc=False)[0] == b"abc"
