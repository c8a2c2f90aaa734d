"""CSV by row: the rows of Python's csv module, line ends in quotes and all; damage named by file and byte."""

from __future__ import annotations

import csv
import io
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.sources import csv_rows, line_index


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def by_csv(text: str) -> list[dict[str, str]]:
    names, *rows = (row for row in csv.reader(io.StringIO(text, newline="")) if row)
    return [dict(zip(names, row, strict=True)) for row in rows]


# ---- rows ----

PLAIN = "name,age\nann,3\n\nbob,4\r\n"
QUOTED = '"na\nme",age\n"a ""b"", \r\nc",1\n\nd,2\n"","\n\n"\n'


@pytest.mark.parametrize("text", [PLAIN, QUOTED, "a\n1", "\n\r\na,b\n\n\n1,2\n\n", "a,b\n1,\n,2\n,\n"])
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 20])
def test_rows_are_those_of_the_csv_module(
    tmp_path: Path, text: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_index, "_CHUNK_BYTES", chunk_bytes)
    source = lp.Csv(write(tmp_path / "x.csv", text))
    expected = by_csv(text)
    assert list(source) == expected and len(source) == len(expected)
    assert source.fieldnames == tuple(expected[0])
    assert [source[-1 - at] for at in range(len(source))] == expected[::-1]


# A "\r" alone is written without quotes by older Pythons.
FIELDS = st.lists(st.sampled_from(["a", "b", ",", ";", '"', "\n", "\r\n", " ", "'", "é"]), max_size=5).map("".join)


@hypothesis.given(
    rows=st.lists(st.lists(FIELDS, min_size=3, max_size=3), min_size=1, max_size=8),
    delimiter=st.sampled_from(",;\t"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\n"]),
    has_header=st.booleans(),
    encoding=st.sampled_from(["utf-8", "latin-1", "utf-8-sig"]),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_what_the_csv_module_wrote_is_read_back(
    tmp_path: Path,
    rows: list[list[str]],
    delimiter: str,
    quoting: Any,
    line_end: str,
    has_header: bool,
    encoding: str,
) -> None:
    names = ['"x"', "y\nz", "ö"]
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator=line_end)
    writer.writerows([names] * has_header + rows)
    path = write(tmp_path / "x.csv", text.getvalue().encode(encoding))
    source = lp.Csv(path, None if has_header else names, delimiter, encoding=encoding)
    assert list(source) == [dict(zip(names, row, strict=True)) for row in rows]


def test_several_files_of_one_header(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a", PLAIN),
        write(tmp_path / "none", "name,age\n"),
        write(tmp_path / "b", 'name,age\n"x",5'),
    ]
    source = lp.Csv(paths)
    expected = [("ann", "3"), ("bob", "4"), ("x", "5")]
    assert [tuple(row.values()) for row in source] == expected
    assert [tuple(row.values()) for row in pickle.loads(pickle.dumps(source))] == expected
    assert repr(source) == f"<3 rows of 3 files from {paths[0]} on>"
    with pytest.raises(lp.ArgumentError, match=r"header of .*c is name, size, and that of .*a is name, age"):
        lp.Csv([*paths, write(tmp_path / "c", "name,size\n")])


def test_without_quotes_a_row_is_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'size\tname\n5"\t"a\n6"\tb"\n')
    source = lp.Csv(path, delimiter="\t", quotechar=None)
    assert list(source) == [{"size": '5"', "name": '"a'}, {"size": '6"', "name": 'b"'}]


def test_a_quote_inside_a_field_is_a_quote(tmp_path: Path) -> None:
    source = lp.Csv(write(tmp_path / "x.csv", 'size,name\n5" pipe,a\n6,b\n'))
    assert list(source) == [{"size": '5" pipe', "name": "a"}, {"size": "6", "name": "b"}]


def test_files_without_quotes_are_not_parsed_to_be_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_rows._Scanner, "_scan_by_rows", None)
    source = lp.Csv(write(tmp_path / "x.csv", '"a","b"\n' + "1,2\n" * 50_000))
    assert len(source) == 50_000 and source._index.starts.nbytes == 4 * 50_001


def test_longer_fields_are_allowed_in_the_workers_where_they_are_in_the_trainer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "a\n" + "y" * 200_000 + "\n")
    before = csv.field_size_limit()
    try:
        with pytest.raises(lp.SourceError, match=r"field larger than field limit"):
            lp.Csv(path)[0]
        csv.field_size_limit(300_000)
        stream = pickle.dumps(lp.Csv(path))
        csv.field_size_limit(before)
        assert len(pickle.loads(stream)[0]["a"]) == 200_000
    finally:
        csv.field_size_limit(before)


