"""Payloads through the arena, with the main process's and the supervisor's part in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity
from loaderpool.trainer.arguments import check_arguments
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.payload.pickler import OUT_OF_BAND_BYTES
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.payload.sent import Sent
from loaderpool.transport.payload.ship import ship

LOADER = 7
SETTINGS = check_arguments(lp.Loader(range(3), workers=0)._core.arguments).payload.travelling(
    LOADER
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close_descriptor()


def load(arena: Arena, payload: dict[str, Any]) -> tuple[Payloads, WorkerPayload]:
    sent = Sent(arena, ship({**SETTINGS, **payload}))
    payloads = Payloads(arena, {})
    payloads.load(LOADER, sent.offset, sent.nbytes)
    return payloads, payloads.loaded[LOADER]


def many_arrays() -> list[Any]:
    return [np.full(OUT_OF_BAND_BYTES + number, number, np.uint8) for number in range(40)]


def test_thousands_of_arrays_take_no_descriptors_and_one_mapping(arena: Arena) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:loaderpool-arena")

    gc.collect()  # garbage of other tests must not be collected meanwhile
    descriptors, maps = len(os.listdir("/proc/self/fd")), mappings()
    payloads, payload = load(arena, {"source": many_arrays()})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == maps + 1
    for number, array in enumerate(payload.source):
        assert array.shape == (OUT_OF_BAND_BYTES + number,) and (array == number).all()
        assert array.ctypes.data % 128 == 0 and array.flags.writeable
        array[...] = 255  # changes only this process's copy
    payloads.load(LOADER + 1, *payloads.places[LOADER])
    assert all(
        (array == number).all() for number, array in enumerate(payloads.loaded[LOADER + 1].source)
    )
    del payload, array
    payloads.unload(LOADER)
    payloads.unload(LOADER + 1)
    gc.collect()
    assert mappings() == maps


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_shipment_that_does_not_fit_leaves_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    room = [1 << 40] * nth + [0]
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: room.pop(0))
    with pytest.raises(MemoryLimitError):
        Sent(arena, ship({"source": many_arrays()}))
    assert arena.extents.taken_bytes == 0 and room == []
