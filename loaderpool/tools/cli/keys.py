"""Keys that are pressed on the terminal, without an Enter behind them."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

try:
    import termios
    import tty
except ImportError:  # Windows, which has none of what could be watched either
    pass


class Keys:
    """Reads keys one by one.

    Args:
        descriptor: of a terminal that `read_keys` has prepared; None: there is none, and no key is ever pressed.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str:
        """Return the key that is pressed within this time, "" if there is none. Blocks: so long at most."""
        watched = [] if self._descriptor is None else [self._descriptor]
        readable, _, _ = select.select(watched, [], [], max(0.0, seconds))
        if not readable or self._descriptor is None:
            return ""
        found = os.read(self._descriptor, 1).decode("latin-1")
        if not found:  # the terminal was closed: it would be readable for ever
            self._descriptor = None
        return found


@contextlib.contextmanager
def read_keys() -> Iterator[Keys]:
    """Have the terminal give each key at once, and echo none, until the end of the block; Ctrl-C stays what it is."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield Keys(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
