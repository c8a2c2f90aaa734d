"""Extents of the arena: never overlapping, merged when they come back, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.memory.arena import PAGE_BYTES, Extent, ExtentMap

START, PAGES = 3 * PAGE_BYTES, 64
END = START + PAGES * PAGE_BYTES

# Take so many bytes, or give back the one that is so far along among those taken.
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
            extents.give_back(taken.pop(number % len(taken)))
        assert extents.taken_bytes == sum(extent.nbytes for extent in taken)
    for extent in taken:
        extents.give_back(extent)
    assert extents.take(END - START) == Extent(START, END - START)  # all holes have merged


def longest_hole(taken: list[Extent]) -> int:
    """In pages, counted page by page."""
    free = [True] * PAGES
    for extent in taken:
        for page in range((extent.offset - START) // PAGE_BYTES, (extent.end - START) // PAGE_BYTES):
            free[page] = False
    longest = run = 0
    for is_free in free:
        run = run + 1 if is_free else 0
        longest = max(longest, run)
    return longest


@given(st.lists(st.integers(1, 5 * PAGE_BYTES), min_size=1, max_size=8), st.data())
def test_an_extent_that_is_free_already_is_refused(sizes: list[int], data: st.DataObject) -> None:
    extents = ExtentMap(START, END)
    taken = [extents.take(nbytes) for nbytes in sizes]
    twice = data.draw(st.sampled_from(taken))
    extents.give_back(twice)
    before = extents.taken_bytes
    with pytest.raises(ValueError, match="free already"):
        extents.give_back(twice)
    assert extents.taken_bytes == before


def test_a_hole_that_fits_is_used_before_what_lies_behind_it() -> None:
    extents = ExtentMap(START, END)
    first, second, third = (extents.take(2 * PAGE_BYTES) for _ in range(3))
    extents.give_back(second)
    assert extents.take(PAGE_BYTES).offset == second.offset
    assert extents.take(2 * PAGE_BYTES).offset == third.end
    assert first.offset == START
