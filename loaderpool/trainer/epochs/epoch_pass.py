"""One pass over a loader: the deliveries of one epoch, from the subscription that makes them to who asks for them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from loaderpool.config import ErrorPolicy
from loaderpool.errors import ClosedError, LoaderpoolError, counted
from loaderpool.plan.base import BasePlan
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler, wait_for_the_end
from loaderpool.trainer.engine.delivery import Delivery, Subscription
from loaderpool.trainer.epochs.counters import Counters, failed_indices
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import IterationLog, PassLog

if TYPE_CHECKING:
    from loaderpool.transport.reports import Failure


class ErrorBudget:
    """The samples of one pass that failed, counted batch by batch.

    How many batches come in one delivery depends on how fast the workers are. So that this decides neither what arrives
    before the error nor which one it is, a delivery is cut before the batch that has one failure too many, in whose
    place the error comes.

    Args:
        policy: what is allowed.
        plan: of the loader.
        counters: counts the failures of batches that are handed over.
    """

    def __init__(self, policy: ErrorPolicy, plan: BasePlan, counters: Counters) -> None:
        self._policy, self._plan, self._tally = policy, plan, counters
        self._errors = 0
        self._waiting: collections.deque[list[Failure]] = collections.deque()  # by batch, not handed over yet
        # Makes a new error each time: a kept exception would keep, through its traceback, all its frames.
        self._make_error: Callable[[], LoaderpoolError] | None = None

    def check(self) -> None:
        """Raise the error if its batch is the next one."""
        if self._make_error is not None:
            raise self._make_error()

    def admit(self, delivery: Delivery) -> Delivery:
        """Return the delivery, or as many of its batches as come before the error.

        Raises:
            LoaderpoolError: none does.
        """
        admitted = 0
        for failures in delivery.failures():
            self._errors += sum(len(failed_indices(failure)) for failure in failures)
            if failures and not self._policy.allows(self._errors, self._plan.rows_per_epoch):
                from loaderpool.trainer.session.remote_errors import (
                    sample_error,  # which `import loaderpool` shall not wait for
                )

                self._make_error = functools.partial(
                    sample_error,
                    failures[-1],
                    preface=f"{counted(self._errors, 'sample')} failed in this epoch, more than on_error="
                    f"({self._policy.action!r}, {self._policy.budget}) allows. The last one:\n",
                )
                break
            self._waiting.append(failures)
            admitted += 1
        if not admitted:
            self.check()
        return delivery if admitted == delivery.count else delivery.head(admitted)

    def hand_over(self, count: int) -> None:
        """Count the failures of the next `count` batches: they are handed over."""
        for _ in range(min(count, len(self._waiting))):
            self._tally.note_failures(self._waiting.popleft(), self._policy.action)


class Pass:
    """One pass over a loader: the deliveries of one epoch.

    Ownership: `close` (or the end, or an error) lets go of the subscription; a pass that is dropped must be closed.

    Attributes:
        is_over: it was closed, or is at its end: this shows with the last delivery, if the end has nothing to do.
        log: what it has handed out; None before the first delivery was asked for.

    Args:
        tracker: of the loader.
        reading: it is one of these passes.
        is_followed: whether another pass will come after it; None: unknown.
    """

    def __init__(self, tracker: EpochTracker, reading: IterationLog, is_followed: bool | None = None) -> None:
        self._tracker, self._reading, self._is_followed = tracker, reading, is_followed
        self._goes_on = False  # with the next epoch, as nothing was left of this one
        self._subscription: Subscription | None = None
        self.log: PassLog | None = None
        self._handed_over = 0  # of these, to the consumer; all are counted where there are hooks
        self._end_is_owed = False
        self._budget: ErrorBudget | None = None  # made when needed: the gap between epochs pays for it
        self._is_under_way = False  # it has delivered, and was asked for more
        self.is_over = False

    @property
    def epoch(self) -> int:
        """The epoch, or -1 before the first delivery was asked for."""
        return -1 if self.log is None else self.log.epoch

    @property
    def is_ready(self) -> bool:
        """Whether `next_delivery` has one, without waiting."""
        subscription = self._subscription
        return not self.is_over and subscription is not None and subscription.is_ready

    def next_delivery(self) -> Delivery:
        """Return the next batches of the epoch. Blocks until they are there.

        Runs in: any thread; on the main one in a block of `InterruptsHeld`, in which the caller stores what it gets.

        Raises:
            StopIteration: the epoch is over.
            KeyboardInterrupt: it came in the wait; the pass may be asked again.
            LoaderpoolError: what ended the pass; the next pass starts again.
        """
        tracker = self._tracker
        if self.is_over:
            raise StopIteration
        times = tracker.counters.times
        times.ask(clock.monotonic_ns())
        try:
            if self.log is None:
                self._subscription, self.log = tracker.open_subscription(self._is_followed)
                self._reading.add(self.log)
            log = self.log
            if self._budget is not None:
                self._budget.check()
            if not self._is_under_way and log.delivered:
                self._is_under_way = True
                if self._subscription is not None and log.delivered < log.batches:
                    tracker.read_ahead(self._subscription, log)
            delivery = self._take(self._subscription, log)
            if delivery is not None and delivery.row_failures:
                delivery = self._admit(delivery)
        except BaseException as error:
            times.ask(0)
            if isinstance(error, ClosedError):
                wait_for_the_end()
            is_failure = isinstance(error, Exception) and not is_of_a_handler(error)
            if is_failure:
                tracker.note_error(error)
            if is_failure or not self._outlives_interrupts:
                if self.log is not None and not self.log.delivered:
                    tracker.give_up_epoch(self.log.epoch)
                self.close()
            raise
        if delivery is None:
            times.ask(0)
            if self._goes_on:
                self._goes_on = self.is_over = False
                self.log = None
                return self.next_delivery()
            raise StopIteration
        if not log.delivered:
            tracker.counters.passes += 1
            times.begin_pass()
            tracker.note_begun(log.epoch)
        tracker.counters.note(delivery)
        log.note(delivery, self._subscription)
        if log.delivered >= log.batches and self._budget is None and not tracker.has_hooks:
            self._let_go_on(log)
            self.is_over = tracker.at_end is None
        return delivery

    @property
    def _outlives_interrupts(self) -> bool:
        """Whether KeyboardInterrupt has left it as it was, between two deliveries."""
        return self.log is None or (self._subscription is not None and self._subscription.outlives_interrupts)

    def _admit(self, delivery: Delivery) -> Delivery:
        """Return the delivery, or what comes of it before one failure too many."""
        if self._budget is None:
            tracker = self._tracker
            self._budget = ErrorBudget(tracker.config.on_error, tracker.plan, tracker.counters)
        return self._budget.admit(delivery)

    def _take(self, subscription: Subscription | None, log: PassLog) -> Delivery | None:
        """Return the subscription's next delivery; None: the epoch is over, or this pass was closed."""
        if log.delivered >= log.batches:
            self._finish(log)
            return None
        if subscription is None:  # closed on another thread
            return None
        try:
            return subscription.take()
        except StopIteration:
            if self.is_over:  # closed on another thread
                return None
            if subscription.is_at_end:
                self._end_of_stream(log)
                return None
            raise LoaderpoolError(
                f"Epoch {log.epoch} ended after {log.delivered} of {log.batches} batches. This is a bug in loaderpool; "
                "please report it."
            ) from None

    def _end_of_stream(self, log: PassLog) -> None:
        self.is_over = True
        log.close()
        if not log.delivered:
            if log.is_rest:  # of an epoch, of which nothing was left
                self._tracker.note_begun(log.epoch)
                self._goes_on = True
            else:
                self._tracker.give_up_epoch(log.epoch)
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.end()

    def _let_go_on(self, log: PassLog) -> None:
        """Leave the subscription to the next pass: it has nothing more for this one."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            self._tracker.park(subscription, log)

    def _finish(self, log: PassLog) -> None:
        self.is_over = True
        self._let_go_on(log)
        if self._tracker.has_hooks:
            self._owe_end()
            self._tracker.settle_ends()
        if self._tracker.at_end is not None:
            self._tracker.at_end()

    def hand_over(self, count: int = 1) -> None:
        """The consumer is given so many more batches, or they are passed over because no row of them is left.

        To be called where the tracker has hooks, and for the batches of a delivery that has `row_failures`.
        """
        if self._budget is not None:
            self._budget.hand_over(count)
        self._handed_over += count
        if self.log is not None and self._handed_over == self.log.batches:
            self._owe_end()

    def _owe_end(self) -> None:
        if not self._end_is_owed:
            self._end_is_owed = True
            self._tracker.owe_end()

    def close(self) -> None:
        """Let go; the next pass is whole. Never blocks; may run in a finalizer, and twice."""
        self.is_over = True
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.end()
