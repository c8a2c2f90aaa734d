"""Private copies of batches for forks of the main process.

A lent batch is in memory that the main process shares with the workers. Without this module, a
forked child would share the memory as well. Workers would overwrite the child's batch once the main
process releases it, and writes of the child would change the batch of the main process. So the main
process copies all lent batches before a fork. The child then replaces the shared memory by these
copies, at the same addresses.

A fork without lent batches takes no extra time (docs/internals/memory.md, "Forks of the trainer").
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy.typing as npt

from loaderpool.system import machine


class Lender(Protocol):
    """Owner of memory whose arrays are lent to the program."""

    def arrays(self) -> Iterable[npt.NDArray[Any]]:
        """Return the arrays that are lent now; each starts at a page boundary."""

    def disown(self) -> None:
        """Leave the arrays to the child of a fork, so that they are never released there."""


_lenders: weakref.WeakSet[Lender] = weakref.WeakSet()
# Lent arrays and copies of their bytes, by the forking thread's ident and then by address. The
# arrays are kept so that they stay lent until the fork is over.
_copies: dict[int, dict[int, tuple[npt.NDArray[Any], bytes]]] = {}


def guard(lender: Lender) -> None:
    """Register a lender: each later fork of this process gets private copies of its lent arrays."""
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
    _copies.clear()  # copies of other threads, which do not exist in the child
    for lender in list(_lenders):
        for array in lender.arrays():
            # An array has no copy if another thread got it after `_before` ran.
            _, content = copies.get(array.ctypes.data) or (array, array.tobytes())
            machine.make_private(array.ctypes.data, content)
        lender.disown()
