"""The changes of a source that matter: the latest of each attribute."""

from __future__ import annotations

import pytest

from loaderpool.transport.payload import loaded
from loaderpool.transport.payload.loaded import Change
from loaderpool.transport.payload.placement import keep_latest


def change(text: bytes, *names: str) -> Change:
    return Change(text, [bytearray(text * 10_000), bytearray()], frozenset(names))


def test_what_a_later_one_makes_needless_is_taken_out() -> None:
    kept: list[Change] = []
    rows, both, epoch = change(b"a", "rows"), change(b"b", "rows", "epoch"), change(b"c", "epoch")
    assert keep_latest(kept, rows) == []
    assert keep_latest(kept, both) == [rows]
    assert keep_latest(kept, epoch) == []
    assert kept == [both, epoch]


def test_several_later_ones_together_make_one_needless() -> None:
    kept: list[Change] = []
    both, rows = change(b"a", "rows", "epoch"), change(b"b", "rows")
    other, epoch = change(b"c", "x"), change(b"d", "epoch")
    assert [keep_latest(kept, each) for each in (both, rows, other)] == [[], [], []]
    assert keep_latest(kept, epoch) == [both]
    assert kept == [rows, other, epoch]


def test_those_that_became_needless_come_latest_first() -> None:
    kept: list[Change] = []
    one, other, both = change(b"a", "rows"), change(b"b", "epoch"), change(b"c", "rows", "epoch")
    keep_latest(kept, one), keep_latest(kept, other)
    assert keep_latest(kept, both) == [other, one]
    assert kept == [both]


def test_none_travels_in_a_longer_piece_than_marshal_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "_PIECE_BYTES", 3000)
    ((parts,),) = loaded.plain({3: [change(b"a", "rows")]}).values()
    assert [list(map(len, part)) for part in parts] == [[1], [3000, 3000, 3000, 1000], [0]]
