"""Shipments in shared memory: comparison of two shipments, and arrays that a later one leaves in
place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.arena import Arena
from loaderpool.trainer.arguments import check_arguments
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.payload.sent import Sent, place
from loaderpool.transport.payload.ship import Shipment, ship
from tests.support.mapped import mapped

SETTINGS = check_arguments(lp.Loader(range(3), workers=0)._core.arguments).payload.travelling(1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close_descriptor()


def shipment_of(*arrays: Any) -> Shipment:
    return ship({**SETTINGS, "source": arrays})


def sent_after(arena: Arena, earlier: Sent, *arrays: Any) -> Sent:
    shipment = shipment_of(*arrays)
    return Sent(arena, shipment, place(shipment, hands_over_files=False, earlier=earlier))


def loaded(arena: Arena, sent: Sent) -> Any:
    payloads = Payloads(arena, {1: sent.placement.descriptors})
    payloads.load(1, sent.offset, sent.nbytes)
    return payloads.loaded[1].source


def bytes_like(value: int, count: int = 100_000) -> Any:
    return np.full(count, value, np.uint8)


def test_a_shipment_of_the_same_objects_means_the_same(arena: Arena) -> None:
    array = bytes_like(1)
    sent = Sent(arena, shipment_of(array, "name"))
    assert sent.difference(shipment_of(array, "".join(["na", "me"]))) is None
    array[-1] = 2
    assert sent.difference(shipment_of(array, "name")) is not None
    assert sent.difference(shipment_of(bytes_like(1), "other")) is not None
    assert sent.difference(shipment_of(bytes_like(1), bytes_like(1))) is not None


def test_another_random_generator_is_a_change_and_its_draws_are_not(arena: Arena) -> None:
    generator = np.random.default_rng(1)
    registry = Registry({"source": generator})
    sent = Sent(arena, ship({"source": generator, "config": _Config}, registry=registry))
    generator.random()
    assert (
        sent.difference(ship({"source": generator, "config": _Config}, registry=registry)) is None
    )
    other = np.random.default_rng(2)
    assert (
        sent.difference(ship({"source": other, "config": _Config}, registry=registry)) is not None
    )


class _Config:
    seed_globals, threads = "auto", 1


def test_arrays_that_have_not_changed_are_not_copied_again(arena: Arena) -> None:
    arrays = [bytes_like(1, 1_000_000), bytes_like(2, 200_000)]
    first = Sent(arena, shipment_of(*arrays))
    before = arena.extents.taken_bytes
    arrays[1][:] = 3
    second = sent_after(arena, first, *arrays)
    assert arena.extents.taken_bytes - before < 300_000
    first.give_back()
    assert [int(array[0]) for array in loaded(arena, second)] == [1, 3]
    second.give_back()
    assert arena.extents.taken_bytes == 0


def test_what_is_mostly_out_of_date_is_not_kept(arena: Arena) -> None:
    arrays = [bytes_like(1, 1_000_000), bytes_like(2, 200_000)]
    first = Sent(arena, shipment_of(*arrays))
    arrays[0][:] = 3
    second = sent_after(arena, first, *arrays)
    first.give_back()
    assert arena.extents.taken_bytes < 1_300_000
    assert [int(array[0]) for array in loaded(arena, second)] == [3, 2]


def test_arrays_come_from_several_shipments(arena: Arena) -> None:
    arrays = [bytes_like(0, 400_000 >> shift) for shift in range(3)]
    sent = Sent(arena, shipment_of(*arrays))
    for number in (2, 1, 2):
        arrays[number][:] += 1 + number
        later = sent_after(arena, sent, *arrays)
        sent.give_back()
        sent = later
    assert [int(array[-1]) for array in loaded(arena, sent)] == [0, 2, 6]
    assert arena.extents.taken_bytes < 1_100_000  # not 400_000 more for each


def test_adopted_arrays_stay_in_their_file_until_they_change(arena: Arena) -> None:
    arrays = [mapped(functools.partial(np.zeros, size << 20, np.uint8)) for size in (40, 36)]
    shipment = shipment_of(*arrays)
    first = Sent(arena, shipment, place(shipment))
    assert first.placement.shared_bytes == 76 << 20
    arrays[1][5] = 1
    shipment = shipment_of(*arrays)
    second = Sent(arena, shipment, place(shipment, earlier=first))
    assert second.placement.files == first.placement.files[:1]
    assert second.placement.copied_because == (
        f"{36 << 20:,} bytes: it has changed since the loader was made",
    )
    assert second.difference(shipment_of(*arrays)) is None
