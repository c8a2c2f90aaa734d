"""Where windows of one number of workers begin and end."""

from __future__ import annotations

import dataclasses

from loaderpool.trainer.autotune.autotuner import Windows, is_whole
from loaderpool.trainer.explain.looks import Look, WorkerCounts
from loaderpool.trainer.explain.observed import AboutLoader

ABOUT = AboutLoader(cpus=8.0)
S = 1_000_000_000


def look(seconds: int, workers: int, steps_per_s: int = 10, first: int = 0, slots: int = 12) -> Look:
    return Look(
        number=seconds // 2,
        now_ns=seconds * S,
        steps=steps_per_s * seconds,
        seconds=float(seconds),
        workers=workers,
        by_worker={number: WorkerCounts(100 + number) for number in range(first, first + workers)},
        slots=slots,
    )


def seen(windows: Windows, looks: list[Look], workers: int) -> list[tuple[float, bool] | None]:
    found = [windows.add(each, workers) for each in looks]
    return [None if window is None else (window.seconds, is_whole(window)) for window in found]


def test_a_window_is_short_until_it_is_whole_and_then_the_next_begins() -> None:
    looks = [look(seconds, 2) for seconds in range(0, 16, 2)]
    # The first look has no step: what compiles is in the first ones.
    assert seen(Windows(ABOUT), looks, 2) == [
        None, None, (2.0, False), (4.0, False), (6.0, True), (2.0, False), (4.0, False), (6.0, True),
    ]  # fmt: skip


def test_few_steps_are_no_window() -> None:
    looks = [look(seconds, 2, steps_per_s=1) for seconds in range(0, 30, 2)]
    found = seen(Windows(ABOUT), looks, 2)
    assert found[:14] == [None] * 12 + [(20.0, True), None]


def test_it_begins_once_all_workers_are_there() -> None:
    windows = Windows(ABOUT)
    few = [look(seconds, 2) for seconds in (2, 4)]
    more = [look(seconds, 4) for seconds in (6, 8, 10)]
    assert seen(windows, few, 4) == [None, None]
    assert seen(windows, more, 4) == [None, (2.0, False), (4.0, False)]


def test_where_workers_have_gone_what_they_had_made_is_taken_first() -> None:
    windows = Windows(ABOUT)
    assert seen(windows, [look(2, 4, slots=30), look(4, 4, slots=30)], 4) == [None, (2.0, False)]
    fewer = [look(seconds, 2, slots=30) for seconds in (6, 8, 10, 12)]
    assert seen(windows, fewer, 2) == [None, None, None, (2.0, False)]


def test_a_worker_that_died_begins_a_window() -> None:
    windows = Windows(ABOUT)
    assert seen(windows, [look(2, 2), look(4, 2)], 2) == [None, (2.0, False)]
    assert seen(windows, [look(6, 2, first=1), look(8, 2, first=1), look(10, 2, first=1)], 2) == [
        None, (2.0, False), (4.0, False),
    ]  # fmt: skip


def test_waiting_at_the_very_first_batch_is_not_in_it() -> None:
    windows = Windows(ABOUT)
    begun = look(2, 2)
    started = dataclasses.replace(begun, start_s=100.0)
    later = dataclasses.replace(look(4, 2), start_s=100.0)
    windows.add(started, 2)
    window = windows.add(later, 2)
    assert window is not None
    assert (window.start_s, window.seconds) == (0.0, 2.0)
