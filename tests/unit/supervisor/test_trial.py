"""Trials of fewer workers, on the supervisor's state with simulated workers and a simulated
clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from loaderpool.memory.board import TrialResult
from loaderpool.supervisor.records import Layout
from loaderpool.supervisor.trial import Trial
from loaderpool.transport.messages import Done, Filled
from tests.support.state import LOADER, RUN, Endless, Pool, begin, check_state, death, look, release

ROWS = 4  # rows of a ticket
Source = Callable[["Course"], float]  # returns the end of a ticket that begins now


class Course:
    """A training that always waits, with a source."""

    def __init__(self, workers: int, source: Source, seed: int = 0) -> None:
        self.pool = Pool(workers).with_a_run()
        self.state, self.source, self.chance = self.pool.state, source, random.Random(seed)
        self.now_s, self.free_s = 0.0, 0.0
        self.places: dict[int, float] = {}  # time at which each connection is free
        self.done_s: dict[int, tuple[int, float]] = {}  # present ticket of each worker, and its end
        self.trial: Trial | None = None
        self.steps = 0
        self.is_taking = True  # True if the main process takes batches
        self.serve(2.0)

    @property
    def busy(self) -> int:
        return len(self.done_s)

    def serve(self, seconds: float) -> None:
        """Let this time pass, or the time until the trial is over."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and (self.trial is None or not self.trial.is_over):
            self.step()

    def step(self) -> None:
        """Let time pass until the next answer, at most 20 ms."""
        for worker, tickets in self.pool.channels.items():
            if tickets and worker not in self.done_s:
                self.done_s[worker] = tickets[0].number, self.source(self)
        worker, (_, done_s) = min(
            self.done_s.items(), key=lambda each: each[1][1], default=(-1, (0, 1e9))
        )
        if done_s > self.now_s + 0.02:
            self.now_s += 0.02
        else:
            self.now_s = max(self.now_s, done_s)
            self.answer(worker)
        self.pool.turn()
        if self.trial is not None and self.trial.look(self.now_s):
            self.pool.turn()
        self.steps += 1
        if not self.steps % 20:
            check_state(self.state)

    def answer(self, worker: int, rows: int = ROWS) -> None:
        del self.done_s[worker]
        ticket = self.pool.channels[worker].pop(0)
        loader = self.state.done(worker, Done(ticket.number, rows, 0.05))
        if self.trial is not None:
            self.trial.note(worker, loader, rows, self.now_s)
        for told in self.pool.of(Filled) if self.is_taking else ():
            release(self.state, told.run, told.offset)
        self.pool.told.clear()

    def die(self, worker: int) -> None:
        self.done_s.pop(worker, None)
        self.pool.die(worker)

    def try_fewer(self, most_s: float = 2.0) -> TrialResult:
        self.begin_trial(most_s).serve(30.0)
        assert self.trial is not None and self.trial.is_over
        assert not any(worker.is_paused for worker in self.state.workers.values())
        assert self.trial.paused_s <= most_s
        return self.trial.result

    def begin_trial(self, most_s: float = 2.0) -> Course:
        self.trial = Trial(self.state, most_s, self.now_s)
        return self

    def until_paused(self) -> Course:
        self.begin_trial()
        while not any(worker.is_paused for worker in self.state.workers.values()):
            self.step()
        return self


def rate(course: Course, per_s: float = 30.0, alone_s: float = 0.01) -> float:
    """Return a source with a server that answers this number of tickets a second."""
    course.free_s = max(course.now_s, course.free_s) + 1 / per_s
    return course.free_s + alone_s


def connections(number: int, seconds: float = 0.05) -> Source:
    def source(course: Course) -> float:
        place = min(range(number), key=lambda each: course.places.get(each, 0.0))
        course.places[place] = max(course.now_s, course.places.get(place, 0.0)) + seconds
        return course.places[place]

    return source


def locked(held_s: float, beside_s: float) -> Source:
    """Return a source with a lock that is held for a part of each ticket."""

    def source(course: Course) -> float:
        course.free_s = max(course.now_s + beside_s, course.free_s) + held_s
        return course.free_s

    return source


def sleeping(course: Course, seconds: float = 0.05) -> float:
    return course.now_s + seconds


def noisy(course: Course) -> float:
    return course.now_s + course.chance.expovariate(1 / 0.04)


def stragglers(course: Course) -> float:
    return course.now_s + (0.5 if course.chance.random() < 0.02 else 0.03)


def on_two_cpus(course: Course) -> float:
    """Source that computes half of the time. It takes longer if more workers compute."""
    return course.now_s + 0.02 + 0.01 * max(1.0, course.busy / 6)


def random_rate(course: Course) -> float:
    """Source with a server whose answers take varied time."""
    course.free_s = max(course.now_s, course.free_s) + course.chance.expovariate(120.0)
    return course.free_s


# sources with a limit, and the sufficient number of workers
LIMITED: dict[str, tuple[Source, int]] = {
    "rate": (rate, 2),
    "three connections": (connections(3), 3),
    "lock": (locked(0.02, 0.03), 3),
}
UNLIMITED = {sleeping: 1, noisy: 4, stragglers: 4, on_two_cpus: 1}  # and how often


