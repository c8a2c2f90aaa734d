"""Extents of the arena never overlap, are merged and reused when they are returned, and are never
lost.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.memory.arena import PAGE_BYTES, Arena, Extent, ExtentMap, ExtentPool, room_bytes

START, PAGES = 3 * PAGE_BYTES, 64
END = START + PAGES * PAGE_BYTES

# Take this number of bytes, or return one of the taken extents.
takes = st.tuples(st.just("take"), st.integers(0, 20 * PAGE_BYTES))
gives = st.tuples(st.just("give"), st.integers(0, 99))


@given(st.lists(takes | gives))
def test_extents_never_overlap_and_nothing_is_lost(steps: list[tuple[str, int]]) -> None:
    extents = ExtentMap(START, END)
    taken: list[Extent] = []
    for what, number in steps:
        if what == "take":
            pages = max(1, -(-number // PAGE_BYTES))
            try:
                extent = extents.take(number)
            except MemoryError:
                assert longest_hole(taken) < pages
                continue
            assert extent.nbytes == pages * PAGE_BYTES and extent.offset % PAGE_BYTES == 0
            assert extent.offset >= START and extent.end <= END
            assert all(extent.end <= other.offset or other.end <= extent.offset for other in taken)
            taken.append(extent)
        elif taken:
            given_back = taken.pop(number % len(taken))
            extents.give_back(given_back)
            with pytest.raises(ValueError, match="free already"):
                extents.give_back(given_back)
        assert extents.taken_bytes == sum(extent.nbytes for extent in taken)
    for extent in taken:
        extents.give_back(extent)
    assert extents.take(END - START) == Extent(START, END - START)  # all holes have merged


def longest_hole(taken: list[Extent]) -> int:
    """Return the length of the longest hole in pages, counted page by page."""
    used = {
        page for each in taken for page in range(each.offset // PAGE_BYTES, each.end // PAGE_BYTES)
    }
    free = "".join(" x"[page in used] for page in range(START // PAGE_BYTES, END // PAGE_BYTES))
    return max(map(len, free.split("x")))


def test_a_hole_that_fits_is_used_before_what_follows_it() -> None:
    extents = ExtentMap(START, END)
    first, second, third = (extents.take(2 * PAGE_BYTES) for _ in range(3))
    extents.give_back(second)
    assert extents.take(PAGE_BYTES).offset == second.offset
    assert extents.take(2 * PAGE_BYTES).offset == third.end
    assert first.offset == START


@given(st.integers(1, 1 << 40))
def test_a_room_is_large_enough_and_not_much_larger(nbytes: int) -> None:
    size = room_bytes(nbytes)
    assert size >= nbytes and size % PAGE_BYTES == 0
    assert size - nbytes < max(PAGE_BYTES, nbytes / 8 + 1)
    assert room_bytes(size) == size


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=40))
def test_rooms_share_no_byte_and_are_all_given_back(steps: list[tuple[bool, int]]) -> None:
    arena = Arena.create()
    try:
        before, rooms = arena.extents.taken_bytes, ExtentPool(arena)
        held = [rooms.take(100_000 + n) for n in range(10)]
        for extent in held:
            rooms.give(extent)
        assert {rooms.take(100_000 - n) for n in range(10)} == set(held), "they are used again"
        for is_taken, nbytes in steps:
            if is_taken or not held:
                extent = rooms.take(nbytes)
                assert nbytes <= extent.nbytes
                assert all(
                    extent.end <= other.offset or other.end <= extent.offset for other in held
                )
                held.append(extent)
            else:
                rooms.give(held.pop(nbytes % len(held)))
        rooms.close()
        for extent in held:
            rooms.give(extent)
        assert arena.extents.taken_bytes == before
    finally:
        arena.close_descriptor()
