"""Names in backquotes exist, in docstrings and comments of the package and on builders' pages."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import loaderpool
from tests.docs.pages import ROOT

_PACKAGE = Path(loaderpool.__file__).parent
_PAGES = ("architecture", "fault-tolerance", "memory", "protocol", "vocabulary")

# `name`, `Owner.name`, `module.py`, `call(...)` and `setting=...`.
_SPAN = re.compile(r"(?<!`)`([a-zA-Z_]\w*(?:\.\w+)*)(?:\([^`]*\)|=[^`]*)?`(?!`)")
_STARTS = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}
# Owners that may have any member: libraries, and objects of examples, of users' code and of the
# kernel.
_FOREIGN = """
    click cls compression isal jax keras lp ml_dtypes model multiprocess net np numpy project ray
    sequence some_list table tf torch verdict zstandard
"""
# Names of libraries, of the kernel and of environments.
_OF_OTHERS = """
    CSVLogger Dataset FixedLenFeature GeneratorDataset IterableDataset LOADERPOOL_INTERRUPTS
    MADV_POPULATE_READ MirroredStrategy
    PR_SET_PDEATHSIG PyDLL PyDataset RAY_ADDRESS RandomState Real Sequence SharedMemory TensorBoard
    TensorStore VarLenFeature as_py background_thread_postfork_child baseTimeNanoseconds c
    default_collate dmesg evaluate eventpoll finalize fit i islice manual_seed mlockall n out
    padded_batch padding_values predict rng same_kind sbatch steps_per_epoch steps_per_execution
    stop_training to to_numpy unbatch
"""
_OWNERS = {*sys.stdlib_module_names, *_FOREIGN.split()}
_KNOWN = _OWNERS.union(dir(builtins), keyword.kwlist, _OF_OTHERS.split())


def _definitions(owner: str, body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the members of a module or class, and those of the classes in it, with their owners."""
    for node in body:
        stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", 0), ast.Store)]
        if isinstance(node, ast.ClassDef):
            yield owner, node.name
            yield from _definitions(node.name, node.body)
        elif isinstance(node, ast.FunctionDef):
            yield owner, node.name
            yield from ((owner, each.attr) for each in stored if isinstance(each, ast.Attribute))
        else:
            yield from ((owner, each.id) for each in stored if isinstance(each, ast.Name))


_MEMBERS = defaultdict[str, set[str]](set)
for _path in _PACKAGE.rglob("*.py"):
    _MEMBERS[_path.parent.name].add(_path.stem)
    _MEMBERS[_path.parent.parent.name].add(_path.parent.name)
    for _owner, _name in _definitions(_path.stem, ast.parse(_path.read_text("utf-8")).body):
        _MEMBERS[_owner].add(_name)
_ALL = _KNOWN.union(*_MEMBERS.values())


def _has(owner: str, name: str) -> bool:
    """Return True if a name is a member. `loader` may be a `Loader`, and other variables may have
    any member.
    """
    owners = [each for each in _MEMBERS if each == owner or each.lower().endswith(owner)]
    return name in (set[str]().union(*(_MEMBERS[each] for each in owners)) or _ALL)


def _unknown(text: str, words: Collection[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield the line and text of names that are not in `words` and not defined anywhere."""
    for found in _SPAN.finditer(text):
        names = found[1].removeprefix("loaderpool.").removesuffix(".py").split(".")
        first = names[0]
        is_there = first in _ALL or first in words or first[:2] == "__"
        if first not in _OWNERS:
            is_there &= all(map(_has, names, names[1:]))
        if not is_there:
            yield text.count("\n", 0, found.start()), found[1]


def _read(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """Return the docstrings and comments of a module by their lines, and the words of its code."""
    prose, words, is_start = list[tuple[int, str]](), set[str](), True
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and is_start):
                prose.append((token.start[0], token.string))
            else:
                words.update(re.findall(r"\w+", token.string))
            is_start = token.type in _STARTS
    return prose, words


_MODULES = {str(path.relative_to(_PACKAGE)): _read(path) for path in _PACKAGE.rglob("*.py")}


def test_names_in_docstrings_and_comments_exist() -> None:
    assert [
        f"{module}:{line + more}: {name}"
        for module, (prose, words) in sorted(_MODULES.items())
        for line, text in prose
        for more, name in _unknown(text, words)
    ] == []


@pytest.mark.parametrize("page", _PAGES)
def test_names_on_a_page_for_builders_exist(page: str) -> None:
    text = (ROOT / "docs" / "internals" / f"{page}.md").read_text("utf-8")
    words = set[str]().union(*(words for _, words in _MODULES.values()))
    assert list(_unknown(re.sub(r"(?ms)^```.*?^```", "", text), words)) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`Loader`, `Loader.resize(n)`, `supervisor.state.State`, `sorry`, `Loader.sorry`, `run.sorry`"
    assert [name for _, name in _unknown(text)] == ["sorry", "Loader.sorry", "run.sorry"]