# ---- damage ----


def test_a_row_that_is_damaged_is_an_error_of_that_item_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", b'a,b\n1,2\n\n3\n4,5,6\n"7",\xff\n8\r9,1\n8,9\n')
    source = lp.Csv(path)
    assert len(source) == 6 and source[0] == {"a": "1", "b": "2"} and source[5] == {"a": "8", "b": "9"}
    for index, message in (
        (1, r"record 2 of .*x\.csv \(at byte 9\) has 1 fields, and there are 2 names \(a, b\)\. It begins b'3"),
        (2, r"record 3 .*\(at byte 11\) has 3 fields"),
        (3, r"record 4 .*\(at byte 17\) cannot be decoded: 'utf-8' codec .* Is encoding='utf-8' right\?"),
        (4, r"record 5 .*\(at byte 23\) is no row of CSV: new-line character seen in unquoted field"),
    ):
        with pytest.raises(lp.SourceError, match=message):
            source[index]


@hypothesis.given(size=st.integers(0, len(QUOTED) - 1))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_a_file_that_is_cut_anywhere_gives_its_whole_rows_or_an_error(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "cut.csv", QUOTED[:size])
    expected = [tuple(row.values()) for row in by_csv(QUOTED)]
    try:
        source = lp.Csv(path)
        rows = [tuple(source[index].values()) for index in range(len(source) - 1)]
        assert rows == expected[: len(rows)]
        last = tuple(source[-1].values())
    except lp.LoaderpoolError as error:
        if "cut.csv" not in str(error):
            raise
    else:
        assert last == expected[len(rows)] or last[-1] in expected[len(rows)][-1]  # cut inside a field without quotes


def test_a_quote_that_is_never_closed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'a,b\n1,"2"\n3,"4\n5,6\n')
    with pytest.raises(
        lp.SourceError, match=r"the row at byte 10 of .*x\.csv has a quote that is never closed: .*is cut"
    ):
        lp.Csv(path)
    far = write(tmp_path / "far.csv", 'a,b\n1,"2\n' + "5,6\n" * 50_000 + '7,"8"\n')
    with pytest.raises(lp.SourceError, match=r"the row at byte 4 of .*far\.csv: field larger .*quote .*never closed"):
        lp.Csv(far)


# ---- refused ----


def test_a_byte_order_mark_asks_for_its_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", PLAIN.encode("utf-8-sig"))
    with pytest.raises(lp.ArgumentError, match=r"x\.csv begins with a byte order mark: pass encoding='utf-8-sig'"):
        lp.Csv(path)
    assert lp.Csv(path, encoding="utf-8-sig")[0] == {"name": "ann", "age": "3"}


@pytest.mark.parametrize(
    ("text", "arguments", "error", "message"),
    [
        ("", {}, lp.ArgumentError, "x.csv has no header: give fieldnames="),
        ("\n\n", {}, lp.ArgumentError, "x.csv has no header"),
        ("a,b\n", {}, lp.ArgumentError, "there is no row in .*x.csv below the header"),
        ("a,a\n1,2", {}, lp.ArgumentError, "the header of .*x.csv has several fields of the name 'a'"),
        ("1,2", {"fieldnames": ["a", "a"]}, lp.ArgumentError, "fieldnames has several fields of the name 'a'"),
        ("1,2", {"fieldnames": "ab"}, lp.ArgumentTypeError, "fieldnames must be a list of str, got 'ab'"),
        ("1,2", {"fieldnames": []}, lp.ArgumentError, "fieldnames is empty"),
        ("1,2", {"delimiter": ",,"}, lp.ArgumentError, "delimiter must be one ASCII character"),
        ("1,2", {"delimiter": 3}, lp.ArgumentTypeError, "delimiter must be a str, got 3"),
        ("1,2", {"quotechar": "\n"}, lp.ArgumentError, "quotechar must be one ASCII character"),
        ("1,2", {"quotechar": ","}, lp.ArgumentError, "another character than delimiter"),
        ("1,2", {"encoding": "utf-16"}, lp.ArgumentError, "a line end is the byte 10"),
        ("\x1f\x8b\x08", {}, lp.ArgumentError, "x.csv is compressed"),
    ],
)
def test_wrong_arguments_and_files_are_named(
    tmp_path: Path, text: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "x.csv", text.encode("latin-1"))
    with pytest.raises(error, match=message):
        lp.Csv(path, **arguments)
