"""`AheadIterator`: some batches are handed to their conversion before they are asked for."""

from __future__ import annotations

import collections
import threading
from typing import Any

from loaderpool.system.interrupts import InterruptsHeld, is_of_a_handler
from loaderpool.trainer.epochs.epoch_pass import Conversion
from loaderpool.trainer.epochs.position import Position
from loaderpool.trainer.loader_core import LoaderCore
from loaderpool.trainer.loader_iterator import LoaderIterator, refuse_reentry


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
