"""`StoredOrders`: arrays of drawn orders in the arena, where the workers read them.

Each pass stores its order once, and its messages and tickets refer to it by offset. The latest
order stays for the next pass, which may have the same arrays.
"""

from __future__ import annotations

from collections.abc import Collection

from loaderpool.memory.arena import Arena
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import has_same_arrays, order_bytes, write_order


class StoredOrder:
    """The order of one epoch in the arena.

    Attributes:
        plan: Plan of the epoch.
        offset: First byte of its arrays.

    Raises:
        MemoryLimitError: There is too little shared memory.
    """

    def __init__(self, arena: Arena, plan: Plan) -> None:
        self._arena, self.plan = arena, plan
        self._extent = arena.take(order_bytes(plan), "the order of an epoch")
        self.offset = self._extent.offset
        write_order(plan, arena.map, self.offset)

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
        self._stored: list[StoredOrder] = []

    @property
    def latest_offset(self) -> int:
        """Offset of the order that was stored last; 0: there is none."""
        return self._stored[-1].offset if self._stored else 0

    def store(self, plan: Plan) -> StoredOrder | None:
        """Return the order of a plan in the arena, or None if it is not drawn.

        Raises:
            MemoryLimitError: There is too little shared memory.
        """
        if not plan.order.is_drawn:
            return None
        for stored in self._stored:
            if has_same_arrays(stored.plan, plan):
                return stored
        self._stored.append(StoredOrder(self._arena, plan))
        return self._stored[-1]

    def free(self, in_use: Collection[int]) -> None:
        """Release all orders but the latest one, and those with these ids, which runs use."""
        for stored in self._stored[:-1]:
            if id(stored) not in in_use:
                self._stored.remove(stored)
                stored.free()

    def free_all(self) -> None:
        """Release all orders. Called when no worker is left."""
        while self._stored:
            self._stored.pop().free()
