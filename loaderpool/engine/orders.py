"""`StoredOrders`: arrays of drawn orders in the arena, where the workers read them.

Each pass stores its order once, and its messages and tickets refer to it by offset. The latest
order stays for the next pass, which may have the same arrays. The table of weights is built in the
arena, so that it is in memory once and needs no copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.errors import foreign_error
from loaderpool.memory.arena import Arena
from loaderpool.plan.batches import Plan
from loaderpool.plan.drawn import HEAD_BYTES, has_same_arrays, order_bytes, parts_of, write_order

if TYPE_CHECKING:
    from loaderpool.engine.pool import WorkerPool

_PURPOSE = "the order of an epoch"


class StoredOrder:
    """The drawn order of an epoch in an arena.

    Attributes:
        offset: First byte of its arrays.

    Args:
        arena: The arena.
        nbytes: Size of the arrays.
        write: Writes the arrays, from an offset on.
        offset: The attribute, if an array of the arena has the order; None: it gets an extent.

    Raises:
        MemoryLimitError: There is too little shared memory.
    """

    def __init__(
        self,
        arena: Arena,
        nbytes: int,
        write: Callable[[int], object],
        offset: int | None = None,
    ) -> None:
        self._arena, self._extent = arena, None
        if offset is None:
            self._extent = arena.take(nbytes, _PURPOSE)
            offset = self._extent.offset
        self.offset = offset
        write(offset)

    def free(self) -> None:
        """Release the extent, because no process reads it any more."""
        if self._extent is not None:
            self._arena.give_back(self._extent)


class StoredOrders:
    """Orders of one loader in the arena. Called under the pool's lock, unless stated otherwise.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool, self._arena = pool, pool.arena
        self._stored: list[tuple[Plan, StoredOrder]] = []

    @property
    def latest_offset(self) -> int:
        """Offset of the order that was stored last; 0: there is none."""
        return self._stored[-1][1].offset if self._stored else 0

    def empty(self, count: int, dtype: Any) -> npt.NDArray[Any]:
        """Return an array for the table of an order. `store` does not copy this table.

        The array is in the arena. If the pool cannot be used, it is in private memory. Called
        without the lock.

        Raises:
            MemoryLimitError: There is too little shared memory.
        """
        if self._pool.is_closed or self._pool.is_foreign:
            return np.empty(count, dtype)
        with self._pool.lock:
            memory = self._arena.array(HEAD_BYTES + 8 * count, _PURPOSE)
        return memory[HEAD_BYTES:].view(dtype)

    def check_fork(self) -> None:
        """Raise an error in a fork of the main process, if it may have read a released table.

        Called without the lock, after a table was read.
        """
        arena = self._arena
        if self._pool.is_foreign and arena.board.reclaimed != arena.reclaimed:
            raise foreign_error(self._pool.owner_pid)

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
        arena, (head, table, *_) = self._arena, parts_of(plan)
        offset = next(
            (at for (at, _), each in arena.arrays.items() if each() is table.base is not None), None
        )
        write = functools.partial(write_order, plan, arena.write)
        if offset is not None:
            write = functools.partial(arena.write, part=head)
        stored = StoredOrder(arena, order_bytes(plan), write, offset)
        self._stored.append((plan, stored))
        return stored

    def free(self, in_use: Collection[int]) -> None:
        """Release all orders but the latest one, and those with these ids, which runs use."""
        for at in reversed(range(len(self._stored) - 1)):
            if id(self._stored[at][1]) not in in_use:
                self._stored.pop(at)[1].free()
        if self._arena.arrays:
            self._arena.reclaim()

    def free_all(self) -> None:
        """Release all orders. Called when no worker is left."""
        while self._stored:
            self._stored.pop()[1].free()
        self._arena.reclaim()
