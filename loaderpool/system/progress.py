"""Progress of long work, on stderr: nothing for two seconds, then a line now and then."""

from __future__ import annotations

import contextlib
import sys

from loaderpool.errors import readable_s
from loaderpool.system import clock

_QUIET_NS = 2_000_000_000  # shorter work is not reported
_LINE_NS = 5_000_000_000
# The next line comes after this fraction (1/5) of the time so far, so a log of hours has some
# dozens of lines.
_LINE_SHARE = 5


class Progress:
    """Reports how much of some work is done.

    Args:
        text: a line with the placeholders {done} and {time}.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._began_ns = clock.monotonic_ns()
        self._due_ns = self._began_ns + _QUIET_NS

    def reach(self, done: str) -> None:
        """Print a line if it is time."""
        now_ns = clock.monotonic_ns()
        if now_ns < self._due_ns:
            return
        passed_ns = now_ns - self._began_ns
        self._due_ns = now_ns + max(_LINE_NS, passed_ns // _LINE_SHARE)
        text = self._text.format(done=done, time=readable_s(passed_ns / 1e9))
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stderr
            print(f"loaderpool: {text}", file=sys.stderr, flush=True)
