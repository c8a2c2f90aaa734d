"""What our processes send each other keeps the classes that both know."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import cloudpickle
import pytest
from cloudpickle import cloudpickle as internals

from loaderpool.element.structure import Structure
from loaderpool.transport.pickling import receive, send


def local_class() -> Any:
    """A namedtuple class that is found by no name."""

    class Local(NamedTuple):
        x: Any
        y: Any

    return Local


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The classes that are known by number; the test may forget them, as a process that never met them."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(internals, "_DYNAMIC_CLASS_TRACKER_BY_ID", known)
    return known


def test_a_class_that_is_known_there_is_the_same_and_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = local_class()
    cloudpickle.dumps(cls)  # it has gone with the payload
    sent = send((Structure.of(cls(1, 2)), cls))
    monkeypatch.setattr(internals, "_make_skeleton_class", None)
    structure, there = receive(sent)
    assert there is cls and structure.namedtuple is cls


def test_a_class_that_is_not_known_there_comes_itself(forgotten: dict[str, Any]) -> None:
    cls = local_class()
    cloudpickle.dumps(cls)
    sent = send(Structure.of(cls(1, 2)))
    forgotten.clear()
    structure = receive(sent)
    assert structure.namedtuple is not cls
    assert structure == Structure.of(cls(1, 2)) and structure.flatten(cls(3, 4)) == [3, 4]
    assert structure.unflatten([5, 6]).y == 6


def test_a_known_class_travels_where_it_cannot_be_pickled_again() -> None:
    cls = local_class()
    cloudpickle.dumps(cls)
    cls.lock = threading.Lock()
    with pytest.raises(TypeError):
        cloudpickle.dumps(cls)
    assert receive(send(cls)) is cls
