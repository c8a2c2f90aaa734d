"""What a Sequence's hooks change is told until it has arrived; no process and no Keras."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.adapters.sequence_hooks import SequenceHooks
from loaderpool.errors import MemoryLimitError
from loaderpool.plan.order import Plan
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers
from loaderpool.trainer.epoch_tracker import EpochTracker


class Shuffling:
    """Changes its order in place, and its number."""

    def __init__(self) -> None:
        self.order = np.arange(4)
        self.number = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.order[index : index + 1]

    def on_epoch_end(self) -> None:
        self.order[:] = self.order[::-1].copy()
        self.number += 1


def test_changes_are_told_once() -> None:
    hooks = SequenceHooks(Shuffling())
    assert hooks.call("on_epoch_begin") is None
    changes = hooks.call("on_epoch_end")
    assert changes is not None and sorted(changes["set"]) == ["number", "order"]
    hooks.told()
    assert hooks.call("on_epoch_begin") is None


def book_of(engine: Any) -> EpochTracker:
    return EpochTracker(
        lambda: engine, lp.Loader(range(4), workers=0).config, Plan(4, None), SequenceHooks(Shuffling())
    )


def test_an_epochs_end_is_still_due_after_a_handler_that_raised_before_it() -> None:
    def raise_(*_: object) -> None:
        raise TimeoutError

    book = book_of(SimpleNamespace(update=lambda changes: None))
    book.owe_end()
    before = signal.signal(signal.SIGALRM, raise_)
    gate_handlers()
    try:
        with pytest.raises(TimeoutError), InterruptsHeld():
            os.kill(os.getpid(), signal.SIGALRM)
            book.settle_ends()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert book._ends_owed == 1


def test_a_pass_sends_what_the_last_one_could_not() -> None:
    class Engine:
        """Takes updates, but for the first."""

        sent: list[Any]

        def update(self, changes: Any) -> None:
            if not self.sent:
                self.sent = [None]
                raise MemoryLimitError("no room")
            self.sent.append(changes[changes["set"]["number"]])

    engine = Engine()
    engine.sent = []
    book = book_of(engine)
    book.owe_end()
    with pytest.raises(MemoryLimitError):
        book.settle_ends()
    assert book.hooks is not None
    for _ in range(2):
        book._tell(book.hooks.call("on_epoch_begin"))
    assert engine.sent == [None, 1]
