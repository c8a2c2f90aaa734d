"""The arena: created under limits of the shell, with bytes that are zero when they are taken."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import PAGE_BYTES, Arena, Extent
from loaderpool.system import abilities

pytestmark = pytest.mark.no_leaks

GIB = 1 << 30


@contextlib.contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kind", [resource.RLIMIT_FSIZE, resource.RLIMIT_AS])
def test_a_limit_that_leaves_too_little_is_an_error(kind: int) -> None:
    used = address_space_bytes() if kind == resource.RLIMIT_AS else 0
    with soft_limit(kind, used + GIB // 2), pytest.raises(MemoryLimitError) as raised:
        Arena.create()
    assert "ulimit -v" in str(raised.value) and "ulimit -f" in str(raised.value)


@pytest.mark.parametrize("kind", [resource.RLIMIT_FSIZE, resource.RLIMIT_AS])
def test_a_limit_that_leaves_some_gib_gives_a_smaller_arena(kind: int) -> None:
    used = address_space_bytes() if kind == resource.RLIMIT_AS else 0
    with soft_limit(kind, used + 3 * GIB):
        arena = Arena.create()
    assert arena.nbytes == GIB
    arena.close_descriptor()


@contextlib.contextmanager
def new_arena() -> Iterator[Arena]:
    arena = Arena.create()
    try:
        yield arena
    finally:
        arena.close_descriptor()


def bytes_of(arena: Arena, extent: Extent) -> npt.NDArray[np.uint8]:
    return np.ndarray((extent.nbytes,), np.uint8, arena.map, extent.offset)


@pytest.mark.parametrize("has_files", [True, False])
def test_bytes_and_arrays_are_written_to_the_mapping(
    has_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_arena() as arena:
        monkeypatch.setattr(abilities, "has_memory_files", lambda: has_files)
        extent = arena.take(3 * PAGE_BYTES, "a test")
        words = np.arange(PAGE_BYTES // 8 + 1)
        arena.write(extent.offset + 8, words)
        arena.write(extent.offset, b"")
        arena.write(extent.end - 3, b"end")
        memory = bytes_of(arena, extent)
        assert memory[8 : 8 + words.nbytes].tobytes() == words.tobytes()
        assert memory[-3:].tobytes() == b"end"
        assert not memory[:8].any() and not memory[8 + words.nbytes : -3].any()


def test_a_returned_extent_reads_as_zeros_when_it_is_taken_again() -> None:
    with new_arena() as arena:
        extent = arena.take(3 * PAGE_BYTES, "a test")
        bytes_of(arena, extent)[...] = 255
        arena.give_back(extent)
        again = arena.take(3 * PAGE_BYTES, "a test")
        assert again == extent and not bytes_of(arena, again).any()


def test_an_array_keeps_its_extent_while_a_view_is_left() -> None:
    with new_arena() as arena:
        array = arena.array(2 * PAGE_BYTES, "a test")
        array[:] = 7
        (extent,), view = arena.arrays, array[8:].view(np.uint64)[1:]
        del array
        arena.reclaim()
        assert arena.extents.taken_bytes == extent.nbytes and (bytes_of(arena, extent) == 7).all()
        del view
        again = arena.take(2 * PAGE_BYTES, "a test")
        assert again == extent and not arena.arrays and not bytes_of(arena, again).any()
