"""Small parts of the trainer's side: who takes a notice, what ends a loader, and when supervisors are not replaced."""

from __future__ import annotations

from typing import Any

import pytest

from loaderpool.errors import LoaderpoolError
from loaderpool.trainer.engine.engine_failure import EngineFailure
from loaderpool.trainer.session.routing import Routing
from loaderpool.trainer.session.supervisor_deaths import SupervisorDeaths
from loaderpool.transport.messages import Notice, Words


class Engine:
    def __init__(self) -> None:
        self.told: list[int] = []
        self.maimed = 0

    def on_notice(self, words: Words, attachment: Any) -> None:
        self.told.append(words[0])

    def on_maimed(self, words: Words) -> None:
        self.maimed += 1


def words(kind: int, *rest: int) -> Words:
    padded = [kind, *rest, *[0] * 7][:8]
    return tuple(padded)  # type: ignore[return-value]


def test_notices_go_to_the_loader_and_to_whose_run_or_slot_it_is() -> None:
    listeners = Routing()
    one, other = Engine(), Engine()
    listeners.by_loader.update({1: one, 2: other})  # type: ignore[dict-item]
    listeners.by_run[5], listeners.by_slot[6] = one, other  # type: ignore[assignment]
    for told in ((Notice.COMPLETION, 2, 5), (Notice.UNSURE, 2, 5), (Notice.LOADED, 2), (Notice.LOADED, 7)):
        listeners.tell(words(*told), None)
    assert one.told == [Notice.COMPLETION, Notice.UNSURE] and other.told == [Notice.LOADED]
    listeners.tell_maimed(words(Notice.COMPLETION, 2, 5))
    listeners.tell_maimed(words(Notice.SPEC, 2))
    assert (one.maimed, other.maimed) == (1, 1)
    for _ in range(2):  # the second time there is nobody any more
        listeners.tell(words(Notice.RUN_ENDED, 5), None)
        listeners.tell(words(Notice.SLOT_RETIRED, 6), None)
    assert one.told[2:] == [Notice.RUN_ENDED] and other.told[1:] == [Notice.SLOT_RETIRED]
    listeners.tell(words(Notice.LOST, 0), None)
    assert one.told[3:] == other.told[2:] == [Notice.LOST]


def test_a_failure_is_raised_anew_and_passes_over_only_once_somebody_was_told() -> None:
    failure = EngineFailure()
    failure.check()
    assert not failure.is_there and not failure.pass_over()
    failure.note(lambda: LoaderpoolError("first"), may_pass=True)
    assert failure.is_there and not failure.pass_over()
    met = []
    for _ in range(2):
        with pytest.raises(LoaderpoolError, match="first") as raised:
            failure.check()
        met.append(raised.value)
    assert met[0] is not met[1]
    assert failure.pass_over() and not failure.is_there
    failure.note(lambda: LoaderpoolError("for good"))
    with pytest.raises(LoaderpoolError, match="for good"):
        failure.check()
    assert not failure.pass_over() and failure.is_there


def test_supervisors_that_die_without_progress_are_too_many_after_eight_and_the_error_names_the_samples() -> None:
    deaths = SupervisorDeaths((1000, 3600.0))
    for _ in range(8):
        deaths.note({4, 3})
    assert not deaths.are_too_many and "ran out of memory" in str(deaths.error(12, "killed by SIGKILL"))
    deaths.note({4, 3})
    assert deaths.are_too_many
    told = str(deaths.error(12, "killed by SIGKILL"))
    assert "(pid 12) died (killed by SIGKILL)" in told and "source index 3, 4" in told and "9th in a row" in told
    deaths.note_progress()
    assert not deaths.are_too_many


def test_supervisors_deaths_within_the_time_are_limited_and_without_a_limit_they_are_not() -> None:
    limited, unlimited = SupervisorDeaths((2, 3600.0)), SupervisorDeaths(None)
    for _ in range(3):
        limited.note(())
        limited.note_progress()
    for _ in range(100):
        unlimited.note(())
    assert limited.are_too_many and not unlimited.are_too_many
    assert "max_restarts=(2, 3600) makes good 2" in str(limited.error(12, "killed by SIGKILL"))
