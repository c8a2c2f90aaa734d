"""Samples that are not run again: they hung a worker, or ended it also when they ran alone."""

from __future__ import annotations

import dataclasses

from loaderpool.transport.reports import Failure, describe_lost, describe_timeout


class Exclusions:
    """Knows what each excluded sample is counted as, by epoch and source index (of a batch's call: its first item).

    Args:
        worker: this worker's number, None in the caller's process.
        timeout_s: seconds that a sample may take.
    """

    def __init__(self, worker: int | None, timeout_s: float | None) -> None:
        self._worker, self._timeout_s = worker, timeout_s
        self._failures: dict[tuple[int, int], Failure] = {}

    def add(self, epoch: int, index: int, ran_s: float, exit_code: int) -> None:
        """Count a sample as failed: it hung a worker for `ran_s`, or (0) ended it with this exit code."""
        if ran_s:
            failure = describe_timeout(
                index=index,
                epoch=epoch,
                worker=self._worker,
                ran_s=ran_s,
                timeout_s=self._timeout_s or 0.0,
                stacks="",
            )
        else:
            failure = describe_lost(index=index, epoch=epoch, worker=self._worker, exit_code=exit_code)
        self._failures[epoch, index] = failure

    def find(self, epoch: int, indices: list[int]) -> Failure | None:
        """Return the failure of the call for these items, None where it may run."""
        if not self._failures:
            return None
        failure = self._failures.get((epoch, indices[0]))
        if failure is None or len(indices) == 1:
            return failure
        return dataclasses.replace(failure, index=None, indices=tuple(indices[:1000]))
