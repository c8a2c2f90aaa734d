"""Files of which what is behind some byte cannot be read: refused when they are indexed, or read as far as they go."""

from __future__ import annotations

from typing import Any, Literal

from loaderpool.errors import ArgumentError, SourceError

TailRule = Literal["raise", "skip"]


def check_rule(rule: Any) -> TailRule:
    """Return the argument `damaged_tail`, checked.

    Raises:
        ArgumentError: it is none of its values.
    """
    if rule not in ("raise", "skip"):
        raise ArgumentError(f'damaged_tail must be "raise" or "skip", got {rule!r}')
    return "skip" if rule == "skip" else "raise"


class DamagedTail:
    """What is done about such files.

    Args:
        rule: "raise", or "skip" to have only what is before.

    Attributes:
        skipped: what was left out, a text for each file.
    """

    def __init__(self, rule: TailRule) -> None:
        self._rule = rule
        self.skipped: list[str] = []

    def met(self, path: str, offset: int, size: int, what: str) -> None:
        """Note that from this byte on nothing can be read.

        Args:
            path: of the file.
            offset: the first byte of what is lost.
            size: of the file.
            what: is wrong, and where.

        Raises:
            SourceError: by the rule.
        """
        if self._rule == "raise":
            raise SourceError(
                f'{path}: {what}, so what is behind byte {offset} of {size} cannot be read. damaged_tail="skip" reads '
                "what is before it"
            )
        self.skipped.append(f"{path}: bytes {offset} to {size}: {what}")
