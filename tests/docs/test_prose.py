"""Texts for users are plain English: short sentences, and the words of the field."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages, name_of
from tests.docs.prose import findings
from tests.docs.test_reference import public_names

# Pages for builders, who need the words of the code.
_FOR_BUILDERS = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/internals"}


def is_for_users(page: Path) -> bool:
    return not any(name_of(page).startswith(each) for each in _FOR_BUILDERS)


@pytest.mark.parametrize("page", [*filter(is_for_users, all_pages())], ids=name_of)
def test_pages_for_users_are_plain_english(page: Path) -> None:
    assert list(findings(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", public_names())
def test_public_docstrings_are_plain_english(name: str, request: pytest.FixtureRequest) -> None:
    if name.startswith("adapters."):
        request.getfixturevalue("tf")
    thing = pkgutil.resolve_name(f"loaderpool.{name}")
    members = (
        [value for key, value in inspect.getmembers(thing) if key[0] != "_"]
        if isinstance(thing, type)
        else []
    )
    texts = [inspect.getdoc(each) or "" for each in (thing, *members) if _is_ours(each)]
    assert [line for text in texts for line in findings(text)] == []


def test_messages_and_help_texts_are_plain_english() -> None:
    modules = sorted((ROOT / "loaderpool").rglob("*.py"))
    texts = [(module.name, text) for module in modules for text in _messages_of(module)]
    assert len(texts) > 500
    assert [f"{name}: {line}" for name, text in texts for line in findings(text)] == []


def _messages_of(module: Path) -> Iterator[str]:
    """Yield the lines of a module's strings that have four words or more, without docstrings.
    Values are replaced by `x`.
    """
    tree = ast.parse(module.read_text(encoding="utf-8"))
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if id(node) not in skipped and isinstance(node, ast.Constant | ast.JoinedStr):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in parts
            )
            if len(text.split()) >= 4 and not text.startswith(
                ("<", ".lp-", "import ")
            ):  # markup or code
                yield text.replace("\n", "\n\n")


def _is_ours(thing: object) -> bool:
    function = getattr(thing, "fget", getattr(thing, "__func__", thing))
    return str(getattr(function, "__module__", "")).startswith("loaderpool")
