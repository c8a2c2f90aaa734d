"""`Counters`: batches, steps and waits of a loader's consumers, over all passes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from loaderpool.system import clock

if TYPE_CHECKING:
    from loaderpool.core.delivery import Delivery
    from loaderpool.memory.recorder import RecordRing
    from loaderpool.transport.reports import Failure

# A wait below this part of its step is that of a batch that was there: looking for it takes a moment, too.
_READY_SHARE = 64
# How often what others count, too, is noted beside.
_MARK_NS = 2_000_000_000
# Each of the first steps is noted: those that compile are to be told from others. As `FIRST_STEPS` of `window`.
_FIRST_STEPS = 3
_LATEST_INDICES = 1000


class Counters:
    """What was handed to consumers, over all passes. A step is from one hand-over to the next, in one pass.

    Who is told may be taken away by any thread at any time, as a loader is closed: so it is looked up once.

    Args:
        makes_here: batches are made in the consumer's process while they are asked for: that is waited for.
    """

    def __init__(self, makes_here: bool) -> None:
        self._makes_here = makes_here
        self.asked_ns = 0  # since when a batch is waited for; 0: none is
        self.recorder: RecordRing | None = None
        # Called with the time at a hand-over, after the first three steps every two seconds at most.
        self.on_mark: Callable[[int], None] | None = None
        self._steps = self._steps_ns = self._wait_ns = self._ready_steps = self._ready_steps_ns = 0
        self._epochs = self._epoch_starts_ns = self._start_ns = 0
        self._step_ns = self._batches = (
            0  # when the latest batches were handed over, and how many; 0: a pass begins
        )
        self._mark_ns = 0
        self.passes = self.batches = self.samples = self.nbytes = self.errors = 0
        self.first_ns = self.last_ns = 0
        self.first_samples = 0  # of the first delivery: they came before the clock ran
        self.padded = self.padding = (
            0  # elements of padded components that were delivered; those that are padding
        )
        self.skipped: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)
        self.replaced: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)

    def begin_pass(self) -> None:
        """The next hand-over is a pass's first."""
        self.passes += 1
        self._step_ns = 0

    def note(self, delivery: Delivery) -> None:
        """Batches are handed over, and consumed one by one until the next wait. Who takes them apart counts them."""
        now_ns, waited_ns, last_ns, asked_ns = (
            clock.monotonic_ns(),
            delivery.waited_ns,
            self._step_ns,
            self.asked_ns,
        )
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
        elif self.first_ns:
            self._epochs += 1
            self._epoch_starts_ns += waited_ns
        else:
            self._start_ns, self.first_ns = waited_ns, now_ns
            self.first_samples = sum(each.rows for each in delivery.counts())
        self._step_ns, self._batches = now_ns, delivery.count
        if now_ns > self._mark_ns:
            self._mark_ns = now_ns + _MARK_NS if self._steps >= _FIRST_STEPS else now_ns
            if (on_mark := self.on_mark) is not None:
                on_mark(now_ns)
        recorder, origin = self.recorder, delivery.origin
        if recorder is not None and origin is not None:
            recorder.write(*origin, asked_ns, now_ns, waited_ns, not last_ns)
        self.last_ns = now_ns
        if delivery.form.may_be_padded:
            for each in delivery.counts():
                self.padded += each.padded
                self.padding += each.padding

    def sums(self, now_ns: int) -> dict[str, Any]:
        """Return what a `Snapshot` has of steps; a wait that lasts counts up to this time. Runs in: any thread."""
        waited_ns = now_ns - asked_ns if (asked_ns := self.asked_ns) and self._step_ns else 0
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
