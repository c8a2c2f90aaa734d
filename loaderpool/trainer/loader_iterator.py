"""`LoaderIterator`: the batches of one pass, as a loader's user gets them."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.system.undoing import Undoing
from loaderpool.trainer.engine.delivery import Delivery, data_bytes
from loaderpool.trainer.epochs.epoch_pass import Pass
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import IterationLog, Position
from loaderpool.trainer.loader_core import LoaderCore


class LoaderIterator(Iterator[Any]):
    """One pass over a loader; batches as nested structures of NumPy arrays.

    Threads may share it: each batch comes once. It may be asked again after a KeyboardInterrupt, and goes on with the
    batch that was awaited; under `workers=0` that ends the pass, for it came in the middle of your function.
    """

    def __init__(self, core: LoaderCore) -> None:
        self._core = core  # keeps the pool alive
        self._tracker = core.tracker
        self._turn = threading.RLock()
        self._reading = IterationLog()
        self._pass = Pass(self._tracker, self._reading)
        self._undoing: Undoing | None = None  # of the pass, once it has begun
        self._consumed = 0  # batches of the plan: those left out, too
        self._told = 0  # of these, to the pass, where it must be told
        self._delivery: Delivery | None = None
        self._batches: Iterator[tuple[int, Sequence[Any]]] = _NONE  # of the delivery
        self._left = 0  # of these batches
        self._batch_bytes: int | None = None
        self._unflatten: Callable[[Sequence[Any]], Any] = _bare
        self._skips = core.config.on_error.action == "skip"
        self._has_hooks = self._tracker.has_hooks
        self._must_tell = self._has_hooks  # the pass of each batch

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        with self._turn:
            while True:
                if not self._left:
                    if self._pass.is_over and self._undoing is not None:
                        self._end()
                        raise StopIteration
                    with InterruptsHeld():
                        self._fetch()
                try:
                    # A Ctrl-C may come behind any call: before the batch counts as taken, it is still in front.
                    for rows, parts in self._batches:
                        if self._must_tell:
                            self._tell()
                            if not rows and self._skips:
                                self._leave_out()
                                continue
                        batch = self._unflatten(parts)
                        nbytes = self._batch_bytes
                        self._tracker.counters.hand_over(1, rows, data_bytes(parts) if nbytes is None else nbytes)
                        self._consumed += 1
                        self._left -= 1
                        if not self._left:  # else the last batch's slot would be lent until the next one is asked for
                            self._delivery, self._batches = None, _NONE
                        return batch
                except BaseException:
                    if self._delivery is not None:
                        taken = self._delivery.count - self._left
                        self._batches = itertools.islice(self._delivery.batches(), taken, None)
                    raise

    def _fetch(self) -> None:
        """The next delivery, whose batches are handed out next. Runs in: a block of `InterruptsHeld`."""
        tracker, one_pass = self._tracker, self._pass
        if self._undoing is None:
            tracker.note_iteration(self._reading, is_dataset=False)
            self._undoing = tracker.live[id(one_pass)] = Undoing(self, functools.partial(_abandon, tracker, one_pass))
        try:
            delivery = one_pass.next_delivery()
        except BaseException:
            if one_pass.is_over:
                self._end()
            raise
        tracker.counters.tick(delivery)
        self._delivery, self._batches, self._left = delivery, delivery.batches(), delivery.count
        self._batch_bytes = delivery.batch_bytes
        self._must_tell = self._has_hooks or bool(delivery.row_failures)
        self._told = self._consumed
        if self._unflatten is _bare:
            self._unflatten = delivery.form.spec.structure.unflatten

    def _end(self) -> None:
        """The pass is over and holds nothing. This is in the gap between two epochs; a Ctrl-C may come anywhere."""
        assert self._undoing is not None
        self._tracker.live.pop(id(self._pass), None)
        self._undoing.forget()

    def _tell(self) -> None:
        """Tell the pass of the batch in front, once."""
        with InterruptsHeld():
            if self._told == self._consumed:
                self._told += 1
                self._pass.hand_over()

    def _leave_out(self) -> None:
        """Pass over the batch in front, of which no row is left."""
        with InterruptsHeld():
            assert self._pass.log is not None
            self._pass.log.omitted.append(self._consumed)
            self._consumed += 1
            self._left -= 1
            if not self._left:
                self._delivery, self._batches = None, _NONE

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands: `Loader.load_state_dict` goes on behind the last batch that this iterator has given.

        Raises:
            StateError: the loader's data changes between epochs, by hooks of the user's.
        """
        return self._core.state_at(self.position)

    @property
    def position(self) -> Position:
        """Where this pass stands."""
        return (self._pass.log or self._tracker.next_log()).position(self._consumed)

    @property
    def epoch(self) -> int:
        """The epoch of this pass, or -1 before its first batch."""
        return self._pass.epoch

    def close(self) -> None:
        """End the pass; the next one starts anew."""
        with InterruptsHeld():
            self._delivery, self._batches, self._left = None, _NONE, 0
            self._pass.close()
            if self._undoing is not None:
                self._undoing.now()
            self._tracker.settle_ends()


_NONE: Iterator[tuple[int, Sequence[Any]]] = iter(())


def _abandon(tracker: EpochTracker, one_pass: Pass) -> None:
    tracker.live.pop(id(one_pass), None)
    one_pass.close()


def _bare(parts: Sequence[Any]) -> Any:
    raise AssertionError("no delivery yet")
