"""Long lists of Python objects, packed item by item on their way to the workers. Runs in: the trainer.

What is packed here is the source, or a column of it: the loader alone reads it. What a function captures it may change,
compare by identity, or pass on as the list that it is; `captured` finds out.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loaderpool.sources.columns import Columns
from loaderpool.sources.packed import PackedItems, same
from loaderpool.sources.recognise import Sized
from loaderpool.transport.payload.item_pickler import ItemFailedError, NotPackableError, Packer

# Fewer items, or fewer bytes of them, stay as they are. An item that is packed takes 1 to 2 us longer to read; one that
# is not takes three to six times its pickle in every worker that reads it. Smaller: tiny functions over short lists
# are slowed down for memory that does not matter. Larger: each worker has that much more of its own.
LEAST_ITEMS = 1000
_LEAST_BYTES = 1 << 20
# Items are first tried: as many of them, evenly spread. Smaller: items that hold one large thing together are found
# out later, or not at all; larger: a longer start of lists that stay as they are.
_TRIED = 64
# Items that take more than so many times the place alone that they take beside others hold large things together,
# which packing would repeat in each. Dicts with the same keys come to 1.5 to 3.
_MOST_REPEATED = 4
# Items no larger than this are packed whatever they repeat: as objects they would take as much.
_SMALL_BYTES = 256
# Items are tried no further than this: some of them may be large.
_MOST_TRIED_BYTES = 16 << 20


class ItemError(Exception):
    """An item cannot be pickled; it never leaves `ship`.

    Attributes:
        place: such as "source → item 17 of the list".
        item: the item.
        reason: what pickling it raised.
    """

    def __init__(self, place: str, item: Any, reason: Exception) -> None:
        super().__init__(place)
        self.place, self.item, self.reason = place, item, reason


class ItemPacking:
    """Packs what of a payload can be packed; of one attempt to pickle it.

    Attributes:
        met: ids of objects, told apart by identity alone, that the rest of the payload holds. Items that hold one of
            them are not packed: they and the function would no longer mean the same object.
        packed: how many items were packed.

    Args:
        out_of_band_bytes: arrays inside items that are at least so large are not put into the items' pickles.
        why_unpicklable: tries to pickle an object; what that raised, or None.
    """

    def __init__(self, out_of_band_bytes: int, why_unpicklable: Callable[[object], Exception | None]) -> None:
        self.met: set[int] = set()
        self.packed = 0
        self._why_unpicklable = why_unpicklable
        self._out_of_band_bytes = out_of_band_bytes

    def prepare(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The payload with stand-ins for what is to be packed, these last: when their turn comes, `met` is complete."""
        prepared = dict(payload)
        if "source" in prepared:
            prepared["source"] = self._stand_in(prepared.pop("source"))
        return prepared

    def _stand_in(self, source: Any) -> Any:
        if isinstance(source, Columns):
            return source.map(lambda column, path: self._of_list(column, f"source{path}"))
        if type(source) is Sized and type(source.items) in (collections.deque, collections.UserList):
            return self._of_list(list(source.items)[: len(source)], "source")
        return self._of_list(source, "source")

    def _of_list(self, items: Any, place: str) -> Any:
        is_object_array = type(items) is np.ndarray and items.dtype == object and items.ndim == 1
        if (type(items) not in (list, tuple) and not is_object_array) or len(items) < LEAST_ITEMS:
            return items
        return _ItemsStandIn(self, items, place)

    def pack(self, items: Sequence[Any], place: str) -> PackedItems | None:
        """Return the items, packed; None where they had better travel as they are.

        Raises:
            ItemError: one of them cannot be pickled.
        """
        try:
            if not self.is_worth_it(items):
                return None
            packed = Packer(self.met, self._out_of_band_bytes).pack(items)
        except NotPackableError:
            return None
        except ItemFailedError as failed:
            item, reason = items[failed.index], self._why_unpicklable(items[failed.index])
            if reason is None:  # only in this way
                return None
            kind = "array" if isinstance(items, np.ndarray) else type(items).__name__
            raise ItemError(f"{place} → item {failed.index} of the {kind}", item, reason) from failed
        self.packed += len(packed)
        return packed

    def pack_plain(self, items: Sequence[Any]) -> PackedItems | None:
        """Return the items that are known to be plain data, packed; None where they cannot be pickled."""
        try:
            return Packer(set(), self._out_of_band_bytes).pack(items)
        except (NotPackableError, ItemFailedError):  # nested too deeply: what pickles the whole says so
            return None

    def estimate(self, items: Sequence[Any]) -> int:
        """Return about how many bytes the items' pickles take; 0 where they cannot be pickled one by one."""
        try:
            return self._tried(items)[2]
        except (NotPackableError, ItemFailedError):
            return 0

    def is_worth_it(self, items: Sequence[Any]) -> bool:
        """Whether items are many bytes, of which they hold few together; found by trying some."""
        sum_alone, sum_together, nbytes, tried = self._tried(items)
        return nbytes >= _LEAST_BYTES and sum_alone <= max(_MOST_REPEATED * sum_together, _SMALL_BYTES * tried)

    def _tried(self, items: Sequence[Any]) -> tuple[int, int, int, int]:
        """Bytes of some items alone, and beside each other; about how many all take alone; and how many were tried."""
        alone, together = (Packer(self.met, self._out_of_band_bytes) for _ in range(2))
        sum_alone = sum_together = tried = 0
        count = min(len(items), _TRIED)
        for at in range(0, len(items), len(items) // count):
            mine, ours = alone.add(items[at], at), together.add(items[at], at, forget=False)
            tried += 1
            if tried > 1:  # in the first, all is new
                sum_alone, sum_together = sum_alone + mine, sum_together + ours
            if alone.nbytes > _MOST_TRIED_BYTES and tried > 1:
                break
        return sum_alone, sum_together, alone.nbytes * len(items) // tried, tried


class _ItemsStandIn:
    """Stands for items in a payload until its pickling arrives here."""

    def __init__(self, packing: ItemPacking, items: Sequence[Any], place: str) -> None:
        self._packing, self._items, self._place = packing, items, place

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        packed = self._packing.pack(self._items, self._place)
        return (same, (self._items,)) if packed is None else packed.__reduce__()
