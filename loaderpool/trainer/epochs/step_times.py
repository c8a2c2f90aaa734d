"""How long the consumer's steps take and what it waits for, summed up from one hand-over to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaderpool.memory.recorder import DeliveryRecorder, Origin
    from loaderpool.trainer.explain.looks import StepCounts
    from loaderpool.trainer.explain.page import LooksPage

# A wait below this part of its step is that of a batch that was there: looking for it takes a moment, too.
_READY_SHARE = 64
# How often what others count, too, is noted beside.
_MARK_NS = 2_000_000_000
# Batches that are made here are recorded so far apart at least. Less: tiny ones get slower. More: steps are not told
# apart that can be seen.
_RECORDED_APART_NS = 1_000_000


class StepTimes:
    """Notes hand-overs.

    Time between passes, in which a consumer does what it likes (it validates, it saves), is in no step. Who is told may
    be taken away by any thread at any time, as a loader is closed: so it is looked up once.

    Attributes:
        asked_ns: since when a batch is waited for; 0: none is.
        live: told when a batch is asked for and handed over, if there is a page to look at; None: there is none.
        recorder: told what was handed over; None: nothing is recorded.
        on_mark: called with the time at a hand-over, every two seconds at most; None: nothing is.

    Args:
        makes_here: batches are made while they are asked for, which is then what is waited for.
    """

    def __init__(self, makes_here: bool) -> None:
        self._makes_here = makes_here
        self.asked_ns = 0
        self.live: LooksPage | None = None
        self.recorder: DeliveryRecorder | None = None
        self._steps = self._steps_ns = self._wait_ns = self._ready_steps = self._ready_steps_ns = 0
        self._epochs = self._epoch_starts_ns = self._start_ns = self._left_out_ns = 0
        self._last_ns = self._batches = 0  # when the latest batches were handed over, and how many; 0: a pass begins
        self._mark_ns = self._recorded_from_ns = 0
        self.on_mark: Callable[[int], None] | None = None

    def ask(self, now_ns: int) -> None:
        """A batch is asked for; 0: it was in vain."""
        self.asked_ns = now_ns
        if (live := self.live) is not None:
            live.note_ask(now_ns)

    def begin_pass(self) -> None:
        """The next hand-over is a pass's first."""
        self._last_ns = 0

    def leave_out(self, ns: int) -> None:
        """So much of the step that is under way is no part of it."""
        if self._last_ns:
            self._last_ns += ns
            self._left_out_ns += ns

    def note(self, now_ns: int, waited_ns: int, batches: int, origin: Origin | None = None) -> None:
        """Batches were handed over after this wait. They are consumed one by one, until the next wait."""
        last_ns, asked_ns = self._last_ns, self.asked_ns
        if self._makes_here or not last_ns:  # a pass's beginning is waited for, too
            waited_ns = now_ns - asked_ns
        self.asked_ns = 0
        if (live := self.live) is not None:
            live.note_hand_over(now_ns)
        if last_ns:
            self._steps += self._batches
            step_ns = now_ns - last_ns
            self._steps_ns += step_ns
            self._wait_ns += waited_ns
            if waited_ns * _READY_SHARE <= step_ns:
                self._ready_steps += self._batches
                self._ready_steps_ns += step_ns
        elif self._mark_ns:
            self._epochs += 1
            self._epoch_starts_ns += waited_ns
        else:
            self._start_ns = waited_ns
        self._last_ns, self._batches = now_ns, batches
        if now_ns > self._mark_ns:
            self._mark_ns = now_ns + _MARK_NS
            if (on_mark := self.on_mark) is not None:
                on_mark(now_ns)
        recorder = self.recorder
        if recorder is not None and origin is not None and (now_ns >= self._recorded_from_ns or not last_ns):
            if self._makes_here:
                self._recorded_from_ns = now_ns + _RECORDED_APART_NS
            recorder.note(origin, asked_ns, now_ns, waited_ns, not last_ns, self._wait_ns)

    def counts(self, now_ns: int) -> StepCounts:
        """Return the sums; a wait that lasts counts up to this time. Runs in: any thread."""
        from loaderpool.trainer.explain.looks import StepCounts  # which `import loaderpool` shall not wait for

        waited_ns = now_ns - asked_ns if (asked_ns := self.asked_ns) and self._last_ns else 0
        return StepCounts(
            self._steps, self._steps_ns + waited_ns, self._wait_ns + waited_ns, self._ready_steps,
            self._ready_steps_ns, self._epochs, self._epoch_starts_ns, self._start_ns, self._left_out_ns,
        )  # fmt: skip
