"""A fork of the trainer: the batches that it inherits become its own.

A lent batch lies in memory that trainer and workers share, and so would a forked child of the trainer: once the trainer
lets go of the batch, workers write the next one over it, and what the child writes is the trainer's. So the trainer
copies what is lent before the fork, and the child puts the copies in its place, at the same addresses.

Where nothing is lent, a fork takes as long as ever (docs/internals/memory.md, "Forks of the trainer").
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from loaderpool.system import machine

_lenders: weakref.WeakSet[Any] = weakref.WeakSet()
_copies: dict[
    int, dict[int, tuple[Any, bytes]]
] = {}  # by forking thread, then by address; keeps what is lent


def guard(lender: Any) -> None:
    """Have each fork of this process get what is lent as its own, from now on.

    Args:
        lender: `arrays()` gives what is lent now, as arrays that begin with a page; `disown()` leaves what is lent to a
            forked child, and returns nothing of it any more.
    """
    _register()
    _lenders.add(lender)


@functools.cache
def _register() -> None:
    machine.at_forks(before=_before, after_in_parent=_in_trainer, after_in_child=_in_child)


def _before() -> None:
    _copies[threading.get_ident()] = {
        array.ctypes.data: (array, array.tobytes())
        for lender in list(_lenders)
        for array in lender.arrays()
    }


def _in_trainer() -> None:
    _copies.pop(threading.get_ident(), None)


def _in_child() -> None:
    copies = _copies.pop(threading.get_ident(), {})
    _copies.clear()  # of threads that are not here
    for lender in list(_lenders):
        for array in lender.arrays():  # another thread may have got one since the copies were made
            _, content = copies.get(array.ctypes.data) or (array, array.tobytes())
            machine.make_private(array.ctypes.data, content)
        lender.disown()