@pytest.mark.parametrize("workers", [3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", LIMITED)
def test_fewer_workers_are_enough_for_a_limited_source(name: str, workers: int) -> None:
    source, suffice = LIMITED[name]
    found = Course(workers, source).try_fewer()
    assert found.workers == workers
    assert found.rate > 0
    if suffice <= 0.8 * workers:
        assert found.too_few < suffice <= found.enough <= 0.8 * workers
    else:
        assert found.enough == workers


def test_a_limit_is_found_through_noise_or_nothing_is() -> None:
    found = [Course(4, random_rate, seed).try_fewer() for seed in range(6)]
    assert sum(each.enough <= 2 for each in found) >= 3


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("source", UNLIMITED)
def test_an_unlimited_source_needs_all_workers(source: Source, workers: int) -> None:
    for seed in range(UNLIMITED[source]):
        found = Course(workers, source, seed).try_fewer()
        assert found.enough == workers, found


def test_a_limit_just_below_the_number_of_workers_is_found() -> None:
    found = Course(8, connections(6)).try_fewer()
    assert (found.enough, found.too_few) == (6, 4)


def test_a_number_that_is_slightly_slower_is_not_advised() -> None:
    """One worker alone reaches 0.92 of the rate."""
    found = Course(8, locked(0.023, 0.002)).try_fewer()
    assert (found.enough, found.too_few) == (2, 1)


def test_a_trial_of_an_unlimited_source_pauses_for_less_than_a_second() -> None:
    course = Course(8, sleeping)
    found = course.try_fewer()
    assert found.too_few == 4
    assert 0.3 < found.paused_s < 1.0


def test_nothing_is_found_out_in_a_pause_that_is_too_short() -> None:
    found = Course(8, rate).try_fewer(0.2)
    assert found[:4] == (8, 8, 0, 0.0)


def test_calls_that_are_too_slow_for_a_trial_pause_nothing() -> None:
    found = Course(4, lambda course: course.now_s + 2.0).try_fewer()
    assert found == TrialResult(4, 4)  # a pause of 0.0 s


def test_one_worker_is_not_tried() -> None:
    assert Course(1, sleeping).begin_trial().trial.is_over  # type: ignore[union-attr]


def test_workers_without_work_show_nothing() -> None:
    """Training does not wait, because the slots are full."""
    course = Course(4, sleeping)
    course.state.extend(RUN, course.state.runs[RUN].next + 2, 0)
    assert course.try_fewer() == TrialResult(4, 4)


def test_samples_of_two_loaders_are_not_compared() -> None:
    course = Course(4, rate).until_paused()
    assert course.trial is not None
    course.trial.note(0, LOADER + 1, 4, course.now_s)
    assert course.trial.is_over
    assert course.trial.result.rate == 0


# -- events during a pause. Each ends the trial, and all workers have work again


def dies(course: Course) -> None:
    course.die(next(iter(course.done_s)))


def a_paused_one_dies(course: Course) -> None:
    course.die(next(worker.number for worker in course.state.workers.values() if worker.is_paused))


def has_more_workers(course: Course) -> None:
    course.state.resize(7)


def has_fewer_workers(course: Course) -> None:
    course.state.resize(2)


def loads_another_loader(course: Course) -> None:
    course.state.load(LOADER + 1, Endless())


def begins_generators(course: Course) -> None:
    course.state.loaders[LOADER + 1] = lanes = course.state.loaders[LOADER]
    lanes.plan = Endless(lanes=2)
    begin(course.state, RUN + 1, LOADER + 1, 0)


EVENTS: list[Any] = [
    dies, a_paused_one_dies, has_more_workers, has_fewer_workers, loads_another_loader, begins_generators,
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_ends_a_trial_and_no_worker_stays_paused(event: Callable[[Course], None]) -> None:
    course = Course(4, rate).until_paused()
    event(course)
    course.step()
    assert course.trial is not None and course.trial.is_over
    assert course.trial.result.rate == 0
    assert not any(worker.is_paused for worker in course.state.workers.values())


def test_a_trial_ends_though_the_main_process_has_stopped() -> None:
    course = Course(4, rate).until_paused()
    course.is_taking = False
    course.serve(3.0)
    assert course.trial is not None and course.trial.is_over
    assert not any(worker.is_paused for worker in course.state.workers.values())


def test_the_run_may_end_and_another_begin_during_a_pause() -> None:
    course = Course(4, rate).until_paused()
    course.state.end(RUN, ())
    begin(course.state, RUN + 1, LOADER, 0)
    course.serve(30.0)
    assert course.trial is not None and course.trial.is_over


def test_a_paused_worker_finishes_its_tickets_and_gets_no_new_one() -> None:
    course = Course(4, sleeping).until_paused()
    paused = [worker for worker in course.state.workers.values() if worker.is_paused]
    had = {number for worker in paused for number in worker.jobs}
    assert len(paused) == 2 and had
    while any(worker.is_paused for worker in paused):
        assert {number for worker in paused for number in worker.jobs} <= had
        course.step()
    assert all(worker.jobs for worker in paused)


def test_tickets_of_a_dead_worker_go_to_those_that_are_not_paused() -> None:
    course = Course(3, sleeping)
    course.state.pause(1)
    lost = course.pool.die(
        next(worker.number for worker in course.state.workers.values() if worker.is_paused)
    )
    course.pool.turn()
    given = [ticket.number for tickets in course.pool.channels.values() for ticket in tickets]
    assert {ticket.number for ticket in lost} <= set(given)


def test_nodes_and_generators_are_not_paused() -> None:
    nodes = Pool(3, of_nodes=True)
    nodes.state.pause(1)
    assert not any(worker.is_paused for worker in nodes.state.workers.values())
    lanes = Pool(3)
    lanes.state.load(LOADER, Endless(lanes=2))
    look(lanes.state, LOADER)
    lanes.state.lay_out(LOADER, Layout(4096, 1, False), 0.001)
    begin(lanes.state, RUN, LOADER, 0)
    lanes.state.pause(1)
    assert not any(worker.is_paused for worker in lanes.state.workers.values())
    lanes.state.died(0, 0.0, 0, death())
