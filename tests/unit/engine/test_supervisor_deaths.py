"""Number of deaths after which a supervisor is not replaced."""

from __future__ import annotations

from loaderpool.engine.pool import SupervisorDeaths


def test_supervisors_that_die_again_and_again_are_not_too_many_where_batches_come_between() -> None:
    deaths = SupervisorDeaths((1000, 3600.0))
    for _ in range(100):
        deaths.note(())
        deaths.deliveries += 1
    assert not deaths.are_too_many


def test_supervisors_deaths_within_the_time_are_limited_and_without_a_limit_they_are_not() -> None:
    limited, unlimited = SupervisorDeaths((2, 3600.0)), SupervisorDeaths(None)
    for _ in range(3):
        limited.note(())
        limited.deliveries += 1
    for _ in range(100):
        unlimited.note(())
    assert limited.are_too_many and not unlimited.are_too_many
    assert "restarts=(2, 3600) allows 2" in limited.text(
        "the supervisor process (pid 12)", "killed by SIGKILL"
    )
