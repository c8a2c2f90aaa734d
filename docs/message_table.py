"""Write the table of messages in docs/internals/protocol.md from the classes of `loaderpool/transport/messages.py`.

    python docs/message_table.py

Kinds and fields are the classes' own. The table in that module's docstring has who sends what to whom, and what bounds
its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from loaderpool.transport import messages

PAGE = Path(__file__).resolve().parent / "internals" / "protocol.md"
BEGIN, END = "<!-- messages: begin -->", "<!-- messages: end -->"
_BOUND = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_HEAD = "| kind | fields | from → to | most on their way |\n|---|---|---|---|"


def bounds() -> dict[str, tuple[str, str]]:
    """By kind: who sends it to whom, and how many may be on their way.

    Raises:
        ValueError: a kind stands twice in the table of the module's docstring.
    """
    found: dict[str, tuple[str, str]] = {}
    for names, way, most in _BOUND.findall(messages.__doc__ or ""):
        for name in re.findall(r"\w+", names):
            if name in found:
                raise ValueError(
                    f"{name} stands twice in the table of loaderpool/transport/messages.py"
                )
            found[name] = way.replace("->", "→"), most
    return found


def rows() -> Iterator[str]:
    """The rows of the table, in the order of the kinds.

    Raises:
        KeyError: a kind is missing in the table of the module's docstring.
    """
    bound = bounds()
    for kind in messages.KINDS:
        way, most = bound[kind.__name__]
        fields = ", ".join(f"`{name}`" for name in kind._fields)  # type: ignore[attr-defined]
        yield f"| `{kind.__name__}` | {fields} | {way} | {most} |"


def table() -> str:
    """The table, between its markers."""
    return "\n".join([BEGIN, _HEAD, *rows(), END])


def main() -> None:
    """Write the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{table()}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
