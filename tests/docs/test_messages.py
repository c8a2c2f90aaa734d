"""The table of messages in docs/internals/protocol.md equals that of the classes, and each message
has a bound.
"""

from __future__ import annotations

import re

from loaderpool.transport import messages
from tests.docs.pages import ROOT, program

TABLE = program("message_table")


def test_the_page_has_the_table_of_the_classes() -> None:
    text = (ROOT / "docs" / "internals" / "protocol.md").read_text(encoding="utf-8")
    assert TABLE.table() in text, "run: python docs/message_table.py"
    assert (
        len(re.findall(r"^\| `\w+` \| .+ \|$", TABLE.table(), re.MULTILINE))
        == len(messages.KINDS)
        == 14
    ), "first name the kind that exists, and why it does not serve; then change the number here"


def test_each_kind_has_one_row_of_bounds_and_no_other_has() -> None:
    assert set(TABLE.bounds()) == {kind.__name__ for kind in messages.KINDS}
    assert all(way and most for way, most in TABLE.bounds().values())


def test_who_sends_what_is_the_same_in_each_docstring() -> None:
    for kind in messages.KINDS:
        first, way = (
            (kind.__doc__ or "").partition(":")[0].lower(),
            TABLE.bounds()[kind.__name__][0],
        )
        sender, receiver = [
            word.split()[0] for word in re.split(r" (?:→|->) ", way.partition(";")[0])[:2]
        ]
        assert re.match(rf"{sender}( process)? -> {receiver}", first), f"{kind.__name__}: {way}"
