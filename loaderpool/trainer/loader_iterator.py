"""`LoaderIterator`: the batches of one pass, as a loader's user gets them."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

from loaderpool.errors import ClusterError, LoaderpoolError
from loaderpool.system.interrupts import InterruptsHeld, Undoing, gate_handlers, is_of_a_handler
from loaderpool.trainer.epochs.epoch_pass import Conversion, Pass, as_arrays
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker, IterationLog, Position
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore


class LoaderIterator(Iterator[Any]):
    """Iterator over the batches of one epoch, as NumPy arrays; returned by `iter(loader)`.

    `tensors()`, `as_torch()` and `as_jax()` have iterators with the same methods. Threads may share one. After a
    `KeyboardInterrupt` you can continue with the next batch, except with `workers=0`, where the iteration ends.
    """

    def __init__(
        self, core: LoaderCore, convert: Conversion | None = None, iteration: IterationLog | None = None
    ) -> None:
        self._core = core  # keeps the pool alive
        self._turn = threading.RLock()
        self.iteration = IterationLog() if iteration is None else iteration
        self._pass = Pass(core.tracker, self.iteration, convert or as_arrays)
        self._undoing: Undoing | None = None  # of the pass, once it has begun

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        """Return the number of batches per epoch, however many were taken."""
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # its length may be unknown

    def __repr__(self) -> str:
        return f"<an iterator over batches of {self._core.description}; {FOR_KERAS}>"

    def __next__(self) -> Any:
        if self._turn._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            refuse_reentry(self)
        with self._turn:
            one_pass = self._pass
            if self._undoing is None:
                with InterruptsHeld():
                    self._begin()
            elif one_pass.left < 1 and one_pass.is_over:  # `take` would raise, which costs microseconds in the gap
                self._end()
                raise StopIteration
            try:
                return one_pass.take()
            except BaseException as error:
                # No batch is ever made again; who saves the place next means this one, and not the next epoch.
                if isinstance(error, ClusterError) and self._core.tracker.lost_at is None:
                    self._core.tracker.lost_at = self.position
                if one_pass.left < 1 and one_pass.is_over:
                    self._end()
                raise

    def _begin(self) -> None:
        """Note the pass, and what ends it. Runs in: a block of `InterruptsHeld`."""
        gate_handlers()  # of signals that each batch does not look at
        if "observer" not in vars(self._core):  # the loader's first hand-over, which is awaited now, has use for it
            with contextlib.suppress(OSError):  # no descriptors are left: then it is imported when it is needed
                import loaderpool.trainer.epochs.observer  # noqa: F401

        tracker, one_pass = self._core.tracker, self._pass
        self._undoing = Undoing(self, functools.partial(_abandon, tracker, self.iteration, one_pass))
        tracker.note_iteration(self.iteration, self)

    def _end(self) -> None:
        """The pass is over and holds nothing. This is in the gap between two epochs; a Ctrl-C may come anywhere."""
        assert self._undoing is not None
        self._core.tracker.live.pop(id(self.iteration), None)
        self._undoing.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after this iterator's latest batch; otherwise like `Loader.state_dict`."""
        return self._core.state_at(self.position)

    @property
    def position(self) -> Position:
        """Position after the latest batch of this iterator."""
        return self._position(self._pass.consumed)

    def _position(self, consumed: int) -> Position:
        return (self._pass.log or self._core.tracker.next_log()).position(consumed)

    @property
    def epoch(self) -> int:
        """Epoch number of this iteration, or -1 before its first batch."""
        return self._pass.epoch

    def close(self) -> None:
        """End this iteration. The next one starts a new epoch."""
        with InterruptsHeld():
            self._pass.close()
            if self._undoing is not None:
                self._undoing.now()
            self._core.tracker.settle_ends()


def refuse_reentry(iterator: Iterator[Any]) -> None:
    """Raise where another call of the iterator's `__next__`, which asks, is under way on this thread.

    That the thread owns its lock shows no such call: an interrupt may have left it owned.
    """
    asking = sys._getframe(1)
    frame = asking.f_back
    while frame is not None:
        if frame.f_code is asking.f_code and frame.f_locals.get("self") is iterator:
            raise LoaderpoolError(
                "next() was called while the same thread is inside next() of this iterator, as by a signal handler. "
                "Iterate over the loader in the handler instead, which starts a separate iteration"
            )
        frame = frame.f_back


def _abandon(tracker: EpochTracker, iteration: IterationLog, one_pass: Pass) -> None:
    tracker.live.pop(id(iteration), None)
    one_pass.close()


class AheadIterator(LoaderIterator):
    """A pass whose batches are on their way to a device while the step before them is computed.

    Only batches that are there are taken ahead: none that is asked for waits for one behind it. What was taken ahead
    does not count as given: `position` and `state_dict` are behind the last batch that this iterator has given.

    Args:
        core: of the loader.
        convert: opens a delivery; begins the copy to the device.
        ahead: how many batches behind the one that is asked for.
    """

    def __init__(self, core: LoaderCore, convert: Conversion, ahead: int) -> None:
        super().__init__(core, convert)
        self._ahead, self._ahead_turn = ahead, threading.RLock()
        self._taken: collections.deque[tuple[Any, int]] = collections.deque()  # and where the pass stands behind it
        self._given = 0
        self._error: Exception | None = None  # that ended the pass, behind what was taken

    def __next__(self) -> Any:
        if self._ahead_turn._is_owned():  # type: ignore[attr-defined]
            refuse_reentry(self)
        with self._ahead_turn:
            if not self._taken:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                self._take()
            while len(self._taken) <= self._ahead and self._error is None and self._pass.is_ready:
                try:
                    self._take()
                except Exception as error:
                    if is_of_a_handler(error):
                        raise
                    self._error = error
            if not self._taken:  # closed meanwhile
                raise StopIteration
            batch, self._given = self._taken.popleft()
            return batch

    def _take(self) -> None:
        with InterruptsHeld():
            self._taken.append((super().__next__(), self._pass.consumed))

    @property
    def position(self) -> Position:
        """Where this pass stands."""
        return self._position(self._given)

    def close(self) -> None:
        """End the pass; the next one starts again."""
        super().close()
        self._taken.clear()
        self._error = None
