"""Docstrings, comments and pages are plain English: sentences have a subject, and no line only points elsewhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages, name_of

# Subjects that cannot be searched for, and words of another century. The texts of errors are not looked at.
_REFUSED = re.compile(r"\b(nobody|somebody|whoever|whence|anew|likewise)\b", re.IGNORECASE)
# Of a page only what is wrong there: "nobody" and "anew" are English.
_REFUSED_IN_PAGES = re.compile(r"\b(somebody|whoever|whence|likewise)\b", re.IGNORECASE)
_ONLY_POINTS = re.compile(r"See [`A-Z]\S*\.?$")


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Each line of a docstring and each comment, with its number."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((line, lines[line - 1]) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """The first line of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def refused(
    lines: Callable[[str], Iterator[tuple[int, str]]], is_refused: Callable[[str], re.Match[str] | None]
) -> list[str]:
    """The lines of loaderpool's modules that are refused, each with its place."""
    return [
        f"{name_of(path)}:{line}: {text.strip()}"
        for path in sorted((ROOT / "loaderpool").rglob("*.py"))
        for line, text in lines(path.read_text(encoding="utf-8"))
        if is_refused(text)
    ]


def test_docstrings_and_comments_have_none_of_the_words_refused() -> None:
    assert refused(prose, _REFUSED.search) == []


def test_no_docstring_only_points_elsewhere() -> None:
    assert refused(first_lines, _ONLY_POINTS.match) == []


@pytest.mark.parametrize("page", [page for page in all_pages() if page.name != "conventions.md"], ids=name_of)
def test_pages_have_none_of_the_words_refused(page: Path) -> None:
    """Except in what a program prints."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if _REFUSED_IN_PAGES.search(line)] == []


def test_texts_of_errors_are_no_prose_and_comments_are() -> None:
    source = '"""Whoever asks."""\nx = 1  # nobody\nraise ValueError("somebody")\n'
    assert [line for line, text in prose(source) if _REFUSED.search(text)] == [1, 2]
    assert [bool(_ONLY_POINTS.match(text)) for text in ("See `BasePlan`.", "See `BasePlan`", "See that it ends.")] == [
        True, True, False,
    ]  # fmt: skip
