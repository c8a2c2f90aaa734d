"""What engines ask of a session: `Session` has it, and so has the session of the pool that is moved by hand."""

from __future__ import annotations

import inspect

import pytest

from loaderpool.trainer.session.engine_session import EngineSession
from loaderpool.trainer.session.session import Session
from tests.support.hand_pool import HandSession

METHODS = [name for name, value in vars(EngineSession).items() if inspect.isfunction(value) and name[0] != "_"]
FIELDS = [name for name, value in vars(EngineSession).items() if isinstance(value, property)]


@pytest.mark.parametrize("kind", [Session, HandSession])
def test_methods_can_be_called_as_the_protocol_says(kind: type) -> None:
    assert {"send", "wait_for", "catch_up"} <= set(METHODS)
    for name in METHODS:
        wanted = inspect.signature(getattr(EngineSession, name)).parameters
        there = inspect.signature(getattr(kind, name)).parameters
        takes_all = any(each.kind is each.VAR_POSITIONAL for each in there.values())
        assert takes_all or list(there) == list(wanted), name


def test_a_session_that_is_moved_by_hand_has_every_field() -> None:
    session = HandSession(2)
    wanted = {*FIELDS, *EngineSession.__annotations__}
    assert {"arena", "lock", "pipe", "routing"} <= wanted
    assert [name for name in wanted if not hasattr(session, name)] == []
