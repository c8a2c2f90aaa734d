"""`EpochHooks`: calls the user's hooks between the epochs of one loader. In the main process."""

from __future__ import annotations

import threading
from typing import Protocol

from loaderpool.system.interrupts import InterruptsAllowed


class UserHooks(Protocol):
    """Hooks of a Keras sequence; see `adapters.sequence_hooks.SequenceHooks`.

    Attributes:
        has_run: True if a hook has run since the workers got the sequence.
    """

    has_run: bool

    def call(self, name: str) -> None:
        """Call the hook with this name, and record its changes for the workers.

        Raises:
            BaseException: The hook has raised this error.
        """

    def anew(self) -> UserHooks:
        """Return the hooks of a copy of the loader. None of them has run."""


class EpochHooks:
    """Calls `on_epoch_begin` and `on_epoch_end` of a Keras sequence.

    After each epoch that was delivered whole, `on_epoch_end` is due. It is called before the next
    epoch starts.

    Attributes:
        hooks: The user's hooks; None: there are none.
        turn: Held while a hook runs, and while the user's objects are compared with those of the
            workers. A pass may start on one thread while another thread, such as the prefetch of
            `tf.data`, still runs the hook of the previous epoch. The pass's batches must not be
            made of objects that this hook is about to change.
    """

    def __init__(self, hooks: UserHooks | None) -> None:
        self.hooks = hooks
        self.turn = threading.RLock()  # reentrant, because a signal's handler may start a pass
        self._ends_owed = 0  # number of `on_epoch_end` calls that are due

    def __bool__(self) -> bool:
        return self.hooks is not None

    def start_epoch(self) -> None:
        """Call the hooks that are due before an epoch. The caller holds `turn`."""
        if self.hooks is not None:
            self.settle_ends()
            with InterruptsAllowed():
                self.hooks.call("on_epoch_begin")

    @property
    def have_run(self) -> bool:
        """True if a hook has run since `note_refreshed`."""
        return self.hooks is not None and self.hooks.has_run

    def note_refreshed(self) -> None:
        """Note that workers get the objects as changed by the hooks. The caller holds `turn`."""
        if self.hooks is not None:
            self.hooks.has_run = False

    def owe_end(self) -> None:
        """Note that an epoch was delivered whole, so that `on_epoch_end` is due."""
        with self.turn:
            self._ends_owed += 1

    def settle_ends(self) -> None:
        """Make all due calls of `on_epoch_end`. Blocks while another thread runs a hook."""
        if self.hooks is None:
            return
        with self.turn:
            while self._ends_owed:
                with InterruptsAllowed():
                    # In this block, because handlers of recorded signals run first, and may raise.
                    self._ends_owed -= 1
                    self.hooks.call("on_epoch_end")
