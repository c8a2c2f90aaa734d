"""The changes that a worker has to make itself: the latest of each attribute, whatever comes after its start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from loaderpool.transport.payload.changes import Change, FiledChanges, LatestChanges, read_changes


@pytest.fixture
def changes() -> Iterator[FiledChanges]:
    made = FiledChanges()
    yield made
    for loader in (1, 2):
        made.forget(loader)


def change(loader: int, text: bytes, *names: str) -> Change:
    return Change(loader, text, [bytearray(text * 10_000), bytearray()], frozenset(names))


def kept(changes: FiledChanges) -> list[Change]:
    descriptor = changes.file()
    return [] if descriptor is None else read_changes(os.dup(descriptor))


def test_none_need_no_file(changes: FiledChanges) -> None:
    assert changes.file() is None
    changes.keep(change(1, b"a", "rows"))
    changes.forget(1)
    assert changes.file() is None


def test_they_come_back_in_their_order(changes: FiledChanges) -> None:
    for number, name in enumerate(["a", "b", "c"]):
        changes.keep(change(1 + number % 2, name.encode(), name))
    assert kept(changes) == [change(1, b"a", "a"), change(2, b"b", "b"), change(1, b"c", "c")]


def test_what_a_later_one_makes_needless_is_dropped(changes: FiledChanges) -> None:
    changes.keep(change(1, b"a", "rows"))
    changes.keep(change(2, b"b", "rows"))
    changes.keep(change(1, b"c", "rows", "epoch"))
    changes.keep(change(1, b"d", "epoch"))
    assert kept(changes) == [change(2, b"b", "rows"), change(1, b"c", "rows", "epoch"), change(1, b"d", "epoch")]


def test_several_later_ones_together_make_one_needless(changes: FiledChanges) -> None:
    changes.keep(change(1, b"a", "rows", "epoch"))
    changes.keep(change(1, b"b", "rows"))
    assert kept(changes) == [change(1, b"a", "rows", "epoch"), change(1, b"b", "rows")]
    changes.keep(change(1, b"c", "epoch"))
    assert kept(changes) == [change(1, b"b", "rows"), change(1, b"c", "epoch")]


def test_those_that_became_needless_are_told_once() -> None:
    latest: LatestChanges[str] = LatestChanges()
    assert latest.keep("a", frozenset({"rows"})) == []
    assert latest.keep("b", frozenset({"epoch"})) == []
    assert latest.keep("c", frozenset({"rows", "epoch"})) == ["b", "a"]
    assert latest.keep("d", frozenset({"other"})) == []
    assert list(latest) == ["c", "d"]


def test_who_has_a_file_keeps_what_was_in_it(changes: FiledChanges) -> None:
    changes.keep(change(1, b"a", "rows"))
    descriptor = changes.file()
    assert descriptor is not None
    assert changes.file() == descriptor  # one for all workers
    inherited, another = os.dup(descriptor), os.dup(descriptor)
    changes.keep(change(1, b"b", "rows"))
    assert read_changes(inherited) == [change(1, b"a", "rows")]
    assert read_changes(another) == [change(1, b"a", "rows")]  # the two share one position
    assert kept(changes) == [change(1, b"b", "rows")]
