"""`LoaderIterator`: the batches of one pass, as a loader's user gets them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.delivery import Delivery, data_bytes
from loaderpool.passes import Pass
from loaderpool.reading import Position, Reading

if TYPE_CHECKING:
    from loaderpool.loader import Loader

__all__ = ["LoaderIterator"]


class LoaderIterator(Iterator[Any]):
    """One pass over a loader; batches as nested structures of NumPy arrays.

    Threads may share it: each batch comes once.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader  # keeps the pool alive
        self._book = loader._book
        self._turn = threading.RLock()
        self._reading = Reading()
        self._pass = Pass(self._book, self._reading)
        self._consumed = 0  # batches of the plan: those left out, too
        self._batches: Iterator[tuple[int, Sequence[Any]]] = iter(())
        self._left = 0  # of these batches
        self._batch_bytes: int | None = None
        self._pack: Callable[[Sequence[Any]], Any] = _unpacked
        self._skips = loader.config.on_error.action == "skip"
        self._has_hooks = self._book.has_hooks
        self._must_tell = self._has_hooks  # the pass of each batch

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        with self._turn:
            return self._next()

    def _next(self) -> Any:
        while True:
            for rows, parts in self._batches:
                self._left -= 1
                if not self._left:  # else the last batch's slot would be lent until the next one is asked for
                    self._batches = iter(())
                self._consumed += 1
                if self._must_tell:
                    self._pass.hand_over()
                if not rows and self._skips:
                    assert self._pass.log is not None
                    self._pass.log.omitted.append(self._consumed - 1)
                else:
                    nbytes = self._batch_bytes
                    self._book.tally.hand_over(1, rows, data_bytes(parts) if nbytes is None else nbytes)
                    return self._pack(parts)
            self._batches = iter(())
            delivery = self._next_delivery()
            self._book.tally.tick(delivery)
            self._batches, self._left = delivery.batches(), delivery.count
            self._batch_bytes = delivery.batch_bytes
            self._must_tell = self._has_hooks or bool(delivery.row_failures)
            if self._pack is _unpacked:
                self._pack = delivery.form.spec.structure.pack

    def _next_delivery(self) -> Delivery:
        book = self._book
        if self._pass.log is None:
            book.latest, book.latest_is_dataset = self._reading, False
            book.live[id(self)] = weakref.ref(self)
        try:
            return self._pass.next_delivery()
        except BaseException:
            book.live.pop(id(self), None)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands: `Loader.load_state_dict` goes on behind the last batch that this iterator has given.

        Raises:
            StateError: the loader's data changes between epochs, by hooks of the user's.
        """
        return self._loader._state_at(self.position)

    @property
    def position(self) -> Position:
        """Where this pass stands."""
        return (self._pass.log or self._book.next_log()).position(self._consumed)

    @property
    def epoch(self) -> int:
        """The epoch of this pass, or -1 before its first batch."""
        return self._pass.epoch

    def close(self) -> None:
        """End the pass; the next one starts anew."""
        self._book.live.pop(id(self), None)
        self._batches = iter(())
        self._pass.close()
        self._book.settle_ends()

    def __del__(self) -> None:
        if hasattr(self, "_pass"):
            self._book.live.pop(id(self), None)
            self._pass.close()


def _unpacked(parts: Sequence[Any]) -> Any:
    raise AssertionError("no delivery yet")
