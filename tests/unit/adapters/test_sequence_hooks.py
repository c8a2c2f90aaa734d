"""Calls of a Sequence's hooks, and how long their changes have to be compared, without processes
and Keras.
"""

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
from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers
from loaderpool.trainer.epoch_tracker import EpochTracker


class Shuffling:
    """Changes its order in place."""

    def __init__(self) -> None:
        self.order = np.arange(4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.order[index : index + 1]

    def on_epoch_end(self) -> None:
        self.order[:] = self.order[::-1].copy()


def book_of(engine: Any) -> EpochTracker:
    return EpochTracker(
        lambda: engine,
        lp.Loader(range(4), workers=0).config,
        Plan(Order(4), None),
        SequenceHooks(Shuffling()),
        None,
    )


def test_an_epochs_end_is_still_due_after_a_handler_that_raised_before_it() -> None:
    def raise_(*_: object) -> None:
        raise TimeoutError

    book = book_of(SimpleNamespace())
    book.hooks.owe_end()
    before = signal.signal(signal.SIGALRM, raise_)
    gate_handlers()
    try:
        with pytest.raises(TimeoutError), InterruptsHeld():
            os.kill(os.getpid(), signal.SIGALRM)
            book.hooks.settle_ends()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert book.hooks._ends_owed == 1


def test_a_pass_compares_whole_until_that_went_well() -> None:
    class Engine:
        """An engine whose comparison fails once."""

        known_form = None

        def __init__(self) -> None:
            self.compared = list[bool]()

        def refresh(self, is_whole: bool) -> None:
            self.compared.append(is_whole)
            if len(self.compared) == 2:
                raise MemoryLimitError("no room")

        def form(self) -> None: ...

        def begin(self, place: Any, limit: int, plan: Plan) -> Any:
            return SimpleNamespace(end=lambda: None)

    engine = Engine()
    book = book_of(engine)
    book.open_run()
    book.hooks.owe_end()
    with pytest.raises(MemoryLimitError):
        book.open_run()
    for _ in range(2):
        book.open_run()
    assert engine.compared == [False, True, True, False]
