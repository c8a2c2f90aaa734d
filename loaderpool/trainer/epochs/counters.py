"""What a loader's consumers were given, counted over all passes."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING

from loaderpool.system import clock
from loaderpool.trainer.engine.delivery import Delivery
from loaderpool.trainer.epochs.step_times import StepTimes

if TYPE_CHECKING:
    from loaderpool.transport.reports import Failure

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
        self.wait_ns = 0
        self.padded = self.padding = 0  # elements of padded components that were delivered; those that are padding
        self.skipped: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)
        self.replaced: collections.deque[int] = collections.deque(maxlen=_LATEST_INDICES)

    def note(self, delivery: Delivery) -> None:
        """Note a delivery's time, the wait for it, and its padding; who takes it apart counts what it hands over."""
        now = clock.monotonic_ns()
        self.wait_ns += delivery.waited_ns
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
