"""Rounds of a pause test, with a ring and a clock that are made by hand."""

from __future__ import annotations

import pytest

from loaderpool.system import clock
from loaderpool.trainer.epochs.pause_test import PauseTest
from loaderpool.trainer.epochs.step_times import StepTimes

MS = 1_000_000


class Ring:
    """Fills so many slots, in a second."""

    def __init__(self, now: Clock, slots: int) -> None:
        self._now, self._slots = now, slots
        self.is_on, self.fills = False, 0

    def fill(self, most_s: float) -> int:
        self._now.ns += 1000 * MS
        self.fills += 1
        return self._slots

    def begin(self) -> None:
        self.is_on = True

    def end(self) -> None:
        self.is_on = False


class Clock:
    ns = 5000 * MS


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(clock, "monotonic_ns", lambda: found.ns)
    return found


def take(test: PauseTest, times: StepTimes, now: Clock, deliveries: int, step_ms: int = 10, batches: int = 1) -> None:
    for _ in range(deliveries):
        test.before()
        times.ask(now.ns)
        test.after(batches, begins=False)
        times.note(now.ns, 0, batches)
        now.ns += step_ms * MS


def begun(now: Clock, slots: int, steps: int, by_tf_data: bool = False) -> tuple[PauseTest, StepTimes, Ring]:
    times, ring = StepTimes(makes_here=False), Ring(now, slots)
    times.ask(now.ns)
    times.note(now.ns, 0, 1)
    now.ns += 10 * MS
    return PauseTest(ring, times, steps, by_tf_data), times, ring  # type: ignore[arg-type]


def test_a_round_takes_what_the_slots_hold_and_leaves_its_first_steps_out(now: Clock) -> None:
    test, times, ring = begun(now, slots=8, steps=6)
    take(test, times, now, 8)
    assert (test.steps, round(test.seconds, 6)) == (6, 0.06)
    assert (test.is_over, ring.is_on, ring.fills) == (True, False, 1)
    take(test, times, now, 20)
    assert ring.fills == 1
    assert times.counts(now.ns).steps_ns == 28 * 10 * MS  # and not the second that filling took


def test_rounds_go_on_until_there_are_steps_enough(now: Clock) -> None:
    test, times, ring = begun(now, slots=6, steps=10)
    take(test, times, now, 40)
    assert (test.steps, ring.fills) == (12, 3)


def test_there_are_few_rounds(now: Clock) -> None:
    test, times, ring = begun(now, slots=4, steps=1000)
    take(test, times, now, 200)
    assert (test.is_over, ring.fills, test.steps) == (True, 8, 16)


@pytest.mark.parametrize(("slots", "by_tf_data"), [(3, False), (5, True)])
def test_too_few_slots_are_tried_again_and_then_tell_nothing(now: Clock, slots: int, by_tf_data: bool) -> None:
    test, times, ring = begun(now, slots=slots, steps=4, by_tf_data=by_tf_data)
    take(test, times, now, 100)
    assert (test.is_over, test.steps, ring.is_on, ring.fills) == (True, 0, False, 8)


def test_where_more_are_filled_later_it_is_measured_then(now: Clock) -> None:
    test, times, ring = begun(now, slots=3, steps=4)
    take(test, times, now, 4)
    ring._slots = 8
    take(test, times, now, 20)
    assert (test.is_over, test.steps, ring.fills) == (True, 6, 2)


def test_the_first_batches_of_a_pass_go_by(now: Clock) -> None:
    test, times, ring = begun(now, slots=8, steps=1000)
    take(test, times, now, 8)
    test.after(1, begins=True)
    test.before()
    assert ring.fills == 1
    take(test, times, now, 3)
    assert ring.fills == 2


def test_batches_that_came_together_count_each(now: Clock) -> None:
    test, times, _ = begun(now, slots=8, steps=6)
    take(test, times, now, 8, batches=5)
    assert (test.steps, round(test.seconds, 6)) == (30, 0.06)


def test_a_batch_that_was_waited_for_ends_the_round(now: Clock) -> None:
    test, times, ring = begun(now, slots=8, steps=100)
    take(test, times, now, 4)
    ring.is_on = False  # a pass waited
    take(test, times, now, 1)
    assert test.steps == 2
    take(test, times, now, 1)
    assert ring.fills == 2


def test_time_between_passes_is_no_step(now: Clock) -> None:
    test, times, _ = begun(now, slots=8, steps=100)
    take(test, times, now, 4)
    now.ns += 60_000 * MS
    test.before()
    test.after(1, begins=True)
    assert round(test.seconds, 6) == 0.02
