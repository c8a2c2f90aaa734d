"""Source lines that only the main process has are added below the frames of a worker's traceback,
and to no others.
"""

from __future__ import annotations

import linecache

import pytest

from loaderpool.engine.failures import with_source_lines

CELL = "/tmp/ipykernel_4711/1234.py"  # name of a cell in ipykernel; this file does not exist
SOURCE = "def load(item):\n    raise ValueError(\n        item)\n\ndef outer(item):\n    return load(item)\n"


@pytest.fixture(autouse=True)
def source_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source in `linecache`, where IPython stores it."""
    monkeypatch.setitem(linecache.cache, CELL, (len(SOURCE), None, SOURCE.splitlines(True), CELL))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (f'  | Traceback:\n  |   File "{CELL}", line 6, in outer', "  |     return load(item)"),
        (
            f'Thread 0x1 (most recent call first):\n  File "{CELL}", line 2 in load',
            "    raise ValueError(",
        ),
    ],
    ids=["of an exception group", "of faulthandler"],
)
def test_frames_keep_their_margin(text: str, filled: str) -> None:
    assert with_source_lines(text) == f"{text}\n{filled}"


def test_what_nobody_knows_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        linecache.cache, "<string>", (1, None, ["wrong\n"], "<string>")
    )  # Python 3.13's `-c`
    text = "\n".join(
        f'  File "{name}", line 99, in f' for name in ("<string>", "<stdin>", "/nowhere.py", CELL)
    )
    assert with_source_lines(text) == text
    monkeypatch.setattr(linecache, "getline", None)  # another library may break it
    text = f'  File "{CELL}", line 2, in load'
    assert with_source_lines(text) == text
