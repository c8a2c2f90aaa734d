"""The arena's making under the limits that shells set; no process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena

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


def test_what_is_no_limits_fault_blames_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("loaderpool.memory.arena.mmap.mmap", full)
    with pytest.raises(OSError, match="Too many open files") as raised:
        Arena.create()
    assert not isinstance(raised.value, MemoryLimitError)
