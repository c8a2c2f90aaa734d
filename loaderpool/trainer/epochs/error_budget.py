"""What `on_error` allows in a pass, and the error where more samples failed."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from loaderpool.config import ErrorPolicy
from loaderpool.errors import LoaderpoolError
from loaderpool.plan.base import BasePlan
from loaderpool.trainer.engine.delivery import Delivery
from loaderpool.trainer.epochs.counters import Counters, failed_indices

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
                    preface=f"{self._errors} samples of this pass failed, more than on_error=({self._policy.action!r}, "
                    f"{self._policy.budget}) allows; the last one:\n",
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
