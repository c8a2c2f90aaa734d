"""Streams for tests, in a module whose import is fast, because each process that reads them imports
it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class Numbers:
    """Numbers that can be read again.

    Args:
        items: number of items.
    """

    def __init__(self, items: int = 101) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.items):
            yield {"index": number, "row": np.full(3, number, np.float32)}


def make(item: Any, rng: np.random.Generator) -> Any:
    """Return a sample of one of the `Numbers`."""
    return item["index"], item["row"] + rng.random(3, np.float32)


class Telling:
    """Yields the pid of the process that reads it, and the number of its passes.

    Args:
        items: number of items.
    """

    def __init__(self, items: int = 20) -> None:
        self.items, self.passes = items, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number in range(self.items):
            yield number, os.getpid(), self.passes


class Rewinding:
    """An iterator whose `__iter__` goes back to the start. Its items have the number of these
    calls.

    Args:
        items: number of items.
    """

    def __init__(self, items: int = 20) -> None:
        self.items, self.passes, self.at = items, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.passes, self.at = self.passes + 1, 0
        return self

    def __next__(self) -> int:
        if self.at == self.items:
            raise StopIteration
        self.at += 1
        return 1000 * self.passes + self.at


def rewinding(shard: int) -> Rewinding:
    """Return a `Rewinding` with some items, as a generator function may."""
    return Rewinding(shard)


class Large(Telling):
    """`Numbers` with a megabyte beside each."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield (*item, np.full(1 << 17, item[0], np.float64))


class Ending(Telling):
    """Ends the process that reads it, before an item, while a file exists.

    Args:
        items: number of items.
        at: number of that item.
        how: as in `end_process`.
        flag: the file.
    """

    def __init__(self, items: int, at: int, how: str, flag: str) -> None:
        super().__init__(items)
        self.at, self.how, self.flag = at, how, flag

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if item[0] == self.at and os.path.exists(self.flag):
                end_process(self.how)
            yield item


class Failing(Numbers):
    """Raises an exception while a file exists.

    Args:
        make_error: makes the exception.
        at: number of the item before which it is raised.
        flag: the file; None: it is always raised.
    """

    def __init__(self, make_error: Callable[[], BaseException], at: int, flag: str = "") -> None:
        super().__init__(40)
        self.make_error, self.at, self.flag = make_error, at, flag

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if item["index"] == self.at and (not self.flag or os.path.exists(self.flag)):
                raise self.make_error()
            yield item["index"]


class Blocking(Telling):
    """Waits forever before an item.

    Args:
        at: number of the item.
        holds_lock: True to hold the interpreter's lock, so that no other thread of the process runs.
    """

    def __init__(self, at: int, holds_lock: bool = False, notes: str = "") -> None:
        super().__init__(10**9)
        self.at, self.holds_lock, self.notes = at, holds_lock, notes

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if item[0] == self.at:
                if self.notes:
                    with open(self.notes, "w") as file:
                        file.write(str(os.getpid()))
                if self.holds_lock:
                    ctypes.PyDLL(None).sleep(600)
                time.sleep(600)
            yield item


def end_process(how: str) -> None:
    """End this process, by a signal, or (a number) with this exit status."""
    import resource
    import signal

    if how.isdigit():
        os._exit(int(how))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[how])
    time.sleep(600)
