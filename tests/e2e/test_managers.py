"""Proxies of `multiprocessing.Manager()` in workers connect to their manager, as in the manager's
own children.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import indices_in, kill_supervisor, kill_worker, supervisor_of
from tests.support.child import run_child
from tests.support.samples import StartsThread


@pytest.fixture(scope="module")
def manager() -> Iterator[SyncManager]:
    # Not spawned, because that would run pytest again. No thread runs here, so a fork is safe.
    with multiprocessing.get_context("fork").Manager() as made:
        yield made


@pytest.mark.filterwarnings("ignore:Workers are started without fork")
@pytest.mark.parametrize("start", ["fork", "exec", "spawn"])
def test_workers_share_a_managers_dict(manager: SyncManager, start: str) -> None:
    cache, kept = manager.dict(), StartsThread() if start == "exec" else None

    def square(item: int) -> Any:
        assert kept is None or start == "exec"
        if item not in cache:
            cache[item] = item * item
        return np.int64(cache[item])

    pool = lp.Pool(2, start="spawn" if start == "spawn" else "fork")
    with pool, lp.Loader(range(80), square, batch_size=4, workers=pool) as loader:
        assert indices_in(loader) == [item * item for item in range(80)]
        assert loader.statistics().workers_start == start
    assert cache.copy() == {item: item * item for item in range(80)}


def test_a_managers_lock_guards_its_value(manager: SyncManager) -> None:
    lock, counter = manager.Lock(), manager.Value("i", 0)

    def count(item: int) -> int:
        with lock:
            counter.value += 1
        return item

    with lp.Loader(range(100), count, batch_size=4, workers=2) as loader:
        list(loader)
    assert counter.value >= 100  # the first samples are made twice


def test_new_workers_and_supervisors_know_the_manager(manager: SyncManager) -> None:
    seen = manager.dict()

    def note(item: int) -> int:
        seen[item] = os.getpid()
        return item

    with lp.Loader(range(4000), note, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        kill_worker(loader)
        kill_supervisor(loader)
        assert indices_in(batches) == list(range(4, 4000))
    assert len(seen) == 4000


def test_a_stream_reads_from_a_managers_queue(manager: SyncManager) -> None:
    queue = manager.Queue()
    for item in (3, 1, 2, None):
        queue.put(item)

    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(queue.get, None)

    with lp.Loader(Stream(), batch_size=3, workers=1) as loader:
        assert next(iter(loader)).tolist() == [3, 1, 2]
        assert "the stream is read in a separate process" in loader.statistics().notes


def test_a_proxy_that_a_module_used_is_not_shared(manager: SyncManager, tmp_path: Path) -> None:
    """Each fork gets its own connection. Otherwise any worker could read the answers of another
    one.
    """
    values = manager.dict({item: item for item in range(200)})

    class UsedAtOnce:
        def __init__(self, proxy: Any) -> None:
            self.proxy = proxy

        def __setstate__(self, state: Any) -> None:
            self.__dict__.update(state)
            assert self.proxy[0] == 0  # called in the supervisor, whose connection stays open

    used = UsedAtOnce(values)
    with lp.Loader(range(200), lambda item: used.proxy[item], batch_size=4, workers=3) as loader:
        assert indices_in(loader) == list(range(200))


def test_no_list_of_processes_shows_the_key(manager: SyncManager) -> None:
    key = bytes(multiprocessing.current_process().authkey)
    cache = manager.dict()

    def shown(item: int) -> Any:
        cache[item] = True
        texts = [Path(f"/proc/{pid}/{name}").read_bytes() for pid in (os.getpid(), os.getppid()) for name in
                 ("cmdline", "environ")]  # fmt: skip
        own = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
        return any(key in text or key.hex().encode() in text for text in [*texts, *own])

    with lp.Loader(range(8), shown, batch_size=4, workers=2) as loader:
        assert not np.concatenate(list(loader)).any()
        assert supervisor_of(loader)


def test_a_manager_made_after_the_pool_is_known() -> None:
    """Even if nothing had imported `multiprocessing` when the pool started."""
    run_child(
        """
        import sys
        import loaderpool as lp

        with lp.Pool(2) as pool:
            with lp.Loader(range(8), workers=pool) as loader:
                list(loader)
            assert "multiprocessing.process" not in sys.modules
            import multiprocessing
            with multiprocessing.get_context("fork").Manager() as manager:
                seen = manager.dict()
                list(lp.Loader(range(8), lambda item: (seen.update({item: 1}), item)[1], batch_size=4, workers=pool))
                assert sorted(seen.keys()) == list(range(8))
        """
    ).check()


def test_a_manager_with_another_key_is_explained() -> None:
    run_child(
        """
        import multiprocessing
        from multiprocessing.managers import SyncManager
        import loaderpool as lp

        manager = SyncManager(authkey=b"of its own", ctx=multiprocessing.get_context("fork"))
        manager.start()
        seen = manager.dict()

        def note(item):
            seen[item] = 1
            return item

        try:
            list(lp.Loader(range(8), note, batch_size=4, workers=2))
        except lp.SetupError as error:
            assert "Set multiprocessing.current_process().authkey" in str(error), error
        multiprocessing.current_process().authkey = b"of its own"
        list(lp.Loader(range(8), note, batch_size=4, workers=2))
        assert sorted(seen.keys()) == list(range(8))
        manager.shutdown()
        """
    ).check()
