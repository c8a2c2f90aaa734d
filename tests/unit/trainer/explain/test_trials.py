"""Trials of fewer workers: when one is due, what it may cost, and its result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from loaderpool.memory.board import TrialResult
from loaderpool.trainer.explain import trials
from loaderpool.trainer.explain.explanation import explain
from loaderpool.trainer.explain.trials import MOST_PAUSED_S, PERIOD_S, TrialLog, log_of
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import Autotuned, Tried, Window
from tests.support.trainings import BLOCKING, COMPUTING, MIXED, idle, slowed

WAITS = BLOCKING.window(8)
RATE = WAITS.samples_per_s
LIMIT = Tried(8, 4, 2, RATE)
CACHED: dict[str, Any] = {"items_to_cache": 10_000, "room_bytes": 4 << 30}


def tried(window: Window = WAITS, of: Tried | None = LIMIT, **changes: Any) -> Window:
    return dataclasses.replace(window, tried=of, **changes)


def log_after(found: TrialResult, at_s: float = 100.0, seen: Window = WAITS) -> TrialLog:
    """Return the log after one trial, which was requested at this time, and has this result."""
    log = TrialLog()
    log.note_request("first", at_s)
    log.note_result("first", found, seen)
    return log


# -- conditions for a trial


@pytest.mark.parametrize(
    "seen",
    [
        COMPUTING.window(4),  # the workers compute
        COMPUTING.window(16),  # data is ready
        BLOCKING.window(1),
        BLOCKING.window(4, lanes=40),
        BLOCKING.window(4, autotuned=Autotuned(32)),
        BLOCKING.window(4, steps=10),
        BLOCKING.in_process(),
        slowed(idle(), 30.0),
        idle(is_stream=True),
    ],
)
def test_no_trial_is_due_where_it_would_change_no_advice(seen: Window) -> None:
    assert not TrialLog().is_due(seen, 100.0)


def test_a_trial_is_due_where_workers_wait_for_a_source() -> None:
    assert TrialLog().is_due(WAITS, 100.0)
    assert TrialLog().is_due(MIXED.window(4), 100.0)


def test_workers_are_paused_for_two_seconds_in_five_minutes_at_most() -> None:
    log, paused_s, now_s = TrialLog(), list[tuple[float, float]](), 0.0
    while now_s < 3 * PERIOD_S:
        if log.is_due(WAITS, now_s):
            most_s = log.note_request(now_s, now_s)
            assert most_s <= MOST_PAUSED_S
            log.note_result(now_s, TrialResult(8, 8, 0, 0.0, min(0.6, most_s)), WAITS)
            paused_s.append((now_s, min(0.6, most_s)))
        now_s += 2.0
    assert len(paused_s) > 5
    for begin_s, _ in paused_s:
        assert (
            sum(each for at_s, each in paused_s if begin_s <= at_s < begin_s + PERIOD_S)
            <= MOST_PAUSED_S
        )


def test_a_trial_that_found_nothing_is_repeated_soon() -> None:
    log = log_after(TrialResult(8, 8, 0, 0.0, 0.0))
    assert log.tried is None
    assert not log.is_due(WAITS, 102.0)
    assert log.is_due(WAITS, 105.0)


@pytest.mark.parametrize(
    "found", [TrialResult(8, 8, 4, RATE, 0.5), TrialResult(8, 4, 2, RATE, 1.5)]
)
def test_what_was_found_is_not_tried_again_for_five_minutes(found: TrialResult) -> None:
    log = log_after(found)
    assert log.tried == Tried(*found[:4])
    seen = tried(of=log.tried)
    assert not log.is_due(seen, 110.0)
    assert log.is_due(seen, 100.0 + PERIOD_S) is (found.enough == 8)


def test_another_rate_or_number_of_workers_is_tried() -> None:
    log = log_after(TrialResult(8, 8, 4, RATE, 0.5))
    assert log.is_due(tried(BLOCKING.window(16), log.tried), 110.0)
    assert log.is_due(
        tried(dataclasses.replace(BLOCKING, sample_blocked_s=99e-3).window(8), log.tried), 110.0
    )


def test_fewer_workers_are_tried_where_the_advice_was_followed() -> None:
    """The first trial was too short to find the fewest."""
    log = log_after(TrialResult(8, 4, 0, RATE, 1.0))
    few = dataclasses.replace(
        BLOCKING.window(4), samples=WAITS.samples, seconds=WAITS.seconds, tried=log.tried
    )
    assert find_verdict(few).verdict is Verdict.SOURCE_LIMIT
    assert log.is_due(few, 100.0 + PERIOD_S)
    assert not log.is_due(tried(of=log.tried), 100.0 + PERIOD_S)


def test_a_trial_whose_supervisor_was_lost_counts_as_a_whole_one() -> None:
    log = log_after(TrialResult())
    assert log.tried is None
    assert not log.is_due(WAITS, 110.0)
    assert log.is_due(WAITS, 100.0 + PERIOD_S)


def test_nothing_is_found_while_cpus_are_full() -> None:
    full = dataclasses.replace(WAITS, queued_s=0.3 * WAITS.busy_s)
    assert log_after(TrialResult(8, 4, 0, RATE, 1.0), seen=full).tried is None


def test_logs_last_by_function_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_logs", {})
    assert not trials.has_logs()
    first = log_of("first")
    assert log_of("first") is first
    assert log_of("second") is not first
    for number in range(100):
        log_of(number)
    assert len(trials._logs) <= 64


# -- results of several trials together


def test_trials_of_one_training_add_up() -> None:
    few = Tried(4, 4, 2, RATE)
    assert Tried(8, 4, 0, RATE).merged(few) == Tried(8, 4, 2, RATE)
    assert Tried(8, 4, 0, RATE).merged(Tried(4, 1, 0, RATE)) == Tried(8, 1, 0, RATE)
    assert Tried(8, 4, 0, RATE).merged(Tried(4, 4, 2, 2 * RATE)) == Tried(
        4, 4, 2, 2 * RATE
    )  # another training
    assert Tried(8, 2, 0, RATE).merged(few) == few  # it contradicts
    assert Tried(8, 8, 4, RATE).merged(Tried(16, 16, 8, 2 * RATE)) == Tried(16, 16, 8, 2 * RATE)


# -- the explanation of a trial


def test_a_limit_is_told_with_the_number_of_workers_that_suffices() -> None:
    found = explain(tried())
    assert found.verdict is Verdict.SOURCE_LIMIT
    assert "In a trial, 4 workers were as fast as 8." in found.why
    assert found.change == "lp.Loader(..., workers=4)"
    assert found.expect == "the same step time, without the memory of 4 workers"
    assert found.expected_step_s == WAITS.step_s
    assert "1 worker was as fast" in explain(tried(of=Tried(8, 1, 0, RATE))).why


def test_a_cache_that_fits_is_told_first() -> None:
    found = explain(tried(**CACHED))
    assert "cache=" in found.change
    assert "4 workers were as fast as 8" in found.why


def test_slow_calls_are_those_of_the_limit() -> None:
    assert find_verdict(slowed(tried(), 0.5 * WAITS.busy_s)).verdict is Verdict.SOURCE_LIMIT


@pytest.mark.parametrize(
    ("workers", "of", "change"),
    [(8, LIMIT, "workers=4)"), (12, LIMIT, "workers=4)"), (5, LIMIT, "workers=4)"), (4, LIMIT, "")],
)
def test_a_limit_is_told_for_all_numbers_that_suffice(workers: int, of: Tried, change: str) -> None:
    found = explain(tried(dataclasses.replace(WAITS, workers=workers), of))
    assert found.verdict is Verdict.SOURCE_LIMIT
    assert change in found.change and bool(change) is bool(found.change)


@pytest.mark.parametrize(
    "seen",
    [
        tried(of=Tried(8, 8, 4, RATE)),  # fewer were slower
        tried(of=LIMIT._replace(samples_per_s=2 * RATE)),  # the result of another training
        tried(of=LIMIT._replace(samples_per_s=0.5 * RATE)),
        tried(dataclasses.replace(WAITS, workers=3)),  # too few are not more
        tried(autotuned=Autotuned(32)),  # "auto" finds the number by itself
    ],
)
def test_no_limit_is_told_without_evidence(seen: Window) -> None:
    assert find_verdict(seen).verdict is Verdict.SOURCE_WAITS


def test_full_cpus_and_ready_data_come_first() -> None:
    assert find_verdict(tried(queued_s=0.3 * WAITS.busy_s)).verdict is Verdict.CPUS_FULL
    assert find_verdict(tried(BLOCKING.window(40))).verdict is Verdict.COMPUTE_BOUND


def test_paused_workers_are_not_idle() -> None:
    paused = dataclasses.replace(WAITS, busy_s=0.8 * WAITS.busy_s, idle_s=0.2 * WAITS.busy_s)
    assert paused.busy_share == pytest.approx(0.8)
    assert dataclasses.replace(paused, paused_s=paused.idle_s).busy_share == 1.0
