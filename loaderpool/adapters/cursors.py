"""What stands at the places where iterators of a checkpointable dataset are: open passes, found again by their place.

tf.data saves an iterator as the numbers that it last got from us, and asks with such numbers for what comes behind
them. Where it asks for what is next anyway, a cursor stands there. Where none does, the iterator was restored, and one
is opened there.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from loaderpool.adapters.exit_gate import exit_gate
from loaderpool.errors import ClosedError
from loaderpool.trainer.engine.delivery import data_bytes
from loaderpool.trainer.epochs.epoch_pass import Pass
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import Frontier, IterationLog, Position

# Of those at whose place no iterator may be any more, where nobody tells. Smaller: several iterators at once open their
# passes anew for each batch. Larger: each that was left early holds slots for longer.
_MOST_UNTOLD = 4


class EpochIsOver(Exception):
    """A stream has ended."""


class Cursor:
    """A pass, and where one consumer of it stands. Used by one thread at a time.

    Ownership: `close` lets go of the run.

    Args:
        tracker: of the loader.
        reading: the passes of one iterator, this one among them.
        place: where it begins; None: with the next epoch.
        is_followed: as of `Pass`.
    """

    def __init__(
        self, tracker: EpochTracker, reading: IterationLog, place: Position | None, is_followed: bool | None
    ) -> None:
        self.reading = reading
        self._tracker = tracker
        self._pass = Pass(tracker, reading, place, is_followed)
        self._consumed = 0
        self._frontier: Frontier | None = None
        # What was delivered and not taken: rows and components of a batch, or of some as one array; how many batches;
        # bytes of a batch; whether the pass must be told.
        self._waiting: collections.deque[tuple[int, list[Any], int, int | None, bool]] = collections.deque()
        self._error: Exception | None = None  # what comes behind that
        self.told_by: weakref.ref[Any] | None = None
        self.is_closed = False

    @property
    def place(self) -> Position:
        """What comes next; something was asked for."""
        if self._frontier is None:
            assert self._pass.log is not None
            self._frontier = Frontier(self._pass.log)
        return self._frontier.position(self._consumed)

    @property
    def is_at_end(self) -> bool:
        """Whether its epoch is over, as far as anybody knows."""
        log = self._pass.log
        return log is not None and self._consumed >= log.batches

    @property
    def has_given(self) -> bool:
        """Whether anything was taken."""
        return self._consumed > 0

    def take(self) -> tuple[int, list[Any]]:
        """Rows and components of the next batch. Blocks until it is there.

        Raises:
            EpochIsOver: there is none: the stream has ended.
            LoaderpoolError: what ended the pass.
        """
        if not self._waiting:
            delivery = self._next_delivery()
            must_tell, nbytes = bool(delivery.row_failures), delivery.batch_bytes
            self._waiting.extend((rows, parts, 1, nbytes, must_tell) for rows, parts in delivery.batches())
            del delivery
        rows, parts, _, nbytes, must_tell = self._waiting.popleft()
        self._consumed += 1
        if must_tell:
            self._pass.hand_over()
        if rows:
            self._tracker.counters.hand_over(1, rows, data_bytes(parts) if nbytes is None else nbytes)
        return rows, parts

    def leave_out(self) -> None:
        """The batch that was taken last is given to nobody, as no row of it is left."""
        assert self._pass.log is not None
        self._pass.log.omitted.append(self._consumed - 1)

    def take_joined(self, count: int) -> tuple[int, list[Any]]:
        """How many batches were taken, and their components as `dtype[batches, rows, ...]`; for fixed forms only.

        So many as `count`; but the epoch's last full batches may be fewer, and a shorter one behind them comes alone.
        That is a matter of the epoch, never of what is there already. None at all if one of them failed and some did
        not: ask for fewer.

        Raises:
            EpochIsOver: there is none: the stream has ended.
            LoaderpoolError: what ended the pass; nothing that came before is left.
        """
        while not self._waiting:
            self._fill()
        log = self._pass.log
        assert log is not None
        rows = self._waiting[0][0]
        while self._waiting[-1][0] == rows and (there := sum(each[2] for each in self._waiting)) < count:
            if self._consumed + there >= log.batches:
                break
            try:
                self._fill()
            except EpochIsOver:
                break
            except Exception as error:
                self._error = error
                return 0, []
        count = min(count, sum(each[2] for each in self._waiting if each[0] == rows))
        pieces, left = [], count
        while left:
            _, parts, there, nbytes, must_tell = self._waiting.popleft()
            taken = min(left, there)
            pieces.append([part[:taken] for part in parts] if taken < there else parts)
            if taken < there:
                self._waiting.appendleft((rows, [part[taken:] for part in parts], there - taken, nbytes, must_tell))
            left -= taken
            self._consumed += taken
            if must_tell:
                self._pass.hand_over(taken)
            self._tracker.counters.hand_over(taken, taken * rows, taken * (nbytes or 0))
        if len(pieces) == 1:
            return count, pieces[0]
        return count, [np.concatenate(parts) for parts in zip(*pieces, strict=True)]

    def finish(self) -> None:
        """Its epoch is over: what was made ahead is the next one's."""
        with contextlib.suppress(StopIteration):
            self._pass.next_delivery()

    def close(self) -> None:
        """Let go. Never blocks; may run in a finalizer, and twice."""
        self.is_closed = True
        self._pass.close()
        self._waiting.clear()

    def _fill(self) -> None:
        if self._error is not None:
            raise self._error
        delivery = self._next_delivery()
        must_tell = bool(delivery.row_failures)
        self._waiting.append((delivery.rows, delivery.joined(), delivery.count, delivery.batch_bytes, must_tell))

    def _next_delivery(self) -> Any:
        try:
            delivery = self._pass.next_delivery()
        except StopIteration:
            log = self._pass.log
            if log is not None and log.delivered >= log.batches and not self.is_closed:
                raise EpochIsOver from None
            raise ClosedError("this iterator was dropped while it was read") from None
        self._tracker.counters.tick(delivery)
        return delivery


