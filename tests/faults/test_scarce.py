"""Machines on which something is scarce: it works, or one line says what is missing and what to set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.child import run_child

USE_UP = """
import os, resource
import numpy as np
import loaderpool as lp

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def use_up():
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken


def meets(error, work):
    try:
        return work()
    except error as met:
        assert "ran out of file descriptors (limit: 200)" in str(met), met
        return "told"
"""

CASES = {
    "the first sample's error is large": """
def fn(item):
    raise ValueError("y" * 100_000)

loader = lp.Loader(range(20), fn, batch_size=4, workers=1)
taken = use_up()
print(meets(lp.PoolBrokenError, lambda: loader.element_spec))
for each in taken: os.close(each)
loader = loader.replace()
try:
    loader.element_spec
except ValueError:
    print("then the error itself")
""",
    "a batch is oversize": """
def fn(item):
    return "x" * (1 if item < 4 else 1_000_000)

loader = lp.Loader(range(20), fn, batch_size=4, workers=1)
loader.element_spec
taken = use_up()
print(meets(lp.PoolBrokenError, lambda: sum(map(len, loader))))
for each in taken: os.close(each)
loader = loader.replace()
assert sum(map(len, loader)) == 20
print("then the error itself")
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_without_descriptors_is_told_and_a_new_loader_goes_on_when_there_are_some(
    case: str,
) -> None:
    result = run_child(USE_UP + CASES[case] + "\nloader.close()\n", timeout_s=60).check()
    assert result.stdout == "told\nthen the error itself\n"


def test_what_is_closed_or_dropped_goes_without_the_collector_of_garbage() -> None:
    run_child(
        """
        import gc, os
        import loaderpool as lp

        def nothing(loader):
            pass

        def an_iterator_that_never_began(loader):
            iter(loader)

        def within_a_pass(loader):
            next(iter(loader))

        def a_pass(loader):
            kept.append(list(loader)[-1])

        def a_pass_that_failed(loader):
            try:
                kept.append(list(loader.replace(fn=lambda item: 1 // (item - 13))))
            except ZeroDivisionError:
                pass

        def use(done, closes):
            loader = lp.Loader(range(20), lambda item: item, batch_size=8, workers=1)
            done(loader)
            if closes:
                loader.close()
            del loader
            kept.clear()

        gc.disable()
        kept = []
        use(a_pass, True)  # imports what it needs
        before = os.listdir("/proc/self/fd")
        for done in (nothing, an_iterator_that_never_began, within_a_pass, a_pass, a_pass_that_failed):
            for closes in (True, False):
                use(done, closes)
                assert os.listdir("/proc/self/fd") == before, (done, closes)
        """
    ).check()


def test_a_read_only_working_directory_and_no_home(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o555)
    code = """
import loaderpool as lp
with lp.Loader(range(20), lambda item: item + 1, batch_size=4, workers=2) as loader:
    print([int(batch[0]) for batch in loader])
"""
    env = {"HOME": None, "XDG_CACHE_HOME": None, "TMPDIR": "/nonexistent"}
    result = run_child(code, timeout_s=60, cwd=tmp_path, env=env).check()
    assert (result.stdout, result.stderr) == ("[1, 5, 9, 13, 17]\n", "")
    assert list(tmp_path.iterdir()) == []


NAMESPACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000):  # CLONE_NEWNS
    print("skip"); raise SystemExit
libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
if SIZE:
    failed = libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m")
else:
    failed = libc.mount(b"/proc", b"/dev/shm", None, 0x1000, None)  # MS_BIND: nothing can be made there
if failed:
    print("skip"); raise SystemExit
import numpy as np
import loaderpool as lp
with lp.Loader(range(40), lambda item: np.full((512, 512), item, np.float32), batch_size=8, workers=2) as loader:
    for epoch in range(2):
        assert [float(batch[0, 0, 0]) for batch in loader] == list(range(0, 40, 8))
print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 1 << 20)
"""


@pytest.mark.parametrize("size", ["1 MiB", "none"])
def test_little_or_no_dev_shm(size: str) -> None:
    result = run_child(f"SIZE = {size != 'none'}\n" + NAMESPACE, timeout_s=60).check()
    if result.stdout == "skip\n":
        pytest.skip("no mount namespace can be made here")
    assert result.stdout == "True\n"
