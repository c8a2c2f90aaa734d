"""How far work is that takes long, told to who waits for it: a bar on a terminal, else a line now and then.

Nothing is said of what is over within two seconds, in workers and readers (the trainer tells of their work), or with
`LOADERPOOL_PROGRESS=0`. Where rich is installed and stderr is a terminal, or a notebook that can show it, it draws the
bar, which is gone when the work is over or Ctrl-C ends it. There is no thread: who works tells how far it is.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

from loaderpool.system import clock, role
from loaderpool.system.readable import readable_s, readable_size

SWITCH = "LOADERPOOL_PROGRESS"
_FIRST_NS = 2_000_000_000  # sooner, what is over in a moment is told of; later, who waits wonders
_BAR_NS = 200_000_000
# Of lines: five seconds at first, then a fifth of what has passed, so that a log of hours has some dozens of them.
_LINE_NS = 5_000_000_000
_LINE_SHARE = 5


class LongWork:
    """Tells how far some work is, from when it is made until `end`; never raises, and only in the trainer.

    `reach` may be called for each thousandth of a second of work: it looks at the clock, and mostly returns.

    Args:
        what: is done, as "loaderpool: finding the records of 3 files".
        total: how much it is in all; None: that is not known.
        unit: "bytes", or what is counted, in the plural.
        measure: tells how much is done, or says it in words, where `tell` is to ask for it.
        in_lines: no bar is drawn, for other output goes on meanwhile.
    """

    _shown: ClassVar[LongWork | None] = None  # has the terminal; of two at a time the first one is told of

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "items",
        measure: Callable[[], int | str] | None = None,
        in_lines: bool = False,
    ) -> None:
        self._what, self._total, self._unit, self._measure, self._in_lines = what, total, unit, measure, in_lines
        self._began_ns = clock.monotonic_ns()
        self._pid, self._turn = os.getpid(), threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        is_off = os.environ.get(SWITCH) == "0" or not role.is_trainer()
        self._due_ns = 1 << 62 if is_off else self._began_ns + _FIRST_NS

    def __enter__(self) -> LongWork:  # noqa: PYI034
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def is_due(self) -> bool:
        """Whether `tell` would say something."""
        return clock.monotonic_ns() >= self._due_ns

    def reach(self, done: int | str) -> None:
        """So much is done; or in words."""
        if clock.monotonic_ns() >= self._due_ns:
            self._tell(done)

    def tell(self) -> None:
        """Ask how much is done, and say so if it is time."""
        if self._measure is None or not self.is_due:
            return
        try:
            done = self._measure()
        except Exception:  # who only tells shall end no training
            self._due_ns = 1 << 62
        else:
            self._tell(done)

    def end(self) -> None:
        """The work is over, or given up: nothing more is said, and a terminal is as it was."""
        self._due_ns = 1 << 62
        bar, self._bar = self._bar, None
        if LongWork._shown is self:
            LongWork._shown = None
        if bar is not None and self._pid == os.getpid():
            try:
                bar.stop()
            except Exception:
                pass

    # ---- told ----

    def _tell(self, done: int | str) -> None:
        # Another thread may be at it; and in a fork the parent goes on telling.
        if self._pid != os.getpid() or not self._turn.acquire(blocking=False):
            return
        try:
            self._say(done)
        except Exception:  # no stderr, a terminal that is gone, another rich
            self._due_ns = 1 << 62
        finally:
            self._turn.release()

    def _say(self, done: int | str) -> None:
        now_ns = clock.monotonic_ns()
        if LongWork._shown not in (self, None):
            self._due_ns = now_ns + _FIRST_NS
            return
        if LongWork._shown is None and not self._in_lines:
            LongWork._shown = self
            self._begin_bar()
        passed_ns = now_ns - self._began_ns
        if self._bar is None:
            self._due_ns = now_ns + max(_LINE_NS, passed_ns // _LINE_SHARE)
            print(f"{self._what}: {self._words(done, passed_ns / 1e9)}", file=sys.stderr, flush=True)
            return
        self._due_ns = now_ns + _BAR_NS
        if isinstance(done, str):
            self._bar.update(self._task, detail=done)
        else:
            self._bar.update(self._task, completed=done, detail=self._amount(done))
        self._bar.refresh()

    def _begin_bar(self) -> None:
        """Draw a bar where there is a terminal for it, and rich."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            console = Console(stderr=True, highlight=False, markup=False)
            if console.is_jupyter:
                import ipywidgets  # noqa: F401
        except ImportError:
            return
        if not console.is_jupyter and (not console.is_interactive or console.is_dumb_terminal):
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[detail]}"))
        bar = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = bar.add_task(self._what, total=self._total, detail="")
        bar.tasks[0].start_time = bar.get_time() - (clock.monotonic_ns() - self._began_ns) / 1e9
        self._bar = bar
        bar.start()

    def _words(self, done: int | str, passed_s: float) -> str:
        """How far it is, how long that took, and how long the rest will take."""
        amount = done if isinstance(done, str) else self._amount(done)
        words = f"{amount}{', ' * bool(amount)}{readable_s(passed_s)} so far"
        if isinstance(done, int) and self._total and 0 < done < self._total:
            words += f", about {readable_s(passed_s * (self._total - done) / done)} left"
        return words

    def _amount(self, done: int) -> str:
        def said(number: int) -> str:
            return readable_size(number) if self._unit == "bytes" else f"{number:,}"

        unit = "" if self._unit == "bytes" else f" {self._unit}"
        if not self._total:
            return f"{said(done)}{unit}"
        return f"{min(1.0, done / self._total):.0%} of {said(self._total)}{unit}"
