"""Caches, with deaths and full disks: no entry is incomplete, only work is lost, and nothing is
left behind.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, kill_supervisor, read, read_while
from tests.support.child import run_child

ITEMS = 60

# ---- stores without a loader: a child writes and is killed, repeatedly

STORM = """
import os, random, signal, time
from loaderpool.cache.setting import CachePlan, Count
from loaderpool.cache.store import SharedCache

ITEMS = 200

def value(item):
    return random.Random(item).randbytes(item * 1009 % 200_000)

def write_for_ever(shared, seed):
    store, draws = shared.store(), random.Random(seed)
    while True:
        item = draws.randrange(ITEMS)
        assert store.put(item, value(item)) in (None, Count.OVER_BOUND)

def count_whole(shared):
    store = shared.store()
    found = 0
    for item in range(ITEMS):
        entry = store.get(item)
        assert entry is None or bytes(entry) == value(item), item
        found += entry is not None
    return found

def forked(do):
    pid = os.fork()
    if not pid:
        do()
    return pid

def made(name):
    return SharedCache.create(CachePlan("memory" if WHERE == "memory" else os.path.abspath(name), 64 << 20, ITEMS))

shared = made("cache")
draws = random.Random(5)
for turn in range(12):
    pids = [forked(lambda: write_for_ever(shared, 2 * turn + writer)) for writer in range(2)]
    time.sleep(draws.random() * 0.03)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = count_whole(shared)
assert found > 5, found
shared.close()
shared = made("fresh")  # the other one may be full

def write_half():
    store = shared.store()
    os.lseek = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # between the write and the word that says where
    store.put(2, value(2))

written = os.fstat(shared.store()._log).st_size
assert os.WTERMSIG(os.waitpid(forked(write_half), 0)[1]) == signal.SIGKILL
assert os.fstat(shared.store()._log).st_size > written and shared.store().get(2) is None
assert count_whole(shared) == 0
shared.close()
"""


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_whenever_a_writer_is_killed_each_entry_is_whole_or_not_there(where: str) -> None:
    """At random moments, and just before the entry is listed."""
    run_child(f"WHERE = {where!r}\n{STORM}", timeout_s=100).check()


# ---- loaders


def noted(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def decoder(path: Path, deadly: Callable[[int], bool] = lambda item: False) -> Callable[[int], Any]:
    def decode(item: int) -> Any:
        with open(path, "ab", 0) as file:
            file.write(b"%d\n" % item)
        if deadly(item):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)
        return {"x": np.full((item % 7 + 1, 50), item, np.float32)}

    return decode


def augment(sample: Any, rng: np.random.Generator) -> Any:
    sample["x"] += rng.random()
    return sample["x"].sum(0)


SETTINGS: dict[str, Any] = {"batch_size": 5, "shuffle": True, "augment": augment}


def reference() -> list[Any]:
    with lp.Loader(range(ITEMS), decoder(Path(os.devnull)), workers=0, **SETTINGS) as loader:
        return read(loader, 3)


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return "memory" if request.param == "memory" else tmp_path / "cache"


def test_workers_that_die_in_fn_lose_no_more_than_that_call(where: Any, tmp_path: Path) -> None:
    log, once = tmp_path / "log", tmp_path / "once"

    def deadly(item: int) -> bool:
        marker = Path(f"{once}{item}")
        if item % 9 or marker.exists():
            return False
        marker.touch()
        return True

    with lp.Loader(
        range(ITEMS), decoder(log, deadly), workers=2, cache=where, **SETTINGS
    ) as loader:
        assert_same(read(loader, 3), reference())
        statistics = loader.statistics()
    deaths = statistics.restarts
    assert deaths >= 1
    # Calls that ended their worker. Earlier results of the ticket were cached before.
    assert ITEMS <= len(noted(log)) <= ITEMS + 2 * deaths + 2
    assert ITEMS - 2 * deaths <= statistics.cache.misses <= len(noted(log))


def test_other_workers_and_a_new_supervisor_go_on_with_what_is_kept(
    where: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with lp.Loader(range(ITEMS), decoder(log), workers=1, cache=where, **SETTINGS) as loader:
        batches = read_while(loader, {4: lambda: loader.resize(3)})
        calls = len(noted(log))
        kill_supervisor(loader)
        batches += read_while(loader, {4: lambda: loader.resize(1)}) + read(loader)
        assert loader.statistics().supervisor_restarts == 1
        assert_same(batches, reference())
    assert calls <= ITEMS + 6 and len(noted(log)) == calls


EXEC = """
import sys
sys.path.insert(0, ".")
import warnings
import numpy as np
import loaderpool as lp
import mine
warnings.simplefilter("ignore", lp.LoaderpoolWarning)
with lp.Loader(range(40), mine.decode, batch_size=4, workers=2, cache=CACHE, augment=np.negative) as loader:
    for epoch in range(3):
        assert [int(x) for batch in loader for x in batch] == [-item for item in range(40)]
    statistics = loader.statistics()
    assert statistics.workers_start == "exec"
    assert statistics.cache.hits >= 80, statistics
print(len(open("log").readlines()))
"""
MINE = """
import os, threading, time
if "LOADERPOOL_ROLE" in os.environ:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def decode(item):
    with open("log", "a") as file:
        file.write("x\\n")
    return item
"""


@pytest.mark.parametrize("cache", ["memory", "cache"])
def test_workers_that_are_no_forks_share_it_too(tmp_path: Path, cache: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    result = run_child(f"CACHE = {cache!r}\n{EXEC}", cwd=tmp_path, timeout_s=60).check()
    assert 40 <= int(result.stdout) <= 44


DISK_FULL = """
import ctypes, os, warnings
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000):  # CLONE_NEWNS
    print("skip"); raise SystemExit
libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
os.mkdir("disk")
if libc.mount(b"tmpfs", b"disk", b"tmpfs", 0, b"size=8m"):
    print("skip"); raise SystemExit
import numpy as np
import loaderpool as lp

def decode(item):
    return np.full(30_000, item, np.float64)

for workers in (0, 2):
    directory = f"disk/cache{workers}"
    cache = lp.Cache(directory, MAX_BYTES)
    with lp.Loader(range(60), decode, batch_size=5, workers=workers, cache=cache, augment=np.mean) as loader:
        for epoch in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert [float(x) for batch in loader for x in batch] == [float(item) for item in range(60)]
            texts = [str(each.message) for each in caught if each.category is lp.LoaderpoolWarning]
            assert len(texts) == (epoch == 0), texts
            assert epoch or "the disk is full" in texts[0], texts
        statistics = loader.statistics()
        assert statistics.cache.is_full and statistics.cache.hits > 20 and statistics.cache.misses > 60
        if MAX_BYTES is None:
            assert os.statvfs("disk").f_bavail * os.statvfs("disk").f_frsize > 200_000
    with loader.replace(workers=0) as loader:  # what was stored is whole
        assert [float(x) for batch in loader for x in batch] == [float(item) for item in range(60)]
        assert loader.statistics().cache.damaged == 0 and loader.statistics().cache.hits > 5
    for name in os.listdir(directory):
        os.unlink(f"{directory}/{name}")
print("done")
"""


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_a_full_disk_is_told_once_and_the_training_goes_on(max_bytes: int | None) -> None:
    """Without a limit, a part of the disk stays free. With a limit that is larger than the disk, it
    becomes full.
    """
    result = run_child(f"MAX_BYTES = {max_bytes}\n{DISK_FULL}", timeout_s=60).check()
    if result.stdout == "skip\n":
        pytest.skip("no mount namespace can be made here")
    assert result.stdout == "done\n"
