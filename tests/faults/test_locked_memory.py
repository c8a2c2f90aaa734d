"""A program that locks its memory (`mlockall`) has no more of ours in memory than is used."""

from __future__ import annotations

import sys

import pytest

from tests.support.child import run_child

# Without the right to lock without bounds, a mapping that would be locked is refused, where with it all its pages would
# be taken: so the test needs no memory where it fails.
LOCKED = """
import ctypes, re, resource
import numpy as np
import loaderpool as lp

SMALL = {"loaderpool-deliveries", "loaderpool-page"}  # a few megabytes for each loader

def locked():
    found = set()
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split()[0]:
                name = re.search(r"memfd:(loaderpool-[a-z]+)", line)
            if name and line.startswith("VmFlags:") and "lo" in line.split():
                found.add(name[1])
    return found - SMALL

def grow(item):
    return np.full(300_000 if item else 1, item, np.float32)

def made(array):
    loader = lp.Loader(range(8), lambda item: (item, array[item]), batch_size=2, workers=1)
    spec = lp.ArraySpec((None, None), np.float32, ragged=True)
    growing = lp.Loader(range(6), grow, batch_size=2, workers=1, ragged=True, element_spec=spec)
    return loader, list(loader), growing, list(growing)

for each in made(np.ones(100_000))[::2]:  # so that all is imported that is needed
    each.close()
large = np.ones(10_000_000)
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for place in (0, 1):  # effective and permitted ones
    sets[place] &= ~(1 << 14)  # CAP_IPC_LOCK
assert libc.capset(header, sets) == 0
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(hard, 64 << 20) if hard >= 0 else 64 << 20, hard))
assert libc.mlockall(2) == 0, ctypes.get_errno()  # MCL_FUTURE
held = made(lp.share(large))
assert held[2].statistics().memory.batches_oversize
assert not locked(), locked()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mlockall and /proc of Linux")
def test_a_large_mapping_is_not_locked_and_takes_no_pages() -> None:
    run_child(LOCKED).check()
