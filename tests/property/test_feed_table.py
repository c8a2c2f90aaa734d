"""FEED-1: if a reader finds a batch's entry before and after a copy of its bytes, the copy is
right.
"""

from __future__ import annotations

import mmap

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loaderpool.worker.bundles import ENTRIES, FEED_TABLE_BYTES, Bundle, FeedTable

_OFFSET = 4096
_ROOMS = 4  # rooms for bundles; the bytes of a room are the number of its batch


class _Walk(RuleBasedStateMachine):
    """A writer that acts step by step, and a reader that may look between any two steps."""

    def __init__(self) -> None:
        super().__init__()
        shared = mmap.mmap(-1, _OFFSET + FEED_TABLE_BYTES)
        self.writer, self.reader = FeedTable(shared, _OFFSET), FeedTable(shared, _OFFSET)
        self.rooms = [-1] * _ROOMS
        self.held: dict[int, int] = {}  # room by batch
        self.free = list(range(_ROOMS))
        self.next = 0
        self.written: tuple[int, int] | None = (
            None  # batch and room whose bytes are written, but not its entry
        )
        self.looking: tuple[int, Bundle, int] | None = None

    @precondition(lambda self: self.free and self.written is None)
    @rule(skipped=st.sampled_from([0, 1, ENTRIES - 1, ENTRIES]))
    def write_bytes(self, skipped: int) -> None:
        if self.held:
            skipped = 0  # at most ENTRIES batches lie between two that are held
        self.next += skipped
        room = self.free.pop(0)
        self.rooms[room] = self.next
        self.written = self.next, room

    @precondition(lambda self: self.written is not None)
    @rule()
    def enter(self) -> None:
        assert self.written is not None
        batch, room = self.written
        self.writer.write(batch, Bundle(room, batch, batch + 2, batch + 3))
        self.held[batch] = room
        self.written, self.next = None, batch + 1

    @precondition(lambda self: self.held)
    @rule()
    def take_oldest(self) -> None:
        batch = min(self.held)
        self.writer.clear(batch)
        self.free.append(self.held.pop(batch))

    @precondition(lambda self: self.next)
    @rule(back=st.integers(1, 6) | st.sampled_from([ENTRIES, ENTRIES + 1]))
    def begin_to_copy(self, back: int) -> None:
        batch = max(0, self.next - back)
        found = self.reader.read(batch)
        assert (found is not None) == (batch in self.held)
        self.looking = None if found is None else (batch, found, self.rooms[found.offset])

    @precondition(lambda self: self.looking is not None)
    @rule()
    def look_again(self) -> None:
        assert self.looking is not None
        batch, found, copied = self.looking
        if self.reader.read(batch) == found:
            assert copied == batch
        self.looking = None

    @invariant()
    def all_that_are_held_are_found(self) -> None:
        for batch, room in self.held.items():
            assert self.reader.read(batch) == (room, batch, batch + 2, batch + 3)


TestWalk = _Walk.TestCase
