"""The architecture page is true: rooms in their order, modules by their paths, rules by their
numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import loaderpool
from tests.docs.pages import ROOT
from tests.support.imports import read_package
from tests.test_architecture import ROOMS

_PACKAGE = Path(loaderpool.__file__).parent
_RULES = ROOT / "docs" / "internals" / "rules.md"
_ROOM = re.compile(r"^\| `([\w/]+)` \| [^|]+ \| [^|]+ \| `([\w/.]+)` \|$", re.MULTILINE)


def rooms() -> list[tuple[str, str]]:
    """Return the rooms of the table in architecture.md, each with the file to open first."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    return _ROOM.findall(text.partition("\n## Rooms\n")[2].partition("\n## ")[0])


def room_of(module: str) -> str | None:
    """Return the innermost room of the table that contains a module."""
    path = module.replace(".", "/").removeprefix("loaderpool/")
    return max(
        (name for name, _ in rooms() if path == name or path.startswith(f"{name}/")),
        key=len,
        default=None,
    )


def test_every_module_is_in_a_room_of_the_table() -> None:
    assert len(rooms()) > 15
    assert [module.name for module in read_package(_PACKAGE) if room_of(module.name) is None] == []
    assert [first for _, first in rooms() if not (_PACKAGE / first).is_file()] == []


def test_rooms_stand_in_the_order_of_the_architecture_test() -> None:
    assert [name.replace("/", ".") for name, _ in rooms()] == [
        name or "loaderpool" for name in ROOMS
    ]


def _sources() -> list[Path]:
    return [
        *_PACKAGE.rglob("*.py"),
        *(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)),
    ]


def _table(heading: str) -> list[list[str]]:
    """Return the rows of a section of the rules page, as cells."""
    section = (
        _RULES.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_every_rule_that_code_cites_is_on_its_page_and_has_a_test() -> None:
    numbers = [number for number, *_ in _table("Rules")]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    cited = {
        number
        for path in _sources()
        for number in re.findall(r"\brules? (\d+)\b", path.read_text("utf-8"))
    }
    assert cited
    assert cited - set(numbers) == set()
    tests = (ROOT / "tests" / "faults" / "test_rules.py").read_text(encoding="utf-8")
    assert {
        int(number) for number in re.findall(r"^def test_rule_(\d+)_", tests, re.MULTILINE)
    } == {int(number) for number in numbers}


def test_every_rule_says_why_and_who_keeps_it() -> None:
    for _, holds, why, kept_by in _table("Rules"):
        assert holds and why and re.fullmatch(r"`[\w/]+\.py`(, `[\w/]+\.py`)*", kept_by), holds


def test_every_invariant_has_an_id_of_its_own_and_a_test() -> None:
    rows = _table("Invariants")
    assert len(rows) > 15
    for ids, _, tests in rows:
        assert re.fullmatch(r"\*\*[A-Z]+-\d+\*\*", ids)
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", tests) or pytest.fail(
            f"{ids} has no test"
        ):
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^(def {name}\(|{name} = )", text, re.MULTILINE), (
                f"{ids}: {file} has no {name}"
            )


def test_what_is_gone_is_not_given_to_something_else() -> None:
    gone = [each for ids, *_ in _table("Gone") for each in ids.split(", ")]
    ids = [row[0].strip("*") for row in _table("Invariants")] + gone
    assert len(ids) == len(set(ids))
    assert all(was and why for _, was, why in _table("Gone"))
