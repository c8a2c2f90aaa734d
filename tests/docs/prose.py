"""Finds long sentences, words of builders, and English that reads like a translation, in texts for
users.

    python -m tests.docs.prose docs/guide/train/frameworks.md ...

prints a line for each finding. Blocks of code, code spans and comments of a page are ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25  # words of a sentence

_IS = r"(is|are|has|have|may|can|does|do|would|was|were)"
# Advice, and the patterns that it concerns. They are searched in sentences whose code spans were
# replaced by `CODE`.
_RULES: dict[str, tuple[str, ...]] = {
    "after (time)": (r"\bbehind\b",),
    "a word of today": (
        r"\b(anew|whence|whoever|somebody|nobody|likewise|hence|thereby|therein|shall|in vain)\b",
    ),
    "because": (
        rf", for (?=(it|its|they|their|there|this|that|these|those|he|we|you|what|no)\b|(the )?\w+ {_IS}\b)",
    ),
    "the subject first": (r"^(?-i:What|Of|Where|Whether)\b(?!.*\?$)",),
    "its own, each worker's own": (
        r"\bof (its|their|your|our|his|my) own\b|\bof (yours|ours|theirs)\b",
    ),
    "main process, task, batch buffer, shared memory, zero-copy view, node": (
        r"\b(trainers?|tickets?|slots?|arenas?|extents?|leases?|leased|lent|lend|lends|cutters?|inquests?|hosts?(?!:port))\b",
    ),
    "assign, be pickled, move to shared memory, partition, cleanup, bottleneck": (
        r"\b(deals?|dealt|dealing|ship|ships|shipped|shipment|adopts?|adopted|adoption|lanes?|undoing|verdicts?)\b",
    ),
    "keep references, headroom": (r"\b(hoards?|hoarded|headspace)\b",),
    "recovered, bit-identical, integer, boolean, in short": (
        r"\b(made good|makes? good|to the bit|whole numbers?|truth values?|in a word|as it is said)\b",
    ),
    "be, be pickled": (r"\b(stands|stood|lies|lay|travels?|travelled)\b",),
    "share memory with, be a view of": (r"\blooks? at (the )?(memory|slot|buffer)",),
    "delivered, passed, returned": (r"\b(handed|hands|hand) (over|on)\b",),
    "iteration, epoch": (
        r"\b(a|one|each|every|the|this|that|next|whole) pass(es)?\b(?! over)|\bpasses (is|are|of)\b",
    ),
    "report, show, record": (r"\b(say|says|said|tell|tells|told) (so|of itself)\b",),
    "not a, without fork()": (r"\b(is|are) no (?-i:[A-Z])|\bthere is no fork\b",),
    "continue, resume": (r"\b(goes|go|went) on\b",),
}
_COMPILED = {
    re.compile(each, re.IGNORECASE): better
    for better, patterns in _RULES.items()
    for each in patterns
}
_END = re.compile(r"(?<=[.!?:;])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|etc|cf)\.$")


def sentences(markdown: str) -> Iterator[str]:
    """Return the sentences of a page or docstring, without markup. Each code span is replaced by
    `CODE`.
    """
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    text = re.sub(r"^---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(
        r"^[\d-]+, \d+ x .* Command: .*$", "", text, flags=re.MULTILINE
    )  # a benchmark's description of its machine
    text = re.sub(r"^( *)(```+|~~~+|:::+).*?^\1\2 *$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *>>> .*(\n.*\S.*)*|::\n\n( {4,}.*\n|\n)+", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^:{3,}.*$|^\{.*\}$|^\|[-:| ]+\|$|^#+ ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``.+?``|`[^`\n]*(\n[^`\n]*)?`", "CODE", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^\|(.*)\|$",
        lambda row: "\n\n" + row[1].replace(" | ", "\n\n") + "\n\n",
        text,
        flags=re.MULTILINE,
    )
    text = text.replace("**", "").replace("*", "")
    for paragraph in re.split(r"\n\s*\n", text):
        parts = _END.split(" ".join(paragraph.split()))
        held = ""
        for part in parts:
            held = f"{held} {part}".strip()
            if not _ABBREVIATION.search(held):
                if re.search(r"\w", held):
                    yield held
                held = ""
        if held:
            yield held


def findings(markdown: str) -> Iterator[str]:
    """Return a line for each finding."""
    for sentence in sentences(markdown):
        count = len(re.findall(r"[\w`$€%][\w'’./:%-]*", sentence))
        if count > MOST_WORDS:
            yield f"{count} words, at most {MOST_WORDS}: {sentence}"
        for rule, better in _COMPILED.items():
            if found := rule.search(sentence):
                yield f"{found[0].strip()!r} -> {better}: {sentence}"


def main() -> None:
    total = 0
    for name in sys.argv[1:]:
        for line in findings(Path(name).read_text(encoding="utf-8")):
            total += 1
            print(f"{name}: {line}")
    print(f"{total} findings", file=sys.stderr)


if __name__ == "__main__":
    main()
