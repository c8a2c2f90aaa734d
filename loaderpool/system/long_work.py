"""How far work is that takes long, told on stderr to who waits for it: a line now and then.

Nothing is said of what is over within two seconds, in workers, or with `LOADERPOOL_PROGRESS=0`. There is no thread: who
works tells how far it is.
"""

from __future__ import annotations

import contextlib
import os
import sys

from loaderpool.errors import readable_bytes, readable_s
from loaderpool.system import clock, process

SWITCH = "LOADERPOOL_PROGRESS"
_FIRST_NS = 2_000_000_000  # sooner, what is over in a moment is told of; later, who waits wonders
# Five seconds at first, then a fifth of what has passed, so that a log of hours has some dozens of lines.
_LINE_NS = 5_000_000_000
_LINE_SHARE = 5


class LongWork:
    """Tells how far some work is, from when it is made; never raises, and only in the trainer.

    Args:
        what: is done, as "loaderpool: finding the records of 3 files".
        total: how many bytes it is in all.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began_ns = clock.monotonic_ns()
        self._due_ns = self._began_ns + _FIRST_NS
        self._is_told = os.environ.get(SWITCH) != "0" and process.is_trainer()

    def reach(self, done: int) -> None:
        """So many bytes are done; says so if it is time. May be called for each thousandth of a second of work."""
        now_ns = clock.monotonic_ns()
        if self._is_told and now_ns >= self._due_ns:
            passed_ns = now_ns - self._began_ns
            self._due_ns = now_ns + max(_LINE_NS, passed_ns // _LINE_SHARE)
            with contextlib.suppress(Exception):  # no stderr: who only tells shall end no training
                print(f"{self._what}: {self._words(done, passed_ns / 1e9)}", file=sys.stderr, flush=True)

    def _words(self, done: int, passed_s: float) -> str:
        """How far it is, how long that took, and how long the rest will take."""
        left = f", about {readable_s(passed_s * (self._total - done) / done)} left" if 0 < done < self._total else ""
        share, total = min(1.0, done / max(1, self._total)), readable_bytes(self._total)
        return f"{share:.0%} of {total}, {readable_s(passed_s)} so far{left}"
