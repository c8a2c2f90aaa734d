"""Compressed TFRecord and tar files, which are read from beginning to end: the same items, and
errors for damaged files.
"""

from __future__ import annotations

import array
import gzip
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.sources import files
from loaderpool.sources.in_order import InOrder
from loaderpool.trainer.saved_state import describe_source
from tests.support.record_files import (
    COMPRESS,
    numbered_members,
    numbered_records,
    tar_bytes,
    tfrecord_bytes,
)

MEMBERS = [
    ("a.jpg", b"x" * 700),
    ("a.cls", b"1"),
    ("b.jpg", b"y" * 10),
    ("b.cls", b""),
    ("c.jpg", b"z" * 512),
]
RECORDS = [b"first", b"", b"the third"]


def plain_and_packed(
    folder: Path, name: str, data: bytes, pack: Callable[[bytes], bytes]
) -> tuple[Path, Path]:
    plain, packed = folder / name, folder / f"packed-{name}"
    plain.write_bytes(data)
    packed.write_bytes(pack(data))
    return plain, packed


@pytest.fixture(params=["zlib", "isal"])
def inflater(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that reads gzip."""
    if request.param == "isal":
        pytest.importorskip("isal")
    else:
        for name in ("isal", "isal.isal_zlib"):
            monkeypatch.setitem(sys.modules, name, None)
    return str(request.param)


# ---- the same items as those of the plain file


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_records_are_those_of_the_plain_file(tmp_path: Path, kind: str) -> None:
    records = [*numbered_records(0, 50), b"", b"x" * 300_000, b"y" * 70_000, b""]
    plain, packed = plain_and_packed(tmp_path, "a", tfrecord_bytes(records), COMPRESS[kind])
    assert list(lp.TFRecords(packed)) == records
    assert list(lp.TFRecords([packed, plain, packed], check_crc=False)) == records * 3


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_tars_have_the_samples_of_the_plain_file(tmp_path: Path, kind: str) -> None:
    members = [
        *numbered_members(0, 30),
        ("big.bin", b"x" * 400_000),
        ("README", b""),
        ("last.A.b", b"1"),
    ]
    plain, packed = plain_and_packed(tmp_path, "a.tar", tar_bytes(members), COMPRESS[kind])
    expected = list(lp.TarSamples(plain))
    assert len(expected) == 32
    assert list(lp.TarSamples(packed)) == expected
    assert list(lp.TarSamples([packed, plain])) == expected * 2


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_in_order(tmp_path: Path, form: int) -> None:
    members = [(f"{'d' * 90}/{number}/{'e' * 70}.txt", str(number).encode()) for number in range(5)]
    plain, packed = plain_and_packed(tmp_path, "a.tar", tar_bytes(members, form), gzip.compress)
    assert list(lp.TarSamples(packed)) == list(lp.TarSamples(plain))


def test_links_within_a_sample_are_followed_in_order(tmp_path: Path) -> None:
    def write(path: Path, kind: bytes, target: str) -> Path:
        with tarfile.open(path, "w") as tar:
            for name, of_type, link in (
                ("x/a.jpg", tarfile.REGTYPE, ""),
                ("x/a.png", kind, target),
            ):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = of_type, link
                tar.addfile(info)
        (packed := path.with_suffix(".packed")).write_bytes(gzip.compress(path.read_bytes()))
        return packed

    for kind, target in ((tarfile.LNKTYPE, "x/a.jpg"), (tarfile.SYMTYPE, "a.jpg")):
        packed = write(tmp_path / "a.tar", kind, target)
        assert list(lp.TarSamples(packed)) == [{"__key__": "x/a", "jpg": b"", "png": b""}]
    for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE):
        with pytest.raises(
            lp.SourceError, match=r"sample 1 of .*a\.packed \(at byte 0\) cannot be read: "
        ):
            list(lp.TarSamples(write(tmp_path / "a.tar", kind, "b.jpg")))


@pytest.mark.usefixtures("inflater")
def test_joined_and_padded_gzip_files_are_read_to_the_end(tmp_path: Path) -> None:
    data, path = tfrecord_bytes(RECORDS), tmp_path / "joined"
    path.write_bytes(
        gzip.compress(data) + gzip.compress(data[:7]) + gzip.compress(data[7:]) + b"\0" * 70_000
    )
    assert list(lp.TFRecords(path)) == RECORDS * 2
    path.write_bytes(path.read_bytes() + b"no gzip" * 9)
    with pytest.raises(
        lp.SourceError, match=r"record 7 of .* cannot be read, because the gzip data is damaged"
    ):
        list(lp.TFRecords(path))


def test_a_sound_record_that_begins_like_gzip_is_read_by_index(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(tfrecord_bytes([b"a" * 0x088B1F, b"b"]))
    assert path.read_bytes()[:3] == b"\x1f\x8b\x08"
    for check_crc in (True, False):
        assert len(lp.TFRecords(path, check_crc)[1]) == 1


@hypothesis.given(data=st.data())
def test_a_file_in_order_reads_what_it_holds(data: st.DataObject) -> None:
    content = data.draw(st.binary(max_size=300)) * data.draw(st.integers(1, 60))
    sizes = data.draw(st.lists(st.integers(1, 5000), max_size=5))

    def chunks() -> Iterator[bytes]:
        at = 0
        for size in sizes:
            yield content[at : at + size] or b""
            at += size
        if content[at:]:
            yield content[at:]

    # An empty chunk marks the end of a file.
    file = InOrder((chunk for chunk in chunks() if chunk), "x", lambda head: None)
    at = 0
    for _ in range(data.draw(st.integers(0, 8))):
        if data.draw(st.booleans()):
            at = file.seek(data.draw(st.integers(at, at + 6000)))
            assert at == min(file.tell(), len(content))
        if data.draw(st.booleans()):
            at = file.seek(max(at - data.draw(st.integers(0, 600)), 0))
        size = data.draw(st.integers(-1, 3000))
        expected = content[at:] if size < 0 else content[at : at + size]
        assert file.read(size) == expected
        at += len(expected)
    with pytest.raises(OSError, match="front to back"):
        InOrder(iter([b"x" * 50_000]), "x", lambda head: None).seek(0, os.SEEK_END)


# ---- damage


def whole(source: Any) -> tuple[list[Any], str]:
    """Return the items before an error, and its message."""
    got: list[Any] = []
    try:
        got.extend(iter_into(got, source))
    except lp.SourceError as error:
        return got, str(error)
    return got, ""


def iter_into(got: list[Any], source: Any) -> list[Any]:
    for item in source:
        got.append(item)
    return []


def test_readinto_counts_bytes_in_any_buffer() -> None:
    file = InOrder(iter([b"0123456789"]), "x", lambda head: None)
    numbers = array.array("H", [0, 0, 0])
    assert file.readinto(numbers) == 6
    assert numbers.tobytes() == b"012345"


@pytest.mark.usefixtures("inflater")
@pytest.mark.parametrize("kind", COMPRESS)
def test_a_compressed_file_that_is_cut_is_refused(tmp_path: Path, kind: str) -> None:
    records, path = numbered_records(0, 100), tmp_path / "cut"
    data = COMPRESS[kind](tfrecord_bytes(records))
    for size in (len(data) // 2, len(data) - 5, len(data) - 1):
        path.write_bytes(data[:size])
        got, message = whole(lp.TFRecords(path))
        assert got == records[: len(got)]
        wanted = (
            f"record {len(got) + 1} of {path} cannot be read, because the {kind} file is truncated"
        )
        assert message.startswith(wanted), message


@pytest.mark.usefixtures("inflater")
@hypothesis.given(place=st.integers(0, 1 << 16), bit=st.integers(0, 7), is_tar=st.booleans())
@hypothesis.settings(
    max_examples=200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_bit_that_is_flipped_in_a_compressed_file_is_noticed(
    tmp_path: Path, place: int, bit: int, is_tar: bool
) -> None:
    content = tar_bytes(MEMBERS) if is_tar else tfrecord_bytes(RECORDS)
    data = bytearray(gzip.compress(content, mtime=0))
    place = 10 + place % (len(data) - 10)  # no data depends on the time and flags in the header
    data[place] ^= 1 << bit
    path = tmp_path / "flipped"
    path.write_bytes(data)
    got, message = whole((lp.TarSamples if is_tar else lp.TFRecords)(path))
    if message:
        assert str(path) in message and ("sample" if is_tar else "record") in message
    else:  # bits between the end of the data and its checksum
        path.write_bytes(content)
        assert got == list((lp.TarSamples if is_tar else lp.TFRecords)(path))


@pytest.mark.parametrize("size", [1, 11, 12, 20, 21, 22, 36, 40, 60])
def test_records_that_end_early_inside_a_sound_gzip_file_are_named(
    tmp_path: Path, size: int
) -> None:
    data, path = tfrecord_bytes(RECORDS), tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data[:size]))
    got, message = whole(lp.TFRecords(path))
    whole_records = sum(end <= size for end in (21, 37, len(data)))
    assert got == RECORDS[:whole_records]
    begin = (0, 21, 37)[whole_records]
    where = f"record {whole_records + 1} of {path} (at byte {begin} of the decompressed data)"
    assert (
        message == ""
        if size in (21, 37)
        else message.startswith(f"{where} is truncated or damaged")
    )


def test_wrong_checksums_inside_a_sound_gzip_file_are_named(tmp_path: Path) -> None:
    data, path = bytearray(tfrecord_bytes(RECORDS)), tmp_path / "x.gz"
    data[37 + 13] ^= 1
    path.write_bytes(gzip.compress(data))
    got, message = whole(lp.TFRecords(path))
    assert got == RECORDS[:2]
    assert message.startswith(
        f"record 3 of {path} (at byte 37 of the decompressed data) is damaged: the checksum of"
    )
    assert len(list(lp.TFRecords(path, check_crc=False))) == 3


@pytest.mark.parametrize("size", [300, 512, 1000, 1536, 2000, 2560, 3072, 4096, 5120, 5632])
def test_tars_that_end_early_inside_a_sound_gzip_file_are_named(tmp_path: Path, size: int) -> None:
    data, path = tar_bytes(MEMBERS, tarfile.USTAR_FORMAT), tmp_path / "x.gz"
    path.write_bytes(gzip.compress(data[:size]))
    got, message = whole(lp.TarSamples(path))
    assert f"{path} is truncated or damaged at byte" in message or size == 5632, message
    assert len(got) <= 3


def test_tars_put_together_by_cat_are_refused_in_order(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(tar_bytes(MEMBERS, tarfile.USTAR_FORMAT)) * 2)
    with pytest.raises(
        lp.SourceError, match=r"after its end-of-archive marker.*pass them one by one"
    ):
        list(lp.TarSamples(path))


def test_a_compressed_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(tfrecord_bytes(RECORDS)))
    source = lp.TFRecords(path)
    path.write_bytes(gzip.compress(tfrecord_bytes(RECORDS * 2)))
    with pytest.raises(lp.SourceError, match="has changed since"):
        list(source)


def test_a_compressed_tar_without_samples_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(tar_bytes([("README", b"")])))
    with pytest.raises(lp.SourceError, match=r"found no samples in .*: no member has a dot"):
        list(lp.TarSamples(path))


# ---- messages of such a source


def test_a_source_in_order_has_no_index_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(tfrecord_bytes(RECORDS)))
    source = lp.TFRecords(path)
    assert repr(source) == f"<records of {path}, read in order>" and source
    with pytest.raises(lp.SourceError, match=f"cannot be indexed, because {path} is compressed"):
        source[0]
    with pytest.raises(TypeError, match=r"number of records is unknown, .* Pass shard_lengths="):
        len(source)
    assert len(lp.TFRecords(path, shard_lengths=[3])) == 3
    with pytest.raises(lp.SourceError, match="TFRecords, which can only be iterated"):
        lp.mix([source, [1, 2]])


def test_a_state_of_a_source_in_order_holds_for_a_copy_elsewhere(tmp_path: Path) -> None:
    sources = []
    for name, records in (("a", RECORDS), ("b", RECORDS), ("c", RECORDS * 2)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "x.gz"
        path.write_bytes(gzip.compress(tfrecord_bytes(records), mtime=0))
        sources.append(lp.TFRecords(path))
    described = [describe_source(source) for source in sources]
    assert described[0] == described[1] != described[2]
    stated = lp.TFRecords(tmp_path / "a" / "x.gz", shard_lengths=3)
    assert describe_source(stated) != described[0]


def test_zip_files_and_libraries_that_lack_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("google_crc32c")
    path = tmp_path / "x"
    path.write_bytes(b"PK\x03\x04" + b"0" * 50)
    for make in (lp.TFRecords, lp.TarSamples):
        with pytest.raises(lp.ArgumentError, match=r"paths: .* is a zip file. Extract it"):
            make(path)
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"0" * 50)
    for name in ("compression", "compression.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r"needs Python 3\.14 or zstandard: pip install zstandard"
    ):
        list(lp.TFRecords(path))


def test_stated_lengths_are_compared_with_an_index(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(tfrecord_bytes(RECORDS))
    assert len(lp.TFRecords([path, path], shard_lengths=3)) == 6
    with pytest.raises(lp.SourceError, match=f"{path} has 3 records, but shard_lengths states 4"):
        lp.TFRecords([path, path], shard_lengths=[3, 4])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1], "shard_lengths must have one number for each of 2 files, got 1"),
        ([1, -1], r"shard_lengths\[1\] must be at least 0, got -1"),
        (True, "shard_lengths"),
        (1.5, "shard_lengths must be a list with the number of items of each of 2 files"),
        ("ab", "shard_lengths must be a list with the number"),
        ([1, "2"], r"shard_lengths\[1\] must be an integer"),
    ],
)
def test_wrong_stated_lengths_are_named(tmp_path: Path, lengths: Any, message: str) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(tfrecord_bytes(RECORDS)))
    with pytest.raises(lp.ArgumentError, match=message):
        lp.TFRecords([path, path], shard_lengths=lengths)


# ---- a user's own format


class Lines(files.FileSource):
    kind, unit = "lines", "line"

    def index(self, path: str) -> Any:
        return [0, os.path.getsize(path)]

    def read(self, handle: Any, record: files.Record) -> Any:
        return handle.read(record)


class OrderedLines(Lines):
    def read_records(self, file: Any, path: str) -> Iterator[bytes]:
        for line in file:
            if line == b"bad\n":
                raise ValueError("no line")
            yield line


def test_a_format_of_ones_own_reads_compressed_files_by_one_method(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one\n" * 50_000 + b"last"))
    assert list(OrderedLines(path)) == [b"one\n"] * 50_000 + [b"last"]
    assert len(Lines(path)) == 1, "without the method nothing changes"
    path.write_bytes(gzip.compress(b"one\nbad\n"))
    with pytest.raises(
        lp.SourceError, match=r"line 2 of .*x\.gz cannot be read: ValueError: no line"
    ):
        list(OrderedLines(path))
    with pytest.raises(
        lp.ArgumentError,
        match=r"gs://b/x is a URL, from which Lines cannot read\. Download the file",
    ):
        Lines("gs://b/x")
