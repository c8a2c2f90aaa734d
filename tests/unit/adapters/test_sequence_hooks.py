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
        self.fails = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.order[index : index + 1]

    def on_epoch_end(self) -> None:
        self.order[:] = self.order[::-1].copy()
        self.number += 1
        if self.fails:
            raise KeyError("hook")


def values(changes: dict[str, Any]) -> dict[str, Any]:
    """The new values by attribute."""
    return {name: changes[key] for name, key in changes["set"].items()}


def test_changes_are_told_once() -> None:
    hooks = SequenceHooks(Shuffling())
    assert hooks.call("on_epoch_begin") is None
    changes = hooks.call("on_epoch_end")
    assert changes is not None and sorted(changes["set"]) == ["number", "order"]
    hooks.told()
    assert hooks.call("on_epoch_begin") is None


def test_each_time_all_that_was_ever_changed_is_told() -> None:
    sequence = Shuffling()
    hooks = SequenceHooks(sequence)
    hooks.call("on_epoch_end")
    hooks.told()
    sequence.label = "new"  # type: ignore[attr-defined]
    changes = hooks.call("on_epoch_end")
    assert changes is not None and sorted(changes["set"]) == ["label", "number", "order"]
    hooks.told()
    del sequence.label  # type: ignore[attr-defined]
    changes = hooks.call("on_epoch_end")
    assert changes is not None and sorted(changes["set"]) == ["number", "order"] and changes["deleted"] == ["label"]


def test_changes_that_were_not_sent_are_told_before_the_next_epoch_and_with_later_ones() -> None:
    sequence = Shuffling()
    hooks = SequenceHooks(sequence)
    assert hooks.call("on_epoch_end") is not None
    again = hooks.call("on_epoch_begin")
    assert again is not None and sorted(again["set"]) == ["number", "order"]
    sequence.order[:] = range(4)  # as the workers have it still
    del sequence.fails
    changes = hooks.call("on_epoch_begin")
    assert changes is not None and values(changes)["number"] == 1 and changes["deleted"] == ["fails"]
    assert values(changes)["order"].tolist() == [0, 1, 2, 3]


def test_what_a_hook_changed_before_it_failed_is_told_before_the_next_epoch() -> None:
    sequence = Shuffling()
    hooks = SequenceHooks(sequence)
    sequence.fails = True
    with pytest.raises(KeyError):
        hooks.call("on_epoch_end")
    changes = hooks.call("on_epoch_begin")
    assert changes is not None and values(changes)["number"] == 1


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
            self.sent.append(values(changes)["number"])

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
