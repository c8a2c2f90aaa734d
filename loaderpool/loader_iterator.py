"""`LoaderIterator`: the batches of one pass, as a loader's user gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loaderpool.passes import Pass

if TYPE_CHECKING:
    from loaderpool.loader import Loader

__all__ = ["LoaderIterator"]


class LoaderIterator(Iterator[Any]):
    """One pass over a loader; batches as nested structures of NumPy arrays."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader  # keeps the pool alive
        self._book = loader._book
        self._pass = Pass(self._book)
        self._batches: Iterator[tuple[int, list[Any]]] = iter(())
        self._left = 0  # of these batches
        self._pack: Callable[[list[Any]], Any] = _unpacked
        self._skips = loader.config.on_error.action == "skip"
        self._has_hooks = self._book.has_hooks
        self._must_tell = self._has_hooks  # the pass of each batch

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        while True:
            for rows, parts in self._batches:
                self._left -= 1
                if not self._left:  # else the last batch's slot would be lent until the next one is asked for
                    self._batches = iter(())
                if self._must_tell:
                    self._pass.hand_over()
                if rows or not self._skips:
                    tally = self._book.tally
                    tally.batches += 1
                    tally.samples += rows
                    return self._pack(parts)
            self._batches = iter(())
            delivery = self._pass.next_delivery()
            self._book.tally.tick(delivery)
            self._batches, self._left = delivery.batches(), delivery.count
            self._must_tell = self._has_hooks or bool(delivery.row_failures)
            if self._pack is _unpacked:
                self._pack = delivery.form.spec.structure.pack

    @property
    def epoch(self) -> int:
        """The epoch of this pass, or -1 before its first batch."""
        return self._pass.epoch

    def close(self) -> None:
        """End the pass; the next one starts anew."""
        self._batches = iter(())
        self._pass.close()
        self._book.settle_ends()

    def __del__(self) -> None:
        if hasattr(self, "_pass"):
            self._pass.close()


def _unpacked(parts: list[Any]) -> Any:
    raise AssertionError("no delivery yet")
