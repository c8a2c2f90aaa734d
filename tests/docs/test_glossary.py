"""The vocabulary has the words of ours, few of them: what names a class or a module is in it, or an everyday word."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterable, Iterator

from loaderpool.core import messages, records
from tests.docs.pages import ROOT
from tests.support.imports import read_package

MODULES = read_package(ROOT / "loaderpool")
_ROW = re.compile(r"^\| \*\*([\w ]+)\*\* \| (.+) \|$", re.MULTILINE)
_MOST_WORDS = 60
# How a word of the glossary may end in a name: Dealer, quotas, probing, plainness.
_ENDINGS = ("", "s", "es", "d", "ed", "ing", "r", "er", "ness")

# Words that mean in a name what they mean to everybody who programs, so that the vocabulary need not say it. A word
# that means something particular here belongs there instead.
PLAIN = {
    "actor", "adapter", "ahead", "allowed", "arguments", "array", "arriving", "auto", "autotune",
    "batch", "block", "buckets", "buffer", "c", "cache", "call", "callback", "capacity", "change", "check",
    "cli", "clock", "cluster", "column", "combine", "command", "config", "connected",
    "content", "conversion", "converter", "core", "count", "counters", "decision", "diagnose", "dict", "dispatch",
    "doctor", "element", "epoch", "error", "explain", "explanation", "failure", "fault", "feature",
    "field", "file", "filling", "finding", "fit", "flow", "fork", "format", "frame", "function", "gate",
    "globals", "handle", "held", "hooks", "identity", "imports", "in", "info", "interleave",
    "interrupts", "item", "iterator", "kind", "lease", "lender", "lengths",
    "limit", "lines", "list", "listener", "load", "log", "machine", "map", "measurement", "memory",
    "mix", "numbering", "observer", "opened", "order", "original", "owner", "pace", "packed",
    "packing", "page", "part", "pass", "permutation", "pickle", "place", "placement", "points", "policy", "profile",
    "program", "progress", "proposal", "queued", "ray", "reading", "received", "recognise", "record", "replay",
    "report", "ring", "sample", "seeds", "sender", "sequence", "setting", "shard", "share",
    "ship", "shipped", "sized", "snapshot", "source", "span", "spawned", "stamp",
    "statistics", "store", "stream", "structure", "sums", "surroundings", "system", "table", "target",
    "tensors", "text", "times", "tools", "top", "trace", "track", "trainer", "transport", "tune",
    "unpickler", "value", "walk", "watch", "window", "work",
}  # fmt: skip
# Other people's names, for what they name.
NAMES = {"hdf5", "keras", "loaderpool", "parquet", "tar", "tensorflow", "tfrecord", "tfrecords"}


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


def classes() -> Iterator[tuple[str, str]]:
    """Each class of each module, but exceptions, whose names are sentences: (module, class)."""
    for module in MODULES:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = map(ast.unparse, node.bases)
                if not any(base.endswith(("Error", "Exception", "Warning")) for base in bases):
                    yield module.name, node.name


def named_in_code() -> set[str]:
    """The words of all modules, classes, functions, arguments, fields and variables."""
    names = {part for module in MODULES for part in module.name.split(".")}
    for module in MODULES:
        for node in ast.walk(module.tree):
            match node:
                case ast.ClassDef() | ast.FunctionDef():
                    names.add(node.name)
                case ast.arg():
                    names.add(node.arg)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
    return {word for name in names for word in words_of(name)}


KNOWN = {word for entry in glossary() for word in entry.split()} | PLAIN | NAMES


def nouns() -> Iterator[tuple[str, str]]:
    """What a class or module is: the last word of its name. Messages and instructions are sentences, and have none."""
    sentences = {kind.__name__ for kind in [*messages.KINDS, *typing.get_args(records.Instruction)]}
    for where, name in [*classes(), *((module.name, module.name.rpartition(".")[2]) for module in MODULES)]:
        if name not in sentences:
            yield f"{where}: {name}", words_of(name)[-1]


def test_there_are_few_words() -> None:
    assert 40 < len(glossary()) <= _MOST_WORDS, "one more is one too many: take another one out"


def test_what_names_a_class_or_a_module_is_in_the_vocabulary_or_an_everyday_word() -> None:
    assert [where for where, noun in nouns() if not is_covered(noun, KNOWN)] == []


def test_every_word_of_the_vocabulary_is_in_the_code() -> None:
    named = named_in_code()

    def is_named(word: str) -> bool:
        return any(is_covered(each, [word]) or is_covered(word, [each]) for each in named)

    assert [word for word in glossary() if not all(map(is_named, word.split()))] == []


def test_no_word_is_called_plain_that_names_nothing_or_that_the_glossary_has() -> None:
    named = {noun for _, noun in nouns()}
    assert sorted(word for word in PLAIN | NAMES if not any(is_covered(noun, [word]) for noun in named)) == []
    assert sorted(word for word in PLAIN if word in KNOWN - PLAIN) == []
