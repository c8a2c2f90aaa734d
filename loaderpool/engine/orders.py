"""`StoredOrders`: arrays of drawn orders in the arena, where the workers read them.

Each pass stores its order once, and its messages and tickets refer to it by offset. The latest
order stays for the next pass, which may have the same arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from loaderpool.memory.arena import Arena
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import has_same_arrays, order_bytes, write_order


class StoredOrder:
    """The drawn order of an epoch in an arena.

    Attributes:
        offset: First byte of its arrays.

    Args:
        arena: The arena.
        nbytes: Size of the arrays.
        write: Writes the arrays, from an offset on.

    Raises:
        MemoryLimitError: There is too little shared memory.
    """

    def __init__(self, arena: Arena, nbytes: int, write: Callable[[int], object]) -> None:
        self._arena, self._extent = arena, arena.take(nbytes, "the order of an epoch")
        self.offset = self._extent.offset
        write(self.offset)

    def free(self) -> None:
        """Release the memory, because no process reads it any more."""
        self._arena.give_back(self._extent)


class StoredOrders:
    """Orders of one loader in the arena. Called under the pool's lock.

    Args:
        arena: Arena of the pool.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stored: list[tuple[Plan, StoredOrder]] = []

    @property
    def latest_offset(self) -> int:
        """Offset of the order that was stored last; 0: there is none."""
        return self._stored[-1][1].offset if self._stored else 0

    def store(self, plan: Plan) -> StoredOrder | None:
        """Return the order of a plan in the arena, or None if it is not drawn.

        Raises:
            MemoryLimitError: There is too little shared memory.
        """
        if not plan.order.is_drawn:
            return None
        for earlier, stored in self._stored:
            if has_same_arrays(earlier, plan):
                return stored
        write = functools.partial(write_order, plan, self._arena.write)
        stored = StoredOrder(self._arena, order_bytes(plan), write)
        self._stored.append((plan, stored))
        return stored

    def free(self, in_use: Collection[int]) -> None:
        """Release all orders but the latest one, and those with these ids, which runs use."""
        for pair in self._stored[:-1]:
            if id(pair[1]) not in in_use:
                self._stored.remove(pair)
                pair[1].free()

    def free_all(self) -> None:
        """Release all orders. Called when no worker is left."""
        while self._stored:
            self._stored.pop()[1].free()
