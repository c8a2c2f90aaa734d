"""`EpochHooks`: the user's hooks between the epochs of one loader, each called in its turn."""

from __future__ import annotations

import threading
from typing import Protocol

from loaderpool.system.interrupts import InterruptsAllowed


class UserHooks(Protocol):
    """Hooks of a Keras sequence, as `adapters.sequence_hooks.SequenceHooks` has them."""

    has_run: bool  # one has run since the workers got the sequence as it is

    def call(self, name: str) -> None:
        """Call the hook of this name, and keep its changes for the workers.

        Raises:
            BaseException: The hook raised.
        """

    def anew(self) -> UserHooks:
        """Return the hooks of a copy of the loader, none of which has run."""


class EpochHooks:
    """Calls `on_epoch_begin` and `on_epoch_end` of a Keras sequence.

    Each epoch that was delivered whole owes one call of `on_epoch_end`, which is made before the next epoch starts.

    Attributes:
        hooks: The user's hooks; None: there are none.
        turn: Held while a hook runs, and while the user's objects are compared with those of the workers. A pass may
            start on one thread while another one, such as the prefetch of `tf.data`, still runs the hook of the epoch
            before. Its batches must not be made of objects that this hook is about to change.
    """

    def __init__(self, hooks: UserHooks | None) -> None:
        self.hooks = hooks
        self.turn = threading.RLock()  # reentrant, because a signal's handler may start a pass
        self._ends_owed = 0

    def __bool__(self) -> bool:
        return self.hooks is not None

    def start_epoch(self) -> None:
        """Call the hooks that are due before an epoch. Called in `turn`."""
        if self.hooks is not None:
            self.settle_ends()
            with InterruptsAllowed():
                self.hooks.call("on_epoch_begin")

    @property
    def have_run(self) -> bool:
        """True if a hook has run since `note_refreshed`."""
        return self.hooks is not None and self.hooks.has_run

    def note_refreshed(self) -> None:
        """Note that the workers get the objects as the hooks have left them. Called in `turn`."""
        if self.hooks is not None:
            self.hooks.has_run = False

    def owe_end(self) -> None:
        """Note that an epoch was delivered whole."""
        with self.turn:
            self._ends_owed += 1

    def settle_ends(self) -> None:
        """Call `on_epoch_end` for each epoch that owes it. Blocks while another thread runs a hook."""
        if self.hooks is None:
            return
        with self.turn:
            while self._ends_owed:
                with InterruptsAllowed():
                    self._ends_owed -= 1  # here: handlers that were held run first
                    self.hooks.call("on_epoch_end")
