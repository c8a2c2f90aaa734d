"""The map of the project is true: rooms in their order, modules by their paths, rules by their numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import loaderpool
from tests.docs.pages import ROOT, all_pages, name_of
from tests.support.imports import read_package
from tests.test_architecture import ROOMS

_PACKAGE = Path(loaderpool.__file__).parent
_RULES = ROOT / "docs" / "internals" / "rules.md"
_ROOM = re.compile(r"^\| `([\w/]+)` \| [^|]+ \| [^|]+ \| `([\w/.]+)` \|$", re.MULTILINE)


def rooms() -> list[tuple[str, str]]:
    """Of the table in architecture.md: each room with the file to open first."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    return _ROOM.findall(text.partition("\n## Rooms\n")[2].partition("\n## ")[0])


def room_of(module: str) -> str | None:
    """The innermost room of the table in which a module is."""
    path = module.replace(".", "/").removeprefix("loaderpool/")
    return max((name for name, _ in rooms() if path == name or path.startswith(f"{name}/")), key=len, default=None)


def test_every_module_is_in_a_room_of_the_table() -> None:
    assert len(rooms()) > 15
    assert [module.name for module in read_package(_PACKAGE) if room_of(module.name) is None] == []
    assert [first for _, first in rooms() if not (_PACKAGE / first).is_file()] == []


def test_rooms_stand_in_the_order_of_the_architecture_test() -> None:
    assert [name.replace("/", ".") for name, _ in rooms()] == [name or "loaderpool" for name in ROOMS]


def test_every_word_that_names_a_room_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "internals" / "vocabulary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*([\w ]+)\*\* \|", glossary, re.MULTILINE)
    named = {part for name, _ in rooms() for part in name.split("/")} - {"loaderpool", "core"}
    named |= {path.parent.name for path in _PACKAGE.glob("*/**/__init__.py")} - {"core"}
    assert sorted(name for name in named if name not in words and name.removesuffix("s") not in words) == []


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)[`:]", text))
    assert sorted(name for name in named if not (ROOT / name).exists() and not (_PACKAGE / name).exists()) == []


def _sources() -> list[Path]:
    return [*_PACKAGE.rglob("*.py"), *(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))]


def test_every_rule_that_code_cites_is_on_its_page_and_has_a_test() -> None:
    headings = re.findall(r"^## Rule (\d+): ", _RULES.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [str(number) for number in range(1, len(headings) + 1)]
    cited = {number for path in _sources() for number in re.findall(r"\brules? (\d+)\b", path.read_text("utf-8"))}
    assert cited
    assert cited - set(headings) == set()
    tests = (ROOT / "tests" / "faults" / "test_rules.py").read_text(encoding="utf-8")
    assert {int(number) for number in re.findall(r"^def test_rule_(\d+)_", tests, re.MULTILINE)} == {
        int(number) for number in headings
    }


def test_every_rule_says_why_and_who_keeps_it_and_code_cites_no_other_design() -> None:
    for rule in _RULES.read_text(encoding="utf-8").split("\n## Rule ")[1:]:
        assert "- **Why.** " in rule, rule
        assert "- **Kept by** `" in rule, rule
    elsewhere = re.compile(r"\b(of|in)\s+(#\s*)?the\s+(#\s*)?design\b")
    assert [path.name for path in _sources() if elsewhere.search(path.read_text("utf-8"))] == []
