"""What is begun is registered together with its undoing, in one step that a Ctrl-C cannot divide.

Processes, loaders and passes end when they are closed, or when their owner is collected. A finalizer alone is no net: a
Ctrl-C that arrives as its first bytecode runs ends it, and what it was to end would stay. So the owner's death is noted
by a call in C, which no Ctrl-C can come between; what follows from it is done at once in Python, and where a Ctrl-C
broke that off, when the next thing is begun or closed.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable
from typing import Any

from loaderpool.system.interrupts import InterruptsHeld, send_again

_registered: dict[int, Undoing] = {}  # by their reference to the owner; keeps each until it is done
_orphans: collections.deque[weakref.ref[Any]] = collections.deque()
_note_death = _orphans.append


class Undoing:
    """Undoes something once: by a call, or when its owner is collected. Not at the interpreter's exit.

    To be made in the block of `InterruptsHeld` in which the thing is begun.

    Args:
        owner: with whose end it is undone.
        undo: never raises; may run in a finalizer, on any thread, and must not refer to the owner.
    """

    __slots__ = ("_follower", "_owner", "_undo")

    def __init__(self, owner: Any, undo: Callable[[], object]) -> None:
        if _orphans:
            undo_orphans()
        self._undo: Callable[[], object] | None = undo
        self._follower: weakref.ref[Any] | None = weakref.ref(owner, _follow)
        died = weakref.ref(owner, _note_death)  # of two references the younger is called first
        self._owner: weakref.ref[Any] | None = died
        _registered[id(died)] = self

    def now(self) -> None:
        """Undo it, unless that was done, and what has lost its owner."""
        with InterruptsHeld():
            self._do()
            _undo_orphans()

    def owner(self) -> Any:
        """The owner with whose end it is undone; None: it was."""
        reference = self._owner
        return None if reference is None else reference()

    def forget(self) -> None:
        """Note that nothing is left to undo. A Ctrl-C may come anywhere in it: then it is undone, or forgotten."""
        owner = self._owner
        if owner is not None:
            _registered.pop(id(owner), None)
            self._undo = self._owner = self._follower = None  # no call comes of a reference that is gone

    def _do(self) -> None:
        undo = self._undo
        if undo is not None:
            self.forget()
            undo()


def undo_orphans() -> None:
    """Undo what has lost its owner, where a Ctrl-C kept that from being done at once."""
    if _orphans:
        with InterruptsHeld():
            _undo_orphans()


def _undo_orphans() -> None:
    while _orphans:
        try:
            orphan = _orphans.popleft()
        except IndexError:  # another thread took it
            return
        undoing = _registered.get(id(orphan))
        if undoing is not None:
            undoing._do()


def _follow(_: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    try:
        if is_finalizing():  # modules may be gone already
            return
        with InterruptsHeld(then="send"):
            _undo_orphans()
    except KeyboardInterrupt:  # before the block was entered
        send_again()
