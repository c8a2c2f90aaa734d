"""`Counters`: counts of a loader's batches, training steps and waits, over all passes.

Runs in: the main process. The thread that takes batches writes; any thread reads.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from loaderpool.config import FIRST_STEPS
from loaderpool.errors import warn
from loaderpool.plan.item_names import generated_item
from loaderpool.system import clock

if TYPE_CHECKING:
    from loaderpool.engine.delivery import Delivery
    from loaderpool.memory.recorder import RecordRing
    from loaderpool.transport.reports import Failure

# A batch counts as ready if the wait for it took at most 1/64 of its step. Checking for a ready
# batch takes time as well. Smaller number: short waits are missed. Larger number: ready batches
# count as late.
_READY_SHARE = 64
# Time between two calls of `on_mark`. Shorter: snapshots cost more. Longer: `explain` and
# `workers="auto"` see less.
_MARK_NS = 2_000_000_000
_LATEST_INDICES = 1000  # source indices kept of skipped, and of replaced samples

# A source index, or the numbers of a generator and of its item.
SampleIndex = int | tuple[int, int]


class PassTimes:
    """Times of one pass, of which several may run side by side.

    Attributes:
        asked_ns: Start of the consumer's present wait for a delivery; 0: it does not wait.
        delivered_ns: Time of the latest delivery; 0 before the first one.
        batches: Batches of the latest delivery.
    """

    __slots__ = ("asked_ns", "batches", "delivered_ns")

    def __init__(self) -> None:
        self.asked_ns = self.delivered_ns = self.batches = 0


class StepTimes:
    """Durations of steps, of starts of passes, and of the waits in both.

    A step lasts from one delivery of a pass to the next. Each nanosecond between the request of a
    pass's first delivery and its latest delivery is in one step or in one start.

    Attributes:
        first_ns: Time of the first delivery; 0 before it.
        last_ns: Time of the latest delivery.
        count: Number of steps; each batch of a delivery has one.

    Args:
        makes_here: The engine makes batches in this process when they are requested. All of that
            time counts as waiting.
    """

    def __init__(self, makes_here: bool) -> None:
        self._makes_here = makes_here
        self.count = self._steps_ns = self._wait_ns = self._ready_steps = self._ready_steps_ns = 0
        self._epochs = self._epoch_starts_ns = self._start_ns = 0
        self._latest = PassTimes()  # of the pass that requested a delivery last
        self.first_ns = self.last_ns = 0

    @property
    def asked_ns(self) -> int:
        """Start of the wait of the pass with the latest request; 0: it does not wait."""
        return self._latest.asked_ns

    def start_wait(self, times: PassTimes, now_ns: int) -> None:
        """Note that a pass requests a delivery.

        `Counters.note` pairs with it, or `asked_ns` is set to 0.
        """
        times.asked_ns = now_ns
        self._latest = times

    def note(self, times: PassTimes, now_ns: int, waited_ns: int, batches: int) -> int:
        """Count the step or the start that ends with a delivery. Return the wait in it.

        Args:
            times: Times of the pass.
            now_ns: Time of the delivery.
            waited_ns: Wait for the delivery, as the engine has measured it.
            batches: Number of batches in the delivery.
        """
        last_ns = times.delivered_ns
        # At the start of a pass, the wait includes the time in which its run is opened.
        if self._makes_here or not last_ns:
            waited_ns = now_ns - times.asked_ns
        times.asked_ns = 0
        if last_ns:
            self.count += times.batches
            step_ns = now_ns - last_ns
            self._steps_ns += step_ns
            self._wait_ns += waited_ns
            if waited_ns * _READY_SHARE <= step_ns:
                self._ready_steps += times.batches
                self._ready_steps_ns += step_ns
        elif self.first_ns:
            self._epochs += 1
            self._epoch_starts_ns += waited_ns
        else:
            self._start_ns, self.first_ns = waited_ns, now_ns
        times.delivered_ns, times.batches = now_ns, batches
        self.last_ns = now_ns
        return waited_ns

    def sums(self, now_ns: int) -> dict[str, Any]:
        """Return the fields of a `Snapshot` that count steps. Called by any thread.

        Args:
            now_ns: Time up to which a wait in progress counts.
        """
        latest = self._latest
        asked_ns = latest.asked_ns
        waited_ns = now_ns - asked_ns if asked_ns and latest.delivered_ns else 0
        return {
            "steps": self.count,
            "seconds": (self._steps_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "wait_s": (self._wait_ns + waited_ns + self._epoch_starts_ns) / 1e9,
            "ready_steps": self._ready_steps,
            "ready_steps_s": self._ready_steps_ns / 1e9,
            "epochs": self._epochs,
            "epoch_starts_s": self._epoch_starts_ns / 1e9,
            "start_s": self._start_ns / 1e9,
        }


class ShortBatches:
    """Share of short batches in the first pass. After that pass, nothing is counted any more.

    Attributes:
        full_rows: Rows of a full batch of shards, until the end of the first pass; 0: shorter
            batches are not counted.
        advice: Advice on how to get fuller batches.
        text: Sentences on the short batches, with the advice; "": there are few, or the pass has
            not ended.
    """

    def __init__(self) -> None:
        self.full_rows = self._short = self._checked = 0
        self.advice = self.text = ""

    def note(self, delivery: Delivery) -> None:
        """Count the batches of a delivery in the first pass."""
        rows = [each.rows for each in delivery.counts()]
        self._checked += len(rows)
        self._short += sum(each < self.full_rows for each in rows)

    def end_pass(self, is_whole: bool) -> None:
        """Warn, once, if most batches of the first pass were shorter than `batch_size`.

        Called by the thread that takes batches, after the pass's last delivery.

        Args:
            is_whole: The pass was a whole epoch. The rest of an epoch has more short batches.

        Raises:
            LoaderpoolWarning: A warnings filter turns the warning into an error.
        """
        full_rows, self.full_rows = self.full_rows, 0
        # One short batch at the end is the remainder of any epoch.
        if full_rows and is_whole and self._short > 1 and 2 * self._short > self._checked:
            self.text = (
                f"{self._short} of {self._checked} batches had fewer rows than "
                f"batch_size={full_rows}. A batch has items of one generator, and the last batch "
                f"of each generator is smaller. {self.advice}"
            )
            warn(self.text)


class FailedSamples:
    """Samples that `on_error` skipped or replaced.

    Attributes:
        count: Number of these samples.
        skipped: Latest source indices of skipped samples. For generators, pairs of a generator and
            its item.
        replaced: The same of replaced samples.
    """

    def __init__(self) -> None:
        self.count = 0
        self.skipped: collections.deque[SampleIndex] = collections.deque(maxlen=_LATEST_INDICES)
        self.replaced: collections.deque[SampleIndex] = collections.deque(maxlen=_LATEST_INDICES)

    def note(self, failures: Iterable[Failure], action: str) -> None:
        """Count the failed samples of a batch.

        Args:
            failures: Failures in the batch.
            action: `on_error`: "skip" or "replace".
        """
        indices = self.skipped if action == "skip" else self.replaced
        for failure in failures:
            failed = failed_indices(failure)
            indices.extend(generated_item(each) or each for each in failed)
            self.count += len(failed)


class Taken:
    """Amount of data in the batches that consumers have taken. `Pass` adds each batch.

    Attributes:
        batches: Number of these batches.
        samples: Rows of these batches.
        nbytes: Bytes of these batches.
    """

    __slots__ = ("batches", "nbytes", "samples")

    def __init__(self) -> None:
        self.batches = self.samples = self.nbytes = 0


class Counters:
    """Counts of the deliveries to a loader's consumers, over all passes.

    `Pass.next_delivery` calls `note` for each delivery, and `Pass.take` counts its batches as the
    consumer takes them.

    Attributes:
        steps: Durations of steps and waits.
        taken: Batches taken by consumers.
        failed: Samples that `on_error` skipped or replaced.
        short: Short batches of the first pass.
        recorder: Ring for records of deliveries; None before the first snapshot.
        on_mark: Called by `note` with its time: at each of the first three steps, then every two
            seconds at most. Any thread may set it to None.
        passes: Passes with at least one delivery.
        first_samples: Rows of the first delivery, which arrived before any time was measured.
        padded: Elements of the padded components that were delivered.
        padding: Number of these elements that are padding.

    Args:
        makes_here: As for `StepTimes`.
    """

    def __init__(self, makes_here: bool) -> None:
        self.steps = StepTimes(makes_here)
        self.taken = Taken()
        self.failed = FailedSamples()
        self.short = ShortBatches()
        self.recorder: RecordRing | None = None
        self.on_mark: Callable[[int], None] | None = None
        self._mark_ns = 0
        self.passes = self.first_samples = 0
        self.padded = self.padding = 0

    def begin_pass(self, times: PassTimes) -> None:
        """Note that the next delivery is the first one of a pass."""
        self.passes += 1
        times.delivered_ns = 0

    def note(self, delivery: Delivery, times: PassTimes) -> None:
        """Count a step and its wait, as a delivery reaches the consumer of a pass.

        The batches of the delivery are not counted here, but when the consumer takes them. Called
        by the thread that takes batches.
        """
        now_ns, asked_ns, is_first = clock.monotonic_ns(), times.asked_ns, not times.delivered_ns
        steps = self.steps
        if not steps.first_ns:
            self.first_samples = sum(each.rows for each in delivery.counts())
        waited_ns = steps.note(times, now_ns, delivery.waited_ns, delivery.count)
        if now_ns > self._mark_ns:
            self._mark_ns = now_ns + _MARK_NS if steps.count >= FIRST_STEPS else now_ns
            # Read once, because another thread that closes the loader may set it to None.
            if (on_mark := self.on_mark) is not None:
                on_mark(now_ns)
        recorder, origin = self.recorder, delivery.origin
        if recorder is not None and origin is not None:
            recorder.write(*origin, asked_ns, now_ns, waited_ns, is_first)
        if self.short.full_rows:
            self.short.note(delivery)
        if delivery.form.may_be_padded:
            for each in delivery.counts():
                self.padded += each.padded
                self.padding += each.padding


def failed_indices(failure: Failure) -> tuple[int, ...]:
    """Return the source indices of a failure: of one sample, or of a whole batch from one call."""
    return failure.indices if failure.index is None else (failure.index,)
