"""The vocabulary has the words of the code: what names a class, a module or a message is in it, and used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.docs.pages import ROOT
from tests.support.imports import read_package

MODULES = read_package(ROOT / "loaderpool")
_ROW = re.compile(r"^\| \*\*([\w ]+)\*\* \| (.+) \|$", re.MULTILINE)
# Says of a word that only documentation, logs and errors have it.
_SPOKEN = "*(in texts)*"
# How a word of the glossary may end in a name: Dealer, quotas, probing, plainness.
_ENDINGS = ("", "s", "es", "d", "ed", "ing", "r", "er", "ness")

# Words that mean in a name what they mean to everybody, so that the glossary need not say it. A word that means
# something particular here belongs there instead.
PLAIN = {
    "seconds", "auto", "bound", "call", "content", "kind", "moment", "proposal", "report",
    "shares", "time", "times", "try", "tuned", "surroundings", "advice",
    "ahead", "allowed", "arguments", "array", "arrived", "base", "block",
    "budget", "c", "callback", "capacity", "change", "changes", "channels", "check", "checks", "choice",
    "clock", "close", "collate", "column", "columns", "connection", "context", "converter", "core", "count",
    "counters", "death", "combine", "descriptor", "dict", "error", "failure", "feature",
    "file", "files", "filled", "fit", "flow", "fork", "format", "found", "function", "globals", "group", "guard",
    "handle", "held", "imports", "info", "instructions", "iterator", "launch",
    "length", "lengths", "limit", "limits", "line", "lines", "list", "load", "look", "loop", "machine",
    "main", "maker", "malloc", "map", "measurement", "open", "opened", "original",
    "owner", "pace", "permutation", "pickle", "pipe",
    "policy", "process", "processes", "progress", "reading", "ready", "recognise", "reuse", "rng",
    "sender", "sequence", "setting",
    "settings", "sized", "stacks", "state", "statistics", "status", "step", "table", "target", "thread",
    "threads", "tracker", "tune", "unload", "unpickler", "value",
    "warnings", "diagnose", "walk", "watch", "watcher", "writer", "profile", "text",
}  # fmt: skip
# Other people's names, for what they name.
NAMES = {
    "chrome",
    "hdf5",
    "keras",
    "loaderpool",
    "tensorflow",
    "parquet",
    "tar",
    "tfrecord",
    "tfrecords",
}
# Whether, how or when: what a message's name says of the thing that it is about.
VERBS = {
    "add", "after", "at", "begin", "by", "cancel", "close", "deal", "done", "end", "ended", "exclude", "exec", "exit",
    "extend", "finished", "hand", "large", "load", "not", "over", "read", "redo", "resize", "started", "try", "unload",
    "wanted", "written",
}  # fmt: skip


def glossary() -> dict[str, str]:
    """Each word with what is said of it."""
    return dict(_ROW.findall((ROOT / "docs" / "internals" / "vocabulary.md").read_text(encoding="utf-8")))


def words_of(name: str) -> list[str]:
    """`SlotQuotas` and `slot_quotas` -> slot, quotas."""
    return [word.lower() for word in re.findall(r"(?i:hdf5|tfrecords)|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_covered(word: str, known: Iterable[str]) -> bool:
    """Whether it is one of the words known, or a form of one."""
    forms = {word, re.sub(r"ies$", "y", word)}
    return any(f"{stem}{ending}" in forms for each in known for stem in {each, each.removesuffix("e")}
               for ending in _ENDINGS)  # fmt: skip


def is_exception(node: ast.ClassDef) -> bool:
    return any(re.search(r"(Error|Exception|Warning)$", ast.unparse(base)) for base in node.bases)


def classes() -> Iterator[tuple[str, str]]:
    """Each class of each module, but exceptions, whose names are sentences: (module, class)."""
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not is_exception(node):
                yield module.name, node.name


def messages() -> Iterator[str]:
    """Each kind of message between processes: `RUN_BEGIN`."""
    for module in MODULES:
        for node in module.tree.body if module.name.endswith(".messages") else ():
            if isinstance(node, ast.ClassDef) and "IntEnum" in ast.unparse(node.bases[0]):
                yield from (ast.unparse(each.targets[0]) for each in node.body if isinstance(each, ast.Assign))


def named_in_code() -> set[str]:
    """The words of all modules, classes, functions, arguments, fields and messages."""
    names = {part for module in MODULES for part in module.name.split(".")} | set(messages())
    for module in MODULES:
        for node in ast.walk(module.tree):
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    names.add(node.name)
                case ast.arg():
                    names.add(node.arg)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return {word for name in names for word in words_of(name)}


KNOWN = {word for entry in glossary() for word in entry.split()} | PLAIN | NAMES


_TO_COME = (
    "loaderpool.core",
    *(f"loaderpool.ray.{name}" for name in ("cluster", "dispatch", "node", "node_supervisor")),
)


def test_what_names_a_class_or_a_module_is_in_the_glossary() -> None:
    """The noun of the name: its last word. The core to come has words of its own, which its page will explain."""
    named = [*classes(), *((module.name, module.name.rpartition(".")[2]) for module in MODULES)]
    now = [(where, name) for where, name in named if not where.startswith(_TO_COME)]
    assert [f"{where}: {name}" for where, name in now if not is_covered(words_of(name)[-1], KNOWN)] == []


def test_what_messages_are_about_is_in_the_glossary() -> None:
    said = sorted(messages())
    assert "RUN_BEGIN" in said
    assert "CANCEL" in said
    assert [name for name in said if not all(is_covered(word, KNOWN | VERBS) for word in words_of(name))] == []


def test_every_word_of_the_glossary_is_in_the_code_or_marked() -> None:
    named = named_in_code()

    def is_named(word: str) -> bool:
        return any(is_covered(each, [word]) or is_covered(word, [each]) for each in named)

    said = {word: meaning.endswith(_SPOKEN) for word, meaning in glossary().items()}
    assert [word for word, is_said in said.items() if not is_said and not all(map(is_named, word.split()))] == []


def test_no_word_is_called_plain_that_names_nothing_or_that_the_glossary_has() -> None:
    nouns = {words_of(name)[-1] for name in [*(name for _, name in classes()), *(each.name for each in MODULES)]}
    assert sorted(word for word in PLAIN | NAMES if not any(is_covered(noun, [word]) for noun in nouns)) == []
    assert sorted(word for word in PLAIN if word in KNOWN - PLAIN) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SlotQuotas", ["slot", "quotas"]),
        ("slot_quotas", ["slot", "quotas"]),
        ("RUN_BEGIN", ["run", "begin"]),
        ("_HDF5", ["hdf5"]),
        ("TFRecords", ["tfrecords"]),
    ],
)
def test_names_fall_into_words(name: str, words: list[str]) -> None:
    assert words_of(name) == words


def test_forms_of_a_word_are_covered_and_others_are_not() -> None:
    known = {"deal", "quota", "identity", "probe", "adopted"}
    assert all(is_covered(word, known) for word in ("deal", "dealer", "quotas", "probing", "prober", "identities"))
    assert not any(is_covered(word, known) for word in ("ledger", "quotations", "pro", "dealership"))
