"""`BatchReader`: how the batches of a pass are handed over to what reads them, a loop or `tf.data`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.trainer.engine.delivery import Delivery, data_bytes
from loaderpool.trainer.epochs.epoch_pass import Pass
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import IterationLog

# Rows and components of each batch of a delivery, and what makes of a batch's components what the consumer gets. It is
# asked again for the same delivery where a Ctrl-C broke off a step of the first answer.
Opened = tuple[Iterator[tuple[int, Sequence[Any]]], Callable[[Sequence[Any]], Any]]
Conversion = Callable[[Delivery], Opened]

_NONE: Iterator[tuple[int, Sequence[Any]]] = iter(())


def as_arrays(delivery: Delivery) -> Opened:
    """Batches as nested structures of NumPy arrays."""
    return delivery.batches(), delivery.form.spec.structure.unflatten


class BatchReader:
    """Hands over the batches of one pass, each once: counts them, tells the pass where it must know, omits empty ones.

    Used by one thread at a time. It may be asked again after a KeyboardInterrupt, and goes on with the batch that was
    awaited: until a batch counts as taken, it is still in front. What was handed over is in no variable of it any more,
    so that a slot comes back with the reader's own arrays.

    Ownership: `close` lets go of the subscription; a reader that is dropped must be closed.

    Attributes:
        one_pass: whose batches they are.
        consumed: batches of the plan that are behind the consumer: those left out, too.
        left: batches of the delivery that was fetched last, which are still in front.

    Args:
        tracker: of the loader.
        iteration: the passes of one iterator; this one will be among them.
        convert: opens a delivery: what the consumer gets.
        is_followed: whether another pass will come after it; None: unknown.
    """

    def __init__(
        self,
        tracker: EpochTracker,
        iteration: IterationLog,
        convert: Conversion = as_arrays,
        is_followed: bool | None = None,
    ) -> None:
        self.one_pass = Pass(tracker, iteration, is_followed=is_followed)
        self.consumed = 0
        self._told = 0  # of these, to the pass, where it must be told
        self._counters = tracker.counters
        self._convert = convert
        self._assemble: Callable[[Sequence[Any]], Any] | None = None  # as the delivery was opened
        self._delivery: Delivery | None = None
        self._batches = _NONE  # of the delivery
        self.left = 0
        self._batch_bytes: int | None = None
        self._skips = tracker.config.on_error.action == "skip"
        self._must_tell = self._has_hooks = tracker.has_hooks  # the pass of each batch

    def take(self) -> Any:
        """Return the next batch. Blocks until it is there.

        Raises:
            StopIteration: the pass is over.
            KeyboardInterrupt: it came in the wait; the reader may be asked again.
            LoaderpoolError: what ended the pass.
        """
        while True:
            if not self.left:
                if self.one_pass.is_over:
                    raise StopIteration
                with InterruptsHeld():
                    self.fetch()
            try:
                # A Ctrl-C may come behind any call.
                for rows, parts in self._batches:
                    if self._must_tell:
                        self._tell()
                        if not rows and self._skips:
                            self._leave_out()
                            continue
                    batch = self._assemble(parts)  # type: ignore[misc]  # there is one since the first delivery
                    nbytes = self._batch_bytes
                    if nbytes is None:
                        nbytes = data_bytes(parts)
                    counters = self._counters
                    counters.batches += 1
                    counters.samples += rows
                    counters.nbytes += nbytes
                    self.consumed += 1
                    self.left -= 1
                    if not self.left:  # else the last batch's slot would be lent until the next one is asked for
                        self._delivery, self._batches = None, _NONE
                    return batch
            except BaseException:
                if self._delivery is not None:
                    batches, self._assemble = self._convert(self._delivery)
                    self._batches = itertools.islice(batches, self._delivery.count - self.left, None)
                raise

    def take_joined(self, assemble: Callable[[Sequence[Any]], Any]) -> Any:
        """Return all batches of the next delivery, each component as `dtype[count, rows, ...]`; for fixed forms only.

        Blocks and raises as `take`; it is not called beside that.
        """
        if self.one_pass.is_over:
            raise StopIteration
        with InterruptsHeld():
            delivery = self.one_pass.next_delivery()
            count = delivery.count
            if self._has_hooks or delivery.row_failures:
                self.one_pass.hand_over(count)
            counters = self._counters
            counters.batches += count
            counters.samples += count * delivery.rows
            counters.nbytes += count * (delivery.batch_bytes or 0)
            self.consumed += count
            return assemble(delivery.joined())

    def fetch(self) -> None:
        """Ask for the next delivery, whose batches `take` hands over next; it does so itself when there are none left.

        Blocks and raises as `take`. Runs in: a block of `InterruptsHeld`.
        """
        delivery = self.one_pass.next_delivery()
        self._batches, self._assemble = self._convert(delivery)
        self._delivery, self.left = delivery, delivery.count
        self._batch_bytes = delivery.batch_bytes
        self._must_tell = self._has_hooks or bool(delivery.row_failures)
        self._told = self.consumed

    def _tell(self) -> None:
        """Tell the pass of the batch in front, once."""
        with InterruptsHeld():
            if self._told == self.consumed:
                self._told += 1
                self.one_pass.hand_over()

    def _leave_out(self) -> None:
        """Pass over the batch in front, of which no row is left."""
        with InterruptsHeld():
            assert self.one_pass.log is not None
            self.one_pass.log.omitted.append(self.consumed)
            self.consumed += 1
            self.left -= 1
            if not self.left:
                self._delivery, self._batches = None, _NONE

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return a batch without waiting for it."""
        return self.left > 0 or self.one_pass.is_ready

    def close(self) -> None:
        """End the pass. Never blocks; may run in a finalizer, and twice."""
        self._delivery, self._batches, self.left = None, _NONE, 0
        self.one_pass.close()
