"""JSON lines by index: every value, with any blank lines between them, and errors that name file
and byte.
"""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.sources import text as text_module


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@hypothesis.given(
    lines=st.lists(
        st.sampled_from(["", "1", "null", '"ä\u2028"', "[]", '{"b": [2]}']), max_size=12
    ),
    ends=st.lists(st.sampled_from(["\n", "\r\n"]), min_size=12, max_size=12),
    has_last_end=st.booleans(),
    chunk_bytes=st.integers(1, 9),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_blank_lines_are_no_items_wherever_they_are(
    tmp_path: Path, lines: list[str], ends: list[str], has_last_end: bool, chunk_bytes: int
) -> None:
    text = "".join(line + end for line, end in zip(lines, ends, strict=False))
    if not has_last_end:
        text = text.removesuffix("\n").removesuffix("\r")
    path = write(tmp_path / "x.jsonl", text)
    expected = [json.loads(line) for line in lines if line]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_CHUNK_BYTES", chunk_bytes)
        if expected:
            assert list(lp.JsonLines(path)) == expected
        else:
            with pytest.raises(lp.ArgumentError, match=r"found no JSON lines in .*x\.jsonl"):
                lp.JsonLines(path)


def test_a_byte_order_mark_is_no_part_of_the_first_value(tmp_path: Path) -> None:
    assert list(lp.JsonLines(write(tmp_path / "x", '{"a": 1}\n2'.encode("utf-8-sig")))) == [
        {"a": 1},
        2,
    ]


def test_a_damaged_line_is_an_error_of_that_item_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", b'{"a": 1}\n\n{"a": \n"\xff"\n[1, 2')
    source = lp.JsonLines(path)
    assert len(source) == 4 and source[0] == {"a": 1}
    for index, message in (
        (
            1,
            r"JSON line 2 of .*x\.jsonl \(at byte 10\) cannot be read: JSONDecodeError: Expecting value",
        ),
        (2, r"JSON line 3 of .*x\.jsonl \(at byte 17\) cannot be read: UnicodeDecodeError"),
        (3, r"JSON line 4 of .*x\.jsonl \(at byte 21\) cannot be read: JSONDecodeError"),
    ):
        with pytest.raises(lp.SourceError, match=message):
            source[index]
