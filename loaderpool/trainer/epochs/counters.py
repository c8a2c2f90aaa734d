"""What a loader's consumers were given, counted over all passes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from loaderpool.system import clock

if TYPE_CHECKING:
    from loaderpool.core.delivery import Delivery
    from loaderpool.memory.recorder import DeliveryRecorder, Origin
    from loaderpool.transport.reports import Failure

# A wait below this part of its step is that of a batch that was there: looking for it takes a moment, too.
_READY_SHARE = 64
# How often what others count, too, is noted beside.
_MARK_NS = 2_000_000_000
# Each of the first steps is noted: those that compile are to be told from others. As `FIRST_STEPS` of `looks`.
_FIRST_STEPS = 3


class StepTimes:
    """Notes hand-overs.

    Time between passes, in which a consumer does what it likes (it validates, it saves), is in no step. Who is told may
    be taken away by any thread at any time, as a loader is closed: so it is looked up once.

    Attributes:
        asked_ns: since when a batch is waited for; 0: none is.
        recorder: told what was handed over; None: nothing is recorded.
        on_mark: called with the time at a hand-over, after the first three steps every two seconds at most; None:
            nothing is.

    Args:
        makes_here: batches are made while they are asked for, which is then what is waited for.
    """

    def __init__(self, makes_here: bool) -> None:
        self._makes_here = makes_here
        self.asked_ns = 0
        self.recorder: DeliveryRecorder | None = None
        self._steps = self._steps_ns = self._wait_ns = self._ready_steps = self._ready_steps_ns = 0
        self._epochs = self._epoch_starts_ns = self._start_ns = 0
        self._last_ns = self._batches = 0  # when the latest batches were handed over, and how many; 0: a pass begins
        self._mark_ns = 0
        self.on_mark: Callable[[int], None] | None = None

    def ask(self, now_ns: int) -> None:
        """A batch is asked for; 0: it was in vain."""
        self.asked_ns = now_ns

    def begin_pass(self) -> None:
        """The next hand-over is a pass's first."""
        self._last_ns = 0

    def note(self, now_ns: int, waited_ns: int, batches: int, origin: Origin | None = None) -> None:
        """Batches were handed over after this wait. They are consumed one by one, until the next wait."""
        last_ns, asked_ns = self._last_ns, self.asked_ns
        if self._makes_here or not last_ns:  # a pass's beginning is waited for, too
            waited_ns = now_ns - asked_ns
        self.asked_ns = 0
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
            self._mark_ns = now_ns + _MARK_NS if self._steps >= _FIRST_STEPS else now_ns
            if (on_mark := self.on_mark) is not None:
                on_mark(now_ns)
        recorder = self.recorder
        if recorder is not None and origin is not None:
            recorder.note(origin, asked_ns, now_ns, waited_ns, not last_ns)

    def sums(self, now_ns: int) -> dict[str, float]:
        """Return what `explain.observed.Counts` has of it; a wait that lasts counts up to this time.

        Runs in: any thread.
        """
        waited_ns = now_ns - asked_ns if (asked_ns := self.asked_ns) and self._last_ns else 0
        return {
            "steps": self._steps,
            "seconds": (self._steps_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "wait_s": (self._wait_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "ready_steps": self._ready_steps,
            "ready_steps_s": self._ready_steps_ns / 1e9,
            "epochs": self._epochs,
            "epoch_starts_s": self._epoch_starts_ns / 1e9,
            "start_s": self._start_ns / 1e9,
        }


_LATEST_INDICES = 1000


class Counters:
    """What was handed to consumers, over all passes.

    Args:
        makes_here: batches are made in the consumer's process, while they are asked for.
    """

    def __init__(self, makes_here: bool) -> None:
        self.times = StepTimes(makes_here)
        self.passes = self.batches = self.samples = self.nbytes = self.errors = 0
        self.first_ns = self.last_ns = 0
        self.first_samples = 0  # of the first delivery: they came before the clock ran
        self.padded = self.padding = 0  # elements of padded components that were delivered; those that are padding
        self.skipped: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)
        self.replaced: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)

    def note(self, delivery: Delivery) -> None:
        """Note a delivery's time, the wait for it, and its padding; who takes it apart counts what it hands over."""
        now = clock.monotonic_ns()
        self.times.note(now, delivery.waited_ns, delivery.count, delivery.origin)
        if not self.first_ns:
            self.first_ns = now
            self.first_samples = sum(each.rows for each in delivery.counts())
        self.last_ns = now
        if delivery.form.may_be_padded:
            for each in delivery.counts():
                self.padded += each.padded
                self.padding += each.padding

    def note_failures(self, failures: Iterable[Failure], action: str) -> None:
        """Note the samples that failed in a batch, and that `on_error` skips or replaces."""
        indices = self.skipped if action == "skip" else self.replaced
        for failure in failures:
            failed = failed_indices(failure)
            indices.extend(failed)
            self.errors += len(failed)


def failed_indices(failure: Failure) -> tuple[int, ...]:
    """Return the source indices of the samples that failed: one, or those of a batch that one call makes."""
    return failure.indices if failure.index is None else (failure.index,)
