"""glibc's malloc: what it does with large blocks that were freed, and which memory it has mapped on its own."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc's own upper bound for what it lets these grow to. Smaller: more blocks are mapped and faulted in page by page.
# Larger: it would refuse.
_LARGEST_THRESHOLD = 32 << 20
# Larger than what the heap may have free by chance; smaller than arrays that are adopted in place, which need mappings
# of their own, as freeing it raises the threshold to its size. Its pages are not touched, so it costs no memory.
_PROBE_BYTES = 15 << 20
_HEADER_BYTES = 16  # of a block: the size before it, and its own with three flags
_IS_MAPPED = 2


def keep_freed_blocks(largest_bytes: int = _LARGEST_THRESHOLD, heap_bytes: int = 2 * _LARGEST_THRESHOLD) -> bool:
    """Have malloc keep what is freed for the next block, which else is mapped again, with a fault for each page.

    Holds for good: glibc does not adapt its thresholds any more. Returns whether that could be set: musl has none.

    Args:
        largest_bytes: larger blocks have mappings of their own, where the heap has no such room.
        heap_bytes: more than so many free ones at the end of the heap go back to the system.
    """
    libc = _glibc()
    return libc is not None and bool(
        libc.mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(largest_bytes))
        and libc.mallopt(ctypes.c_int(_M_TRIM_THRESHOLD), ctypes.c_int(heap_bytes))
    )


def keeps_freed_blocks() -> bool:
    """Whether malloc keeps large blocks that are freed by default, which is found out by trying.

    It does not where any code has set its threshold, as TensorFlow's first `from_generator` does. False where the
    environment sets anything of malloc, and without glibc.
    """
    named = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    libc = _glibc()
    if libc is None or named or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    flags = _IS_MAPPED
    for _ in range(2):  # freeing the first one raises the threshold, unless it was set
        address = libc.malloc(_PROBE_BYTES)
        if not address:
            return False
        _, flags = _header(address)
        libc.free(address)
    return not flags & _IS_MAPPED


def has_own_mapping(address: int, nbytes: int) -> bool:
    """Whether what malloc gave lies on pages of its own; readable must be what is 16 bytes before it, too."""
    if address % mmap.PAGESIZE != _HEADER_BYTES:
        return False
    before, size = _header(address)
    spare = address - _HEADER_BYTES + size - _IS_MAPPED - (address + nbytes)
    return not before and size % mmap.PAGESIZE == _IS_MAPPED and 0 <= spare < 2 * mmap.PAGESIZE


def _header(address: int) -> tuple[int, int]:
    """The size of the block before it, and its own with flags."""
    before, size = (int.from_bytes(ctypes.string_at(address - at, 8), sys.byteorder) for at in (16, 8))
    return before, size


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
