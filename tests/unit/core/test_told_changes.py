"""What hooks have changed, on its way to a worker by exec."""

from __future__ import annotations

import marshal
from types import SimpleNamespace
from typing import Any

import pytest

from loaderpool.core import processes
from loaderpool.core.exec_worker import LatePayloads
from loaderpool.transport.payload.loaded import Change


def test_what_is_too_long_for_marshal_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes._PIECE_BYTES < 1 << 31  # a longer one is "unmarshallable"
    monkeypatch.setattr(processes, "_PIECE_BYTES", 4)
    change = Change(b"0123456789", [bytearray(b"abcdefgh"), bytearray(b"a"), bytearray()])
    payloads = SimpleNamespace(files={}, places={5: (0, 0)}, changes={5: change})
    of: Any = SimpleNamespace(_payloads=payloads, _forms={})
    told = marshal.loads(marshal.dumps(processes.Processes._told(of, 3, 0)))
    assert all(len(piece) <= 4 for pieces in told["changes"][5] for piece in pieces)
    applied: list[Change] = []
    arena: Any = None
    late = LatePayloads(arena, told)
    monkeypatch.setattr(late._payloads, "load", lambda loader, *_: late._payloads.loaded.update({loader: {}}))
    monkeypatch.setattr(late._payloads, "apply", lambda _, change: applied.append(change))
    assert late[5] == {}
    assert applied == [change]
