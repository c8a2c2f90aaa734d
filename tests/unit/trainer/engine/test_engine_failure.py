"""What ended a loader is raised to everyone who asks, and may pass over once it was raised."""

from __future__ import annotations

import pytest

from loaderpool.errors import LoaderpoolError
from loaderpool.trainer.engine.run_context import EngineFailure


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
