"""`multiprocessing.shared_memory` in workers: a segment lives until the program unlinks it,
whatever process dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.managers import SharedMemoryManager
from multiprocessing.shared_memory import ShareableList, SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import indices_in, kill_supervisor, kill_worker
from tests.support.child import run_child
from tests.support.processes import command_of, descendants, wait_until
from tests.support.samples import StartsThread

STARTS = ("fork", "exec", "spawn")
# One tracker for the whole test run, so it does not count as a leak of a test.
resource_tracker.ensure_running()
TRACKERS = {resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    made = SharedMemory(create=True, size=64)
    made.buf[0] = 7
    try:
        yield made
    finally:
        made.close()
        made.unlink()


@contextmanager
def loader_of(start: str, fn: Callable[[Any], Any], items: Any = range(400)) -> Iterator[lp.Loader]:
    """Return a loader with two workers that start in one of three ways."""
    kept = StartsThread() if start == "exec" else None
    pool = lp.Pool(2, start="spawn" if start == "spawn" else "fork")
    with (
        pool,
        lp.Loader(items, lambda item: (kept, fn(item))[1], batch_size=4, workers=pool) as loader,
    ):
        yield loader
        assert loader.statistics().workers_start == start


def first_byte(name: str) -> Any:
    attached = SharedMemory(name=name)
    try:
        return np.int64(attached.buf[0])
    finally:
        attached.close()


def is_there(name: str) -> bool:
    return Path("/dev/shm", name.lstrip("/")).exists()


def settled() -> None:
    """Wait until every worker's own tracker has ended, and has unlinked its segments."""

    def are_gone() -> bool:
        others = set(descendants(os.getpid())) - TRACKERS
        return not any("resource_tracker import" in command_of(pid) for pid in others)

    wait_until(are_gone)


def resize(loader: lp.Loader) -> None:
    before = {worker.pid for worker in loader.statistics().workers}
    loader.resize(1)
    wait_until(lambda: len({worker.pid for worker in loader.statistics().workers} & before) < 2)


ENDS: dict[str, Callable[[lp.Loader], object]] = {
    "resize": resize,
    "worker killed": kill_worker,
    "supervisor killed": kill_supervisor,
}


@pytest.mark.filterwarnings("ignore:Workers are started without fork")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("start", STARTS)
def test_a_segment_outlives_workers_that_attached(
    segment: SharedMemory, start: str, end: str
) -> None:
    if (start, end) == ("spawn", "supervisor killed"):
        pytest.skip("their supervisor is a thread of the main process")
    name = segment.name
    with loader_of(start, lambda item: first_byte(name)) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [7] * 4
        ENDS[end](loader)
        settled()
        assert is_there(name)
        assert indices_in(batches) == [7] * 396
    settled()
    assert is_there(name)


@pytest.mark.filterwarnings("ignore:Workers are started without fork")
@pytest.mark.parametrize("start", STARTS)
def test_a_captured_segment_outlives_its_loader(segment: SharedMemory, start: str) -> None:
    with loader_of(start, lambda item: np.int64(segment.buf[0])) as loader:
        batches = iter(loader)
        next(batches)
        if start != "spawn":
            kill_supervisor(loader)
        kill_worker(loader)
        assert indices_in(batches) == [7] * 396
    settled()
    assert is_there(segment.name)


@pytest.mark.may_leak("from Python 3.14 on, the process that forks managers stays")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_segments_of_a_manager_outlive_workers(start: str) -> None:
    with SharedMemoryManager() as manager:
        segment, values = manager.SharedMemory(64), manager.ShareableList([5, 6])
        name, of_values = segment.name, values.shm.name

        def both(item: int) -> Any:
            attached = ShareableList(name=of_values)
            try:
                return np.int64(first_byte(name) + attached[1])
            finally:
                attached.shm.close()

        with loader_of(start, both) as loader:
            batches = iter(loader)
            assert next(batches).tolist() == [6] * 4
            kill_worker(loader)
            settled()
            assert indices_in(batches) == [6] * 396
        settled()
        assert is_there(name) and is_there(of_values)
        segment.close()
        values.shm.close()
    assert not is_there(name) and not is_there(of_values)


def test_a_streams_process_unlinks_no_segment(segment: SharedMemory) -> None:
    name = segment.name

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            yield from (first_byte(name) for _ in range(40))

    with lp.Loader(Stream(), batch_size=4, workers=1) as loader:
        for _ in range(2):
            assert indices_in(loader) == [7] * 40
    settled()
    assert is_there(name)


def test_a_segment_of_a_worker_outlives_the_worker() -> None:
    """If the main process has a tracker, that one unlinks the segment at its end, as for a child of
    `multiprocessing`.
    """

    def make(item: int) -> Any:
        name = f"loaderpool-test-{os.getpid()}-{item}"
        made = SharedMemory(name, create=True, size=64)
        made.buf[0] = 5
        made.close()
        return name

    with loader_of("fork", make, range(8)) as loader:
        names = [name for batch in loader for name in batch.tolist()]
        kill_worker(loader)
        kill_supervisor(loader)
    settled()
    for name in names:
        assert first_byte(name) == 5
        SharedMemory(name=name).unlink()


