"""Who has something finds its page: in the README, and at the top of the how-tos, which lead to every page."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

_INDEX = ROOT / "docs" / "how-to" / "README.md"
_ROW = re.compile(r"^\| (?!you have|---)([^|]+) \| ([^|]*\]\([^|]+\)[^|]*) \| ([^|]+) \|$", re.MULTILINE)


def rows(text: str) -> list[tuple[str, ...]]:
    """Of the table "you have … | read | in a word"."""
    table = text.partition("| you have | read | in a word |")[2].partition("\n\n")[0]
    return _ROW.findall(table)


def test_the_table_stands_at_the_top_of_the_how_tos() -> None:
    index = _INDEX.read_text(encoding="utf-8")
    assert index.startswith("# How to\n\n| you have | read |")
    assert len(rows(index)) > 9


def test_the_readme_leads_to_every_page_of_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    have = readme.partition("\n## You have …\n")[2].partition("\n## ")[0]
    table = "".join(read for _, read, _ in rows(_INDEX.read_text(encoding="utf-8")))
    wanted = {f"docs/how-to/{target}".replace("how-to/../", "") for target in re.findall(r"\]\(([^)]+)\)", table)}
    assert set(re.findall(r"\]\(([^)]+)\)", have)) == wanted
    assert "](docs/how-to/README.md)" in readme


@pytest.mark.parametrize(
    "thing",
    [
        *("a list of files", "Sequence", "generator", "DataFrame", "HDF5", "array of 15 GB", "text files"),
        *("database cursor", "remote bucket", "TFRecord", "millions"),
    ],
)
def test_what_people_have_has_a_line(thing: str) -> None:
    assert [has for has, _, _ in rows(_INDEX.read_text(encoding="utf-8")) if thing in has]


def test_every_how_to_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", _INDEX.read_text(encoding="utf-8")))
    assert linked == {page.name for page in _INDEX.parent.glob("*.md")} - {_INDEX.name}
