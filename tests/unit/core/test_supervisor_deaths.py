"""When a supervisor that has died is not replaced any more."""

from __future__ import annotations

from loaderpool.core.pool import SupervisorDeaths


def test_supervisors_that_die_without_progress_are_too_many_after_eight_and_the_error_names_the_samples() -> None:
    deaths = SupervisorDeaths((1000, 3600.0))
    for _ in range(8):
        deaths.note({4, 3}, deliveries=5)
    assert not deaths.are_too_many and "ran out of memory" in str(
        deaths.error("the supervisor process (pid 12)", "killed by SIGKILL")
    )
    deaths.note({4, 3}, deliveries=5)
    assert deaths.are_too_many
    told = str(deaths.error("the supervisor process (pid 12)", "killed by SIGKILL"))
    assert "(pid 12) crashed (killed by SIGKILL)" in told and "source index 3, 4" in told and "crash 9 in a row" in told
    deaths.note({4, 3}, deliveries=6)
    assert not deaths.are_too_many


def test_supervisors_deaths_within_the_time_are_limited_and_without_a_limit_they_are_not() -> None:
    limited, unlimited = SupervisorDeaths((2, 3600.0)), SupervisorDeaths(None)
    for deliveries in range(3):
        limited.note((), deliveries)
    for _ in range(100):
        unlimited.note((), 0)
    assert limited.are_too_many and not unlimited.are_too_many
    assert "restarts=(2, 3600) allows 2" in str(limited.error("the supervisor process (pid 12)", "killed by SIGKILL"))
