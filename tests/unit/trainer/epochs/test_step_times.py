"""What is summed up from one hand-over to the next."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from loaderpool.trainer.epochs.counters import StepTimes
from loaderpool.trainer.explain.observed import Counts

MS = 1_000_000


def counted(steps: int, ms: int, waited: int, ready: int, ready_ms: int, epochs: int, edges: int, start: int) -> Counts:
    """What is counted of so many steps; the time of epochs' beginnings is not in these."""
    return Counts(
        steps=steps,
        seconds=(ms + edges) / 1e3,
        wait_s=(waited + edges) / 1e3,
        ready_steps=ready,
        ready_steps_s=ready_ms / 1e3,
        epochs=epochs,
        epoch_starts_s=edges / 1e3,
        start_s=start / 1e3,
    )


class Consumer:
    """Takes batches at times that a test says."""

    def __init__(self, makes_here: bool = False) -> None:
        self.times, self.now_ns = StepTimes(makes_here), 1

    def take(self, worked_ms: int, waited_ms: int, batches: int = 1, is_first: bool = False) -> None:
        self.now_ns += worked_ms * MS
        self.times.ask(self.now_ns)
        self.now_ns += waited_ms * MS
        if is_first:
            self.times.begin_pass()
        self.times.note(self.now_ns, waited_ms * MS, batches)

    @property
    def counts(self) -> Counts:
        return Counts(**self.times.sums(self.now_ns))  # type: ignore[arg-type]


def test_steps_waits_and_the_steps_that_found_data_ready() -> None:
    consumer = Consumer()
    consumer.take(0, 500, is_first=True)
    consumer.take(100, 50)
    consumer.take(100, 1)  # looking for a batch that is there takes a moment
    consumer.take(100, 0)
    assert consumer.counts == counted(3, 351, 51, 2, 201, 0, 0, 500)


def test_what_is_done_between_passes_is_in_no_step() -> None:
    consumer = Consumer()
    consumer.take(0, 500, is_first=True)
    consumer.take(100, 0)
    consumer.take(60_000, 70, is_first=True)
    consumer.take(100, 0)
    assert consumer.counts == counted(2, 200, 0, 2, 200, 1, 70, 500)


def test_batches_that_came_together_are_steps_of_their_own() -> None:
    consumer = Consumer()
    consumer.take(0, 10, batches=8, is_first=True)
    consumer.take(80, 0, batches=8)
    consumer.take(80, 20, batches=2)
    assert consumer.counts == counted(16, 180, 20, 8, 80, 0, 0, 10)


def test_where_batches_are_made_here_making_is_waiting() -> None:
    consumer = Consumer(makes_here=True)
    consumer.take(0, 10, is_first=True)
    consumer.now_ns += 30 * MS
    consumer.times.ask(consumer.now_ns)
    consumer.now_ns += 90 * MS
    consumer.times.note(consumer.now_ns, 0, 1)
    assert (consumer.counts.seconds, consumer.counts.wait_s, consumer.counts.ready_steps) == (0.12, 0.09, 0)


def test_a_wait_that_lasts_counts_so_far() -> None:
    consumer = Consumer()
    consumer.take(0, 10, is_first=True)
    consumer.now_ns += 40 * MS
    consumer.times.ask(consumer.now_ns)
    consumer.now_ns += 3_000 * MS
    assert consumer.counts.wait_s == 3.0
    consumer.times.ask(0)  # it was in vain
    assert consumer.counts.wait_s == 0


def test_marks_come_at_hand_overs_and_two_seconds_apart() -> None:
    consumer, marks = Consumer(), list[int]()
    consumer.times.on_mark = marks.append
    consumer.take(0, 10, is_first=True)
    for _ in range(100):
        consumer.take(50, 0)
    assert [later - mark for mark, later in itertools.pairwise(marks[:4])] == [50 * MS] * 3  # steps that may compile
    assert len(marks) == 6
    assert all(2_000 * MS <= later - mark <= 2_100 * MS for mark, later in itertools.pairwise(marks[3:]))


@pytest.mark.parametrize("name", ["recorder", "on_mark"])
def test_a_close_on_another_thread_ends_no_step(name: str) -> None:
    """It takes down what is told of a hand-over, also between the look whether that is there and its use."""

    class Listener:
        note = __call__ = staticmethod(lambda *args: None)

    class ClosedMeanwhile(StepTimes):
        found: Any = None

        def __getattribute__(self, attribute: str) -> Any:
            if attribute != name:
                return super().__getattribute__(attribute)
            found, self.found = self.found, None
            return found

    times = ClosedMeanwhile(makes_here=False)
    times.found = Listener()
    times.ask(1)
    times.found = Listener()
    times.note(2 * MS, 0, 1, (0,) * 9)
