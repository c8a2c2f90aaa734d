"""Payloads through the arena: trainer's and supervisor's side in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.sources.sequence import BatchSequence
from loaderpool.system import capacity
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.payload.pickler import OUT_OF_BAND_BYTES
from loaderpool.transport.payload.ship import put_shipment, ship

LOADER = 7


class Object:
    """A source's target, as `from_sequence` has it."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close_descriptor()


def load(arena: Arena, payload: dict[str, Any]) -> tuple[Payloads, dict[str, Any]]:
    _, offset, nbytes = put_shipment(arena, ship(payload))
    payloads = Payloads(arena, {})
    payloads.load(LOADER, offset, nbytes)
    return payloads, payloads.loaded[LOADER]


def many_arrays() -> list[Any]:
    return [np.full(OUT_OF_BAND_BYTES + number, number, np.uint8) for number in range(40)]


def test_thousands_of_arrays_take_no_descriptors_and_one_mapping(arena: Arena) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:loaderpool-arena")

    gc.collect()  # what other tests have left in cycles would go meanwhile
    descriptors, maps = len(os.listdir("/proc/self/fd")), mappings()
    payloads, payload = load(arena, {"source": many_arrays()})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mappings() == maps + 1
    for number, array in enumerate(payload["source"]):
        assert array.shape == (OUT_OF_BAND_BYTES + number,) and (array == number).all()
        assert array.ctypes.data % 128 == 0 and array.flags.writeable
    del payload, array
    payloads.unload(LOADER)
    gc.collect()
    assert mappings() == maps


def test_an_array_lives_longer_than_its_payload_and_its_writes_are_private(arena: Arena) -> None:
    payloads, payload = load(arena, {"source": many_arrays()})
    _, other = load(arena, {"source": []})
    before = arena.extents.taken_bytes
    array = payload["source"][5]
    payloads.unload(LOADER)
    del payload
    gc.collect()
    array[:] = 99
    assert array.sum() == 99 * len(array)
    assert arena.extents.taken_bytes == before and other["source"] == []


def test_an_update_looks_at_nothing_in_the_arena(arena: Arena) -> None:
    target = Object()
    target.old, target.kept = 1, np.zeros(OUT_OF_BAND_BYTES)  # type: ignore[attr-defined]
    payloads, payload = load(arena, {"source": BatchSequence(target)})
    taken = arena.extents.taken_bytes
    large = np.arange(2 * OUT_OF_BAND_BYTES)
    changes = {"set": {"large": "1st", "small": "2nd"}, "1st": large, "2nd": [1], "deleted": ["old", "never there"]}
    extents, offset, nbytes = put_shipment(arena, ship(changes))
    payloads.update(LOADER, offset, nbytes)
    for extent in extents:
        arena.map[extent.offset : extent.end] = b"\xff" * extent.nbytes
        arena.give_back(extent)
    assert arena.extents.taken_bytes == taken
    changed = payload["source"].target
    assert np.array_equal(changed.large, large) and changed.large.flags.writeable
    assert changed.small == [1] and not hasattr(changed, "old") and not changed.kept.any()


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_shipment_that_does_not_fit_leaves_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    room = [1 << 40] * nth + [0]
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: room.pop(0))
    with pytest.raises(MemoryLimitError):
        put_shipment(arena, ship({"source": many_arrays()}))
    assert arena.extents.taken_bytes == 0 and room == []
