"""A program that locks its memory (`mlockall`) gets an error, instead of all pages of a
terabyte.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.child import run_child

# Remove the right to lock any amount, so that a failure of the test does not use all memory.
LOCKED = """
import ctypes, resource
import loaderpool as lp

def first():
    with lp.Loader(range(8), batch_size=2, workers=1) as loader:
        return next(iter(loader))

first()  # so that all is imported that is needed
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for place in (0, 1):  # effective and permitted ones
    sets[place] &= ~(1 << 14)  # CAP_IPC_LOCK
assert libc.capset(header, sets) == 0
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(hard, 64 << 20) if hard >= 0 else 64 << 20, hard))
assert libc.mlockall(2) == 0, ctypes.get_errno()  # MCL_FUTURE
try:
    first()
except lp.MemoryLimitError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mlockall of Linux")
def test_it_is_told_to_unlock() -> None:
    assert "Call munlockall()" in run_child(LOCKED).check().stdout
