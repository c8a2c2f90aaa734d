"""A program that locks its memory (`mlockall`) has no more of ours in memory than is used."""

from __future__ import annotations

import sys

import pytest

from tests.support.child import run_child

# Without the right to lock without bounds, a mapping that would be locked is refused, where with it all its pages would
# be taken: so the test needs no memory where it fails.
LOCKED = """
import ctypes, os, resource
import loaderpool as lp
from loaderpool.system import machine
from loaderpool.memory.arena import Arena, map_private, map_whole_file

def file_of(name, nbytes):
    file = machine.create_memory_file(name)
    os.ftruncate(file, nbytes)
    return file

def is_locked(name):
    found = []
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if "-" in line.split()[0]:
                is_meant = name in line
            if is_meant and line.startswith("VmFlags:"):
                found.append("lo" in line.split())
    assert found, name
    return any(found)

with lp.Loader(range(8), float, workers=1) as loader:  # so that all is imported that is needed
    list(loader)
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for place in (0, 1):  # effective and permitted ones
    sets[place] &= ~(1 << 14)  # CAP_IPC_LOCK
assert libc.capset(header, sets) == 0
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(hard, 64 << 20) if hard >= 0 else 64 << 20, hard))
assert libc.mlockall(2) == 0, ctypes.get_errno()  # MCL_FUTURE
{made}
assert not is_locked("loaderpool-{name}")
"""

MAPPINGS = {
    "arena": "made = Arena.create()",
    "whole": "made = map_whole_file(file_of('whole', 1 << 40), 1 << 40)",
    "part": "made = map_private(file_of('part', 1 << 40), 4096, 80 << 20)",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mlockall and /proc of Linux")
@pytest.mark.parametrize("name", MAPPINGS)
def test_a_large_mapping_is_not_locked_and_takes_no_pages(name: str) -> None:
    run_child(LOCKED.replace("{made}", MAPPINGS[name]).replace("{name}", name)).check()
