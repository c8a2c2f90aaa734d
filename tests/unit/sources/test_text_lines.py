"""Lines of text files by index: all line ends, and lines that cannot be decoded."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.sources import text


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# ---- lines ----


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ("a\nbc\n", ["a", "bc"]),
        ("a\nbc", ["a", "bc"]),
        ("a", ["a"]),
        ("\n", [""]),
        ("\n\na\n\n", ["", "", "a", ""]),
        ("a\r\nb\r\n\r\nc", ["a", "b", "", "c"]),
        ("a\rb\n", ["a\rb"]),
        (" a\t\n  \n", [" a\t", "  "]),
        ("äöü\n日本\n", ["äöü", "日本"]),
        ("one\x0btwo\x0c\u2028three\n", ["one\x0btwo\x0c\u2028three"]),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 20])
def test_lines_are_those_between_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, lines: list[str], chunk_bytes: int
) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", chunk_bytes)
    path = write(tmp_path / "x.txt", data)
    source = lp.TextLines(path)
    assert len(source) == len(lines)
    assert list(source) == lines
    assert [source[-1 - i] for i in range(len(lines))] == lines[::-1]
    kept = lp.TextLines(path, strip=False)
    assert "".join(kept) == data and len(kept) == len(lines)


def test_encodings_are_those_of_open(tmp_path: Path) -> None:
    text = "Grüße\nça\n"
    for encoding in ("latin-1", "cp1252", "utf-8", "utf-8-sig"):
        path = write(tmp_path / encoding, text.encode(encoding))
        assert list(lp.TextLines(path, encoding)) == ["Grüße", "ça"]
    assert list(
        lp.TextLines(write(tmp_path / "jis", "日\n本\n".encode("shift_jis")), "shift_jis")
    ) == ["日", "本"]


def test_what_cannot_be_decoded_is_named_by_file_and_line(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "good.txt", "a\nb\n"),
        write(tmp_path / "bad.txt", b"ok\n\xff\xfe\nok\n"),
    ]
    source = lp.TextLines(paths)
    assert source[2] == source[4] == "ok"
    with pytest.raises(
        lp.SourceError, match=r"line 2 of .*bad\.txt \(at byte 3\) cannot be decoded: 'utf-8' codec"
    ):
        source[3]
    assert lp.TextLines(paths, errors="replace")[3] == "\ufffd\ufffd"


# ---- refused ----


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"]
)
def test_compressed_files_are_refused_with_what_to_do(tmp_path: Path, pack: Any) -> None:
    path = write(tmp_path / "x.txt.packed", pack(b"a\nb\n"))
    with pytest.raises(
        lp.ArgumentError, match=r"x\.txt\.packed is compressed, so a line .*Decompress the file"
    ):
        lp.TextLines(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "utf-16"), "got 'utf-16'. Convert the file first: iconv -f utf-16 -t utf-8"),
        (("x", "no-such"), r"valid for open\(\): unknown encoding: no-such"),
        (("x", "hex"), r"valid for open\(\): 'hex' is not a text encoding"),
        (("x", None), r"valid for open\(\): .*'encoding' must be str, not None"),
        (("x", "utf-8", "yes"), "strip must be True or False, got 'yes'"),
        (("x", "utf-8", True, "wrong"), r"valid for open\(\): unknown error handler name 'wrong'"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(lp.ArgumentError, match=message):
        lp.TextLines(*arguments)
