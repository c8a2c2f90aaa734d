"""Tar files by sample, grouped like WebDataset, and errors that name file and byte."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import loaderpool as lp

Members = list[tuple[str, bytes]]


def write(path: Path, members: Members, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def grouped(members: Members) -> list[dict[str, Any]]:
    """Return WebDataset's groups of members that belong to samples."""
    samples: list[dict[str, Any]] = []
    for name, data in members:
        folder, _, file = name.rpartition("/")
        key, _, field = file.partition(".")
        key = f"{folder}/{key}" if folder else key
        if not samples or samples[-1]["__key__"] != key:
            samples.append({"__key__": key})
        samples[-1][field.lower()] = data
    return samples


def images(count: int, seed: int = 0) -> Members:
    rng = np.random.default_rng(seed)
    members = []
    for number in range(count):
        members.append((f"train/{number:04}.jpg", rng.bytes(int(rng.integers(0, 3000)))))
        members.append((f"train/{number:04}.cls", str(number % 7).encode()))
    return members


# ---- samples ----


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_members_side_by_side_of_one_name(tmp_path: Path, form: int) -> None:
    parts = [images(20), images(1, 1), images(7, 2)]
    paths = [
        write(tmp_path / f"{number}.tar", members, form) for number, members in enumerate(parts)
    ]
    source = lp.TarSamples([str(paths[0]), *paths[1:]])
    expected = [sample for members in parts for sample in grouped(members)]
    assert list(source) == expected and len(source) == 28
    assert [source[-1 - at] for at in range(28)] == expected[::-1]


def test_the_name_ends_at_the_first_dot_behind_the_last_slash(tmp_path: Path) -> None:
    members = [("a.b/c.seg.PNG", b"1"), ("a.b/c.Jpg", b"2"), ("./d.json", b"3"), ("e.", b"4")]
    assert list(lp.TarSamples(write(tmp_path / "x.tar", members))) == [
        {"__key__": "a.b/c", "seg.png": b"1", "jpg": b"2"},
        {"__key__": "./d", "json": b"3"},
        {"__key__": "e", "": b"4"},
    ]


def test_folders_and_names_without_a_field_are_no_samples(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    for name in ("README", ".hidden", "a/1.jpg", "a/1.cls", "a/Makefile", "a/._2.jpg", "a/2.jpg"):
        (tmp_path / "in" / name).write_text(name)
    subprocess.run(["tar", "--sort=name", "-cf", "../x.tar", "."], cwd=tmp_path / "in", check=True)
    source = lp.TarSamples(tmp_path / "x.tar")
    keys = [(sample.pop("__key__"), sample) for sample in source]
    assert keys == [
        ("./a/1", {"cls": b"a/1.cls", "jpg": b"a/1.jpg"}),
        ("./a/2", {"jpg": b"a/2.jpg"}),
    ]


def test_files_of_tar_itself_with_padding_are_read(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    names = [f"{number}.txt" for number in range(5)]
    subprocess.run(["tar", "-b", "200", "-cf", "x.tar", *names], cwd=tmp_path, check=True)
    assert [sample["txt"] for sample in lp.TarSamples(tmp_path / "x.tar")] == [
        f"text {n}".encode() for n in range(5)
    ]


# ---- damage ----

MEMBERS: Members = [
    ("a.jpg", b"x" * 700),
    ("a.cls", b"1"),
    ("b.jpg", b"y" * 10),
    ("b.cls", b""),
    ("c.jpg", b"z" * 512),
]
# Starts of members, and of the mark at the end: a header of 512 bytes each, and data in blocks of
# 512.
BEGINS = [0, 1536, 2560, 3584, 4096, 5120]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small") / "small.tar", MEMBERS, tarfile.USTAR_FORMAT)


@hypothesis.given(data=st.binary(max_size=2000))
def test_any_bytes_are_refused_by_our_own_errors(small: Path, data: bytes) -> None:
    path = small.with_name("random.tar")
    path.write_bytes(data)
    with pytest.raises(lp.LoaderpoolError, match=r"random\.tar"):
        list(lp.TarSamples(path))


@hypothesis.given(
    size=st.one_of(
        st.integers(0, 5120 + 511), *(st.integers(begin - 2, begin + 2) for begin in BEGINS[1:])
    )
)
def test_a_file_that_is_cut_anywhere_is_refused(small: Path, size: int) -> None:
    path = small.with_name("cut.tar")
    path.write_bytes(small.read_bytes()[:size])
    with pytest.raises((lp.SourceError, lp.ArgumentError), match=r"cut\.tar") as caught:
        lp.TarSamples(path)
    if size:
        assert isinstance(caught.value, lp.SourceError), "no message but that of a cut file"
        assert "is truncated or damaged at byte" in str(caught.value)


def read_or_refused(path: Path) -> list[dict[str, Any]] | None:
    """Return all samples; None if a LoaderpoolError named the file."""
    try:
        return list(lp.TarSamples(path))
    except lp.LoaderpoolError as error:
        if str(path) not in str(error):
            raise
        return None


@hypothesis.given(member=st.integers(0, 4), place=st.integers(0, 511), bit=st.integers(0, 7))
@hypothesis.settings(max_examples=300)
def test_a_header_that_is_damaged_is_no_end_of_the_file(
    small: Path, member: int, place: int, bit: int
) -> None:
    data = bytearray(small.read_bytes())
    data[BEGINS[member] + place] ^= 1 << bit
    path = small.with_name("flipped.tar")
    path.write_bytes(data)
    samples = read_or_refused(path)
    # Changes that do not matter: bytes after the last field of a header, and other blanks and zeros
    # in a checksum.
    assert samples is None or samples == grouped(MEMBERS)


def test_headers_are_looked_at_again_when_a_sample_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", MEMBERS, tarfile.USTAR_FORMAT)
    stamp = path.stat().st_mtime_ns
    source = lp.TarSamples(path)
    for member, number, message in (
        (0, 0, r"sample 1 of .* \(at byte 0\) cannot be read: .*Error"),
        (3, 1, "header at byte 3584 is"),
    ):
        data = bytearray(path.read_bytes())
        data[BEGINS[member]] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(stamp, stamp))  # as after an error of the disk
        with pytest.raises(lp.SourceError, match=message):
            source[number]
    assert source[2] == grouped(MEMBERS)[2]


# ---- refused ----


def test_two_members_of_one_name_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("a.jpg", b""), ("a.JPG", b"")], tarfile.USTAR_FORMAT)
    with pytest.raises(
        lp.SourceError, match=r"sample 1 of .*x\.tar \(at byte 0\) has two members 'jpg'"
    ):
        lp.TarSamples(path)[0]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_links_are_named(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("b.jpg")
        info.type, info.linkname = kind, "a.jpg"
        tar.addfile(info)
    with pytest.raises(lp.SourceError, match=r"sample 1 of .* cannot be read"):
        lp.TarSamples(path)[0]


def test_members_without_data_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("b.jpg")
        info.type = tarfile.FIFOTYPE
        tar.addfile(info)
    with pytest.raises(
        lp.SourceError, match=r"sample 1 of .* cannot be read: 'b\.jpg' is not a file"
    ):
        lp.TarSamples(path)[0]


def test_files_put_together_by_cat_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", MEMBERS)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(
        lp.SourceError, match="has data after its end-of-archive marker, at byte 5120"
    ):
        lp.TarSamples(path)


def test_a_file_without_samples_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        lp.ArgumentError, match=r"found no samples in .*x\.tar: no member has a dot"
    ):
        lp.TarSamples(write(tmp_path / "x.tar", [("README", b"")]))
