"""The arena: made under the limits that shells set, and its bytes, which are zero when they are taken."""

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


def refused() -> str:
    with pytest.raises(MemoryLimitError) as raised:
        Arena.create()
    return str(raised.value)


def test_the_limit_on_file_sizes_is_named_where_it_is_the_cause() -> None:
    with soft_limit(resource.RLIMIT_FSIZE, GIB // 2):
        text = refused()
    assert "ulimit -f" in text and "RLIMIT_FSIZE" in text and "ulimit -v" not in text


def test_the_limit_on_address_space_is_named_where_it_is_the_cause() -> None:
    with soft_limit(resource.RLIMIT_AS, address_space_bytes() + GIB // 2):
        text = refused()
    assert "ulimit -v" in text and "RLIMIT_AS" in text and "ulimit -f" not in text


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


def test_a_returned_extent_reads_as_zeros_when_it_is_taken_again() -> None:
    with new_arena() as arena:
        extent = arena.take(3 * PAGE_BYTES, "a test")
        bytes_of(arena, extent)[...] = 255
        arena.give_back(extent)
        again = arena.take(3 * PAGE_BYTES, "a test")
        assert again == extent and not bytes_of(arena, again).any()
