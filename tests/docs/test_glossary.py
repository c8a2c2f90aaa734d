"""The vocabulary has few words, and each one names something in the code."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

_ROW = re.compile(r"^\| \*\*([\w ]+)\*\* \| .+ \|$", re.MULTILINE)
_MOST_WORDS = 60
WORDS = _ROW.findall((ROOT / "docs" / "internals" / "vocabulary.md").read_text(encoding="utf-8"))


def test_there_are_few_words() -> None:
    assert 40 < len(WORDS) <= _MOST_WORDS, "one more is one too many: take another one out"


def test_every_word_is_in_a_name_of_the_code() -> None:
    """`SlotQuotas` and `slot_quotas` contain the words slot and quotas. The ending of a word may
    differ.
    """
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "loaderpool").rglob("*.py")
    )
    named = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", code)}

    def is_named(word: str) -> bool:
        return any(each.startswith(word.removesuffix("e").removesuffix("y")) for each in named)

    assert [word for word in WORDS if not all(map(is_named, word.lower().split()))] == []
