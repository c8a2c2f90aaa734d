"""Source lines that only the trainer has stand below the frames of a worker's traceback, and no others change."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from loaderpool.core.failures import with_source_lines

CELL = "/tmp/ipykernel_4711/1234.py"  # as ipykernel names a cell: no such file
SOURCE = "def load(item):\n    raise ValueError(\n        item)\n\ndef outer(item):\n    return load(item)\n"


@pytest.fixture
def cell() -> Iterator[dict[str, Any]]:
    """The cell's functions; its source is in `linecache`, as IPython puts it there."""
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, CELL, "exec"), namespace)
    linecache.cache[CELL] = (len(SOURCE), None, SOURCE.splitlines(True), CELL)
    yield namespace
    linecache.cache.pop(CELL, None)


def formatted_elsewhere(raise_it: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The traceback as this process formats it, and as one does that has not this linecache."""
    try:
        raise_it()
    except BaseException as error:
        here = "".join(traceback.format_exception(error))
        with monkeypatch.context() as patch:
            patch.setattr(linecache, "cache", {})
            return here, "".join(traceback.format_exception(error))
    raise AssertionError


def without_carets(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if set(line.strip(" |\n")) - set("~^") or not line.strip())


def test_missing_lines_are_filled_in_as_python_shows_them(
    cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chained() -> None:
        try:
            cell["load"](1)
        except ValueError as error:
            raise RuntimeError("second") from error

    for raise_it in (lambda: cell["outer"](3), chained):
        here, elsewhere = formatted_elsewhere(raise_it, monkeypatch)
        assert "raise ValueError(" in here and "raise ValueError(" not in elsewhere
        filled = with_source_lines(elsewhere)
        assert without_carets(filled) == without_carets(here)
        assert with_source_lines(filled) == filled
        assert with_source_lines(here) == here


@pytest.mark.usefixtures("cell")
@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (f'  | Traceback:\n  |   File "{CELL}", line 6, in outer', "  |     return load(item)"),
        (f'Thread 0x1 (most recent call first):\n  File "{CELL}", line 2 in load', "    raise ValueError("),
    ],
    ids=["of an exception group", "of faulthandler"],
)
def test_frames_keep_their_margin(text: str, filled: str) -> None:
    assert with_source_lines(text) == f"{text}\n{filled}"


def test_what_nobody_knows_stays_out(monkeypatch: pytest.MonkeyPatch, cell: dict[str, Any]) -> None:
    monkeypatch.setitem(linecache.cache, "<string>", (1, None, ["wrong\n"], "<string>"))  # Python 3.13's `-c`
    text = "\n".join(f'  File "{name}", line 99, in f' for name in ("<string>", "<stdin>", "/nowhere.py", CELL))
    assert with_source_lines(text) == text
    monkeypatch.setattr(linecache, "getline", None)  # broken by somebody
    text = f'  File "{CELL}", line 2, in load'
    assert with_source_lines(text) == text