class Cursors:
    """All that stand somewhere, by their place. Two at one place will give the same, so either will do.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._standing: dict[tuple[int, ...], list[Cursor]] = {}
        self._untold: collections.deque[tuple[tuple[int, ...], Cursor]] = collections.deque()
        # Closed by finalizers, which may run while this very thread holds the lock.
        self._gone: collections.deque[tuple[tuple[int, ...], Cursor]] = collections.deque()

    def claim(self, place: Sequence[int]) -> Cursor | None:
        """A cursor that stands there, which is the caller's now."""
        key = tuple(place)
        with self._turn:
            self._sweep()
            there = self._standing.get(key)
            if not there:
                return None
            cursor = there[0]
            self._remove(key, cursor)
        cursor.told_by = None
        return None if cursor.is_closed else cursor

    def put(self, place: Sequence[int], cursor: Cursor, anchor: Any) -> None:
        """It stands there from now on.

        Args:
            place: as who asks for what is next will say it.
            cursor: what stands there.
            anchor: lives as long as somebody may ask, and it is closed with it; None: nobody tells.
        """
        key, gone = tuple(place), self._gone
        if anchor is not None:
            reference, gate = weakref.ref(cursor), exit_gate

            def let_go(_: object) -> None:
                left = reference()
                if left is not None and not gate.is_shut:  # else all is closed, and modules may be gone
                    left.close()
                    gone.append((key, left))

            cursor.told_by = weakref.ref(anchor, let_go)
        with self._turn:
            self._sweep()
            self._standing.setdefault(key, []).append(cursor)
            if anchor is None:
                self._untold.append((key, cursor))
                if len(self._untold) > _MOST_UNTOLD:
                    oldest = self._untold[0]
                    oldest[1].close()
                    self._remove(*oldest)

    def close(self) -> None:
        """Close all."""
        for cursors in list(self._standing.values()):
            for cursor in list(cursors):
                cursor.close()

    def _remove(self, key: tuple[int, ...], cursor: Cursor) -> None:
        there = self._standing.get(key, [])
        if cursor in there:
            there.remove(cursor)
        if not there:
            self._standing.pop(key, None)
        if (key, cursor) in self._untold:
            self._untold.remove((key, cursor))

    def _sweep(self) -> None:
        while self._gone:
            self._remove(*self._gone.popleft())
