"""ExtentPool: extents that are used again, never two at a time, and all given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loaderpool.memory.arena import PAGE_BYTES, Arena, ExtentPool, room_bytes


@given(st.integers(1, 1 << 40))
def test_a_room_is_large_enough_and_not_much_larger(nbytes: int) -> None:
    size = room_bytes(nbytes)
    assert size >= nbytes and size % PAGE_BYTES == 0
    assert size - nbytes < max(PAGE_BYTES, nbytes / 8 + 1)
    assert room_bytes(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=40))
def test_no_two_share_a_byte_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    arena = Arena.create()
    try:
        before = arena.extents.taken_bytes
        rooms = ExtentPool(arena)
        held = []
        for takes, nbytes in steps:
            if takes or not held:
                extent = rooms.take(nbytes)
                assert nbytes <= extent.nbytes
                assert all(extent.end <= other.offset or other.end <= extent.offset for other in held)
                held.append(extent)
            else:
                rooms.give(held.pop(nbytes % len(held)))
        rooms.close()
        for extent in held:
            rooms.give(extent)
        assert arena.extents.taken_bytes == before
    finally:
        arena.close_descriptor()


def test_what_was_given_is_taken_again() -> None:
    arena = Arena.create()
    rooms = ExtentPool(arena)
    extents = {rooms.take(100_000 + n) for n in range(10)}
    for extent in extents:
        rooms.give(extent)
    assert {rooms.take(100_000 - n) for n in range(10)} == extents
    for extent in extents:
        rooms.give(extent)
    rooms.close()
    arena.close_descriptor()
