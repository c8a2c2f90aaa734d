"""glibc's malloc: what it does with large blocks that were freed, and which memory it has mapped on its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own upper bound for what it lets these grow to. Smaller: more blocks are mapped and faulted in page by page.
# Larger: it would refuse.
_LARGEST_THRESHOLD = 32 << 20
_HEADER_BYTES = 16  # of a block: the size before it, and its own with three flags
_IS_MAPPED = 2


def keep_freed_blocks(largest_bytes: int = _LARGEST_THRESHOLD, heap_bytes: int = 2 * _LARGEST_THRESHOLD) -> None:
    """Have glibc's malloc keep what is freed for the next block, which else is mapped again: a fault for each page.

    Holds for good: it does not adapt its thresholds any more.

    Args:
        largest_bytes: larger blocks have mappings of their own, where the heap has no such room.
        heap_bytes: more than so many free ones at the end of the heap go back to the system.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(largest_bytes))
        libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(heap_bytes))


def is_told() -> bool:
    """Whether the environment tells malloc anything, which then is to stay."""
    named = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    return named or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def has_own_mapping(address: int, nbytes: int) -> bool:
    """Whether what malloc gave lies on pages of its own; readable must be what is 16 bytes before it, too."""
    if address % mmap.PAGESIZE != _HEADER_BYTES:
        return False
    before, size = (int.from_bytes(ctypes.string_at(address - at, 8), sys.byteorder) for at in (16, 8))
    spare = address - _HEADER_BYTES + size - _IS_MAPPED - (address + nbytes)
    return not before and size % mmap.PAGESIZE == _IS_MAPPED and 0 <= spare < 2 * mmap.PAGESIZE
