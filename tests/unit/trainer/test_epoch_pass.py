"""Passes take epochs and runs: which of them count, which run goes on, and what is made ahead; no process."""

from __future__ import annotations

from typing import Any

import pytest

import loaderpool as lp
from loaderpool.errors import LoaderpoolError, MemoryLimitError
from loaderpool.memory.layout import BatchCounts
from loaderpool.plan.order import Plan, Position
from loaderpool.trainer.epoch_tracker import EpochTracker, IterationLog
from loaderpool.trainer.loader_iterator import Pass


class FakeForm:
    max_chunk = 1
    may_be_padded = False


class FakeDelivery:
    count, rows, nbytes = 1, 2, 16
    row_failures = ()
    waited_ns = 0
    origin = None
    form = FakeForm

    def counts(self) -> list[BatchCounts]:
        return [BatchCounts(2, 0, 0)]


class FakeRun:
    def __init__(self, engine: FakeEngine, first_epoch: int, limit: int) -> None:
        self.engine, self.first_epoch, self.limit = engine, first_epoch, limit
        self.taken = 0
        self.is_over = self.is_at_end = False

    def take(self) -> Any:
        if self.engine.error is not None:
            raise self.engine.error
        assert self.taken < self.limit and not self.is_over
        self.taken += 1
        return FakeDelivery()

    def extend(self, limit: int) -> None:
        self.limit = limit

    def end(self) -> None:
        self.is_over = True


class FakeEngine:
    """Delivers 3 batches an epoch at once."""

    def __init__(self) -> None:
        self.runs: list[FakeRun] = []
        self.error: BaseException | None = None

    def form(self) -> Any:
        return FakeForm()

    def read_ahead(self) -> int:
        return 0

    def begin(self, place: Position, limit: int) -> Any:
        self.runs.append(FakeRun(self, place.epoch, limit))
        return self.runs[-1]

    def close(self) -> None: ...


@pytest.fixture
def passes() -> tuple[FakeEngine, EpochTracker]:
    engine = FakeEngine()
    config = lp.Loader(range(6), batch_size=2, workers=0).config
    return engine, EpochTracker(lambda: engine, config, Plan(6, 2), None)


def finish(one_pass: Pass) -> int:
    """How many deliveries were left in it."""
    count = 0
    while True:
        try:
            one_pass.next_delivery()
        except StopIteration:
            return count
        count += 1


def test_passes_one_after_the_other_go_on_with_one_run(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    for epoch in range(4):
        one_pass = Pass(book, IterationLog())
        assert finish(one_pass) == 3 and one_pass.epoch == epoch
        assert finish(one_pass) == 0
    assert len(engine.runs) == 1 and engine.runs[0].taken == 12 and book.counters.passes == 4


def test_a_pass_that_was_left_early_counts_and_its_run_ends(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    left = Pass(book, IterationLog())
    left.next_delivery()
    left.close()
    left.close()
    assert engine.runs[0].is_over and book.epoch == 1
    again = Pass(book, IterationLog())
    assert finish(again) == 3 and again.epoch == 1 and len(engine.runs) == 2


def test_a_pass_that_could_not_begin_does_not_count(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes

    def refuse(*_: int) -> None:
        raise MemoryLimitError("no slot")

    with monkeypatch.context() as refusing:
        refusing.setattr(engine, "begin", refuse)
        with pytest.raises(MemoryLimitError):
            Pass(book, IterationLog()).next_delivery()
    assert book.epoch == 0
    finish(Pass(book, IterationLog()))
    with monkeypatch.context() as refusing:
        refusing.setattr(engine.runs[0], "extend", refuse)
        with pytest.raises(MemoryLimitError):
            Pass(book, IterationLog()).next_delivery()
    assert book.epoch == 1 and engine.runs[0].is_over
    after = Pass(book, IterationLog())
    assert finish(after) == 3 and after.epoch == 1


def test_of_a_pass_that_may_be_the_only_one_a_part_is_made_ahead_and_else_an_epoch(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = passes
    monkeypatch.setattr(engine, "read_ahead", lambda: 2)
    left = Pass(book, IterationLog())
    left.next_delivery()
    left.close()
    only = Pass(book, IterationLog())  # after one that was left, which says nothing
    assert finish(only) == 3 and engine.runs[1].limit == 3 + 1
    second = Pass(book, IterationLog())
    assert finish(second) == 3 and engine.runs[1].limit == 6 + 3
    last = Pass(book, IterationLog(), is_followed=False)
    assert finish(last) == 3 and engine.runs[1].limit == 9
    assert finish(Pass(book, IterationLog())) == 3 and engine.runs[1].limit == 15
    book.looks_ahead = False
    assert finish(Pass(book, IterationLog())) == 3 and engine.runs[1].limit == 15
    assert len(engine.runs) == 2


def test_of_a_first_pass_that_is_followed_another_epoch_is_made_ahead(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    one_pass = Pass(book, IterationLog(), is_followed=True)
    assert finish(one_pass) == 3 and engine.runs[0].limit == 6
    one_pass.close()  # nothing of its epoch is left to lose
    assert not engine.runs[0].is_over


def test_a_run_that_stops_before_its_epoch_is_over_is_an_error_and_no_short_epoch(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, book = passes
    one_pass = Pass(book, IterationLog())
    one_pass.next_delivery()

    def stop(self: FakeRun) -> None:
        raise StopIteration

    monkeypatch.setattr(FakeRun, "take", stop)
    with pytest.raises(LoaderpoolError, match="Epoch 0 ended after 1 of 3 batches"):
        one_pass.next_delivery()


def test_a_pass_closed_while_it_waits_just_ends(
    passes: tuple[FakeEngine, EpochTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, book = passes
    one_pass = Pass(book, IterationLog())

    def closed_meanwhile(self: FakeRun) -> None:
        one_pass.close()
        raise StopIteration

    monkeypatch.setattr(FakeRun, "take", closed_meanwhile)
    with pytest.raises(StopIteration):
        one_pass.next_delivery()
    assert book.last_error.get() is None


def test_an_epoch_that_is_set_does_not_go_on_with_another_ones_run(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    finish(Pass(book, IterationLog()))
    book.resume_at(Position(5))
    one_pass = Pass(book, IterationLog())
    assert finish(one_pass) == 3 and one_pass.epoch == 5 and book.epoch == 6
    assert [run.is_over for run in engine.runs] == [True, False]
    assert engine.runs[1].first_epoch == 5


def test_the_parked_run_ends_with_the_loader(passes: tuple[FakeEngine, EpochTracker]) -> None:
    engine, book = passes
    finish(Pass(book, IterationLog()))
    assert not engine.runs[0].is_over
    book.drop_parked()
    book.drop_parked()
    assert engine.runs[0].is_over
