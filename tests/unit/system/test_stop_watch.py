"""A stop is summed up over looks; what came between two of them counts only in part."""

from __future__ import annotations

import pytest

from loaderpool.system import machine

MS = 1_000_000


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    time = [10**12]
    monkeypatch.setattr(machine.clock, "monotonic_ns", lambda: time[0])
    return time


def looks_until_too_long(watch: machine.StopWatch, now: list[int]) -> int:
    looks = 0
    while True:
        now[0] += watch.look_ms * MS
        looks += 1
        if watch.is_too_long():
            return looks


def test_a_stop_is_too_long_after_five_looks(now: list[int]) -> None:
    watch = machine.StopWatch()
    assert watch.look_ms == 1000
    assert looks_until_too_long(watch, now) == 5


def test_a_gap_counts_as_two_looks(now: list[int]) -> None:
    watch = machine.StopWatch()
    now[0] += 3_600_000 * MS
    assert not watch.is_too_long()
    assert looks_until_too_long(watch, now) == 3


def test_a_process_that_ran_again_has_all_of_it_again(now: list[int]) -> None:
    watch = machine.StopWatch()
    now[0] += 2_000 * MS
    assert not watch.is_too_long()
    watch.runs()
    assert looks_until_too_long(watch, now) == 5
