"""A fork of the trainer: the batches that it inherits become its own before the trainer goes on.

A lent batch lies in memory that trainer and workers share, and so would a forked child of the trainer: once the trainer
lets go of the batch, workers write the next one over it, and what the child writes is the trainer's. So the child
copies what is lent into memory of its own, at the same addresses, as its first step, and the trainer waits for that:

    trainer   nothing returns ── fork ── waits for the child's byte ── what has died meanwhile returns
    child                          └─ copies, piece by piece, in place ─▶ its byte

Where nothing is lent, a fork takes as long as ever (docs/internals/memory.md, "Forks of the trainer").
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import sys
import threading
import weakref
from typing import Any

from loaderpool.system import interrupts, machine

# For the child's copy, which takes a second for gigabytes. Shorter, and what a machine that swaps still copies is
# overwritten. Longer, and the trainer stands as long where another library's step of the fork hangs before ours.
_MOST_WAIT_MS = 20_000


_lenders: weakref.WeakSet[Any] = weakref.WeakSet()
_waits: dict[int, tuple[int, int]] = {}  # by forking thread: both ends of a pipe


def guard(lender: Any) -> None:
    """Have each fork of this process get what is lent as its own, from now on.

    Args:
        lender: `arrays()` gives what is lent now, as arrays of whole pages; `settle()` returns what has died;
            `disown()` leaves what is lent to a forked child, and returns nothing of it any more.
    """
    _register()
    _lenders.add(lender)


@functools.cache
def _register() -> None:
    machine.at_forks(before=_before, after_in_parent=_in_trainer, after_in_child=_in_child)


def is_waiting() -> bool:
    """Whether a child is copying, so that nothing may return."""
    return bool(_waits)


def _before() -> None:
    if any(lender.arrays() for lender in list(_lenders)):
        _waits[threading.get_ident()] = os.pipe()


def _in_trainer() -> None:
    ends = _waits.get(threading.get_ident())
    if ends is None:
        return
    try:
        with interrupts.LateInterruptsHeld():
            _waits[threading.get_ident()] = ends[0], -1  # first: a fork on another thread closes what is noted here
            os.close(ends[1])  # so that the end of a child that dies is seen, too
            waiter = select.poll()
            waiter.register(ends[0], select.POLLIN)
            waiter.poll(_MOST_WAIT_MS)
            _waits[threading.get_ident()] = -1, -1
            os.close(ends[0])
            del _waits[threading.get_ident()]
            for lender in list(_lenders):
                lender.settle()
    except KeyboardInterrupt:  # Python drops what is raised here
        interrupts.send_again()


def _in_child() -> None:
    ends = _waits.pop(threading.get_ident(), None)
    for others in _waits.values():  # of threads that are not here
        for end in filter(lambda end: end >= 0, others):
            os.close(end)
    _waits.clear()
    try:
        with interrupts.InterruptsHeld():  # a half of it would be the next batch's
            for lender in list(_lenders):
                for array in lender.arrays():
                    machine.make_private(array.__array_interface__["data"][0], array.nbytes)
                lender.disown()
    except OSError as error:  # what is raised here would not end the child, which may never look at them
        sys.stderr.write(f"loaderpool: no memory for the batches inherited by process {os.getpid()}: {error}\n")
    finally:
        if ends is not None:
            with contextlib.suppress(OSError):
                os.write(ends[1], b"\1")
            for end in ends:
                os.close(end)
