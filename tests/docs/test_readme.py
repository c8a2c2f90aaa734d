"""The README is short, and what it says of speed and limits is what the pages behind it say."""

from __future__ import annotations

import re

import loaderpool
from tests.docs.pages import ROOT

_README = (ROOT / "README.md").read_text(encoding="utf-8")
_PERFORMANCE = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
# The columns of the peers' table that the README has: all but the view.
_SHOWN = (0, 2, 3, 4, 5, 6)


def cells(text: str, below: str) -> list[list[str]]:
    """The rows of the first table below a line, without its head."""
    lines = text.partition(below)[2].strip().splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def without_spread_and_goal(cell: str) -> str:
    return re.sub(r" (\[.*?\]|\([≥≤].*?\))", "", cell)


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(_README.splitlines()) < 160


def test_its_results_are_rows_of_the_peers_table() -> None:
    known = [
        [without_spread_and_goal(row[column]) for column in _SHOWN]
        for row in cells(_PERFORMANCE, "<!-- peers:begin -->\n")
    ]
    shown = cells(_README, "which a test compares -->\n")
    assert 6 <= len(shown) <= 8
    assert [row for row in shown if row not in known] == []


def test_its_limits_are_few_and_lead_to_all_of_them() -> None:
    limits = _README.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", limits, re.MULTILINE)) <= 5
    assert "](docs/reference/limits.md)" in limits


def test_what_is_cited_is_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [loaderpool.__version__]
