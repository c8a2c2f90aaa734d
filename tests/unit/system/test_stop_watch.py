"""A stop is too long five seconds after the first check that finds it."""

from __future__ import annotations

import pytest

from loaderpool.system import machine


def test_a_process_that_ran_again_has_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**12]
    monkeypatch.setattr(machine.clock, "monotonic_ns", lambda: now[0])
    watch = machine.StopWatch()
    assert watch.look_ms == 1000
    for _ in range(2):
        for seconds in range(6):
            assert watch.is_too_long() == (seconds == 5)
            now[0] += 10**9
        watch.runs()
