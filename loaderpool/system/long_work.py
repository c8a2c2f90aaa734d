"""How far work is that takes long, told on stderr to who waits for it: a line now and then.

Nothing is said of what is over within two seconds, in workers and readers (the trainer tells of their work), or with
`LOADERPOOL_PROGRESS=0`. There is no thread: who works tells how far it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from loaderpool.errors import readable_bytes, readable_s
from loaderpool.system import clock, process

SWITCH = "LOADERPOOL_PROGRESS"
_FIRST_NS = 2_000_000_000  # sooner, what is over in a moment is told of; later, who waits wonders
# Five seconds at first, then a fifth of what has passed, so that a log of hours has some dozens of lines.
_LINE_NS = 5_000_000_000
_LINE_SHARE = 5
_NEVER_NS = 1 << 62


class LongWork(contextlib.AbstractContextManager["LongWork"]):
    """Tells how far some work is, from when it is made until `end`; never raises, and only in the trainer.

    `reach` may be called for each thousandth of a second of work: it looks at the clock, and mostly returns.

    Args:
        what: is done, as "loaderpool: finding the records of 3 files".
        total: how much it is in all, if that is known.
        unit: "bytes", or what is counted, in the plural.
        measure: tells how much is done, or says it in words, where `tell` is to ask for it.
        first_s: how long nothing is said.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "items",
        measure: Callable[[], int | str] | None = None,
        first_s: float | None = None,
    ) -> None:
        self._what, self._total, self._unit, self._measure = what, total, unit, measure
        self._began_ns = clock.monotonic_ns()
        is_off = os.environ.get(SWITCH) == "0" or not process.is_trainer()
        first_ns = _FIRST_NS if first_s is None else int(first_s * 1e9)
        self._due_ns = _NEVER_NS if is_off else self._began_ns + first_ns

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The work is over, or given up: nothing more is said."""
        self._due_ns, self._measure = _NEVER_NS, None

    @property
    def is_over(self) -> bool:
        """Whether nothing is said of it any more."""
        return self._due_ns == _NEVER_NS

    @property
    def is_due(self) -> bool:
        """Whether `tell` would say something."""
        return clock.monotonic_ns() >= self._due_ns

    def tell(self) -> None:
        """Ask how much is done, and say so if it is time."""
        measure = self._measure
        if measure is not None and self.is_due:
            self._say(measure)

    def reach(self, done: int | str) -> None:
        """So much is done; or in words."""
        if self.is_due:
            self._say(lambda: done)

    def _say(self, measure: Callable[[], int | str]) -> None:
        now_ns = clock.monotonic_ns()
        passed_ns = now_ns - self._began_ns
        self._due_ns = now_ns + max(_LINE_NS, passed_ns // _LINE_SHARE)
        try:
            print(f"{self._what}: {self._words(measure(), passed_ns / 1e9)}", file=sys.stderr, flush=True)
        except Exception:  # no stderr, or a measure that fails: who only tells shall end no training
            self.end()

    def _words(self, done: int | str, passed_s: float) -> str:
        """How far it is, how long that took, and how long the rest will take."""
        if isinstance(done, str):
            return f"{done}{', ' * bool(done)}{readable_s(passed_s)} so far"
        said = readable_bytes if self._unit == "bytes" else "{:,}".format
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        if not self._total:
            return f"{said(done)}{unit}, {readable_s(passed_s)} so far"
        left = f", about {readable_s(passed_s * (self._total - done) / done)} left" if 0 < done < self._total else ""
        share = min(1.0, done / self._total)
        return f"{share:.0%} of {said(self._total)}{unit}, {readable_s(passed_s)} so far{left}"
