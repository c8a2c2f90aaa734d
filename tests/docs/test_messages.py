"""The table of messages in docs/internals/protocol.md is that of the classes, and each message has what bounds it."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest

from loaderpool.core import messages
from tests.docs.pages import ROOT


@pytest.fixture
def generator() -> ModuleType:
    """The program that writes the table."""
    spec = importlib.util.spec_from_file_location("message_table", ROOT / "docs" / "message_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_classes(generator: Any) -> None:
    text = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
    assert generator.table() in text, "run: python docs/message_table.py"
    assert len(re.findall(r"^\| `\w+` \| .+ \|$", generator.table(), re.MULTILINE)) == len(messages.KINDS) == 20


def test_each_kind_has_one_row_of_bounds_and_no_other_has(generator: Any) -> None:
    assert set(generator.bounds()) == {kind.__name__ for kind in messages.KINDS}
    assert all(way and most for way, most in generator.bounds().values())


def test_who_sends_what_is_the_same_in_each_docstring(generator: Any) -> None:
    for kind in messages.KINDS:
        first, way = (kind.__doc__ or "").partition(":")[0].lower(), generator.bounds()[kind.__name__][0]
        sender, receiver = [word.split()[0] for word in re.split(r" (?:→|->) ", way.partition(";")[0])[:2]]
        assert re.match(rf"{sender}( process)? -> {receiver}", first), f"{kind.__name__}: {way}"


@pytest.mark.parametrize(
    ("row", "kind"), [("| `Load`, `Other` | main -> supervisor | one |", None), ("| `Load` | a -> b | one |", KeyError)]
)
def test_a_kind_without_a_bound_is_refused(
    row: str, kind: type[Exception] | None, generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "__doc__", row)
    if kind is None:
        assert generator.bounds() == {"Load": ("main → supervisor", "one"), "Other": ("main → supervisor", "one")}
    else:
        with pytest.raises(kind, match="Unload"):
            generator.table()


def test_a_kind_with_two_bounds_is_refused(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "__doc__", "| `Load` | main -> supervisor | one |\n" * 2)
    with pytest.raises(ValueError, match="Load stands twice"):
        generator.table()