def test_a_worker_may_unlink_the_trainers_segment() -> None:
    child = run_child(
        """
        from multiprocessing.shared_memory import SharedMemory
        import loaderpool as lp

        segment = SharedMemory(create=True, size=64)

        def unlink(item, name=segment.name):
            if item == 5:
                SharedMemory(name=name).unlink()
            return item

        with lp.Loader(range(8), unlink, batch_size=4, workers=2) as loader:
            list(loader)
        segment.close()
        """
    ).check()
    assert child.stderr == ""


# ---- without a tracker in the main process


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_segment_made_after_the_loader_outlives_workers(start: str) -> None:
    """The main process has no tracker when the loader is made."""
    child = run_child(
        f"""
        import os, time
        import loaderpool as lp
        from tests.support.batches import kill_worker

        name = f"loaderpool-test-{{os.getpid()}}"

        def look(item):
            from multiprocessing.shared_memory import SharedMemory
            try:
                segment = SharedMemory(name=name)
            except (FileNotFoundError, ValueError):  # not made yet, or still empty
                return -1
            found = segment.buf[0]
            segment.close()
            return found

        pool = lp.Pool(2, start={start!r})
        with lp.Loader(range(4000), look, batch_size=4, workers=pool) as loader:
            batches = iter(loader)
            next(batches)
            from multiprocessing.shared_memory import SharedMemory
            segment = SharedMemory(name, create=True, size=64)
            segment.buf[0] = 7
            while 7 not in next(batches):
                pass
            kill_worker(loader)
            assert next(batches) is not None
        pool.close()
        time.sleep(0.5)
        assert os.path.exists("/dev/shm/" + name)
        segment.close()
        segment.unlink()
        """
    ).check()
    assert child.stderr == ""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_nothing_starts_a_tracker_that_nobody_needs(start: str) -> None:
    run_child(
        f"""
        import os
        import multiprocessing.shared_memory
        import loaderpool as lp
        from tests.support.processes import command_of, descendants

        with lp.Pool(2, start={start!r}) as pool, lp.Loader(range(40), workers=pool) as loader:
            list(loader)
            commands = [command_of(pid) for pid in descendants(os.getpid())]
            assert commands and not [each for each in commands if "multiprocessing.resource_tracker" in each], commands
        """
    ).check()


@pytest.mark.parametrize("end", ["pool.close()", "os.kill(os.getpid(), 9)"])
def test_a_segment_that_nobody_unlinks_is_unlinked(end: str) -> None:
    """A worker has made it, and the main process has no tracker."""
    child = run_child(
        f"""
        import os
        import loaderpool as lp

        def make(item):
            from multiprocessing.shared_memory import SharedMemory
            made = SharedMemory(f"loaderpool-test-{{os.getpid()}}-{{item}}", create=True, size=64)
            print(made.name, flush=True)
            made.close()
            return item

        pool = lp.Pool(2)
        list(lp.Loader(range(8), make, batch_size=4, workers=pool))
        {end}
        """
    )
    names = child.stdout.split()
    assert len(names) == 8
    wait_until(lambda: not [name for name in names if is_there(name)])


@pytest.mark.parametrize("ends", ["", "loader.close()"])
def test_the_exit_waits_for_no_process_of_a_pool(ends: str) -> None:
    """At their exit, newer Pythons wait for their tracker, which waits for all processes that can
    write to it.
    """
    run_child(
        f"""
        import time
        from multiprocessing.shared_memory import SharedMemory
        import loaderpool as lp

        segment = SharedMemory(create=True, size=64)

        class Stream:
            def __iter__(self):
                for item in range(1000):
                    attached = SharedMemory(name=segment.name)
                    made = SharedMemory(create=True, size=64)
                    yield item
                    if item == 20:
                        time.sleep(600)

        def slow(item):
            attached = SharedMemory(name=segment.name)
            made = SharedMemory(create=True, size=64)
            time.sleep(0 if item < 8 else 600)
            return item

        loaders = [lp.Loader(source, slow, batch_size=4, workers=2) for source in (range(400), Stream())]
        for loader in loaders:
            next(iter(loader))
        for loader in loaders:
            {ends or "pass"}
        segment.unlink()
        """,
        timeout_s=40,
    ).check()


def test_a_segment_outlives_children_of_a_worker(tmp_path: Path) -> None:
    """`multiprocessing` passes the main process's tracker to the children of a worker."""
    (tmp_path / "looks.py").write_text(
        "from multiprocessing.shared_memory import SharedMemory\n"
        "def look(name):\n"
        "    segment = SharedMemory(name=name)\n"
        "    try:\n"
        "        return segment.buf[0]\n"
        "    finally:\n"
        "        segment.close()\n"
    )
    child = run_child(
        """
        import multiprocessing, os, sys, time
        from multiprocessing.shared_memory import SharedMemory
        import loaderpool as lp
        sys.path.insert(0, os.getcwd())
        from looks import look

        segment = SharedMemory(create=True, size=64)
        segment.buf[0] = 7

        def by_children(item, name=segment.name):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return sum(pool.map(look, [name, name]))

        with lp.Loader(range(4), by_children, batch_size=2, workers=1) as loader:
            assert [batch.tolist() for batch in loader] == [[14, 14], [14, 14]]
        time.sleep(0.5)
        assert look(segment.name) == 7
        segment.close()
        segment.unlink()
        """,
        cwd=tmp_path,
    ).check()
    assert "shared_memory" not in child.stderr and "Error" not in child.stderr
