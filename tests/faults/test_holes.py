"""Faults of an early version, through the public interface. Each of these was observed there."""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.transport.messages import Release
from tests.support.batches import kill_supervisor, supervisor_of
from tests.support.child import run_child
from tests.support.processes import end_all, is_alive, parents, wait_gone, wait_until

DEADLINE_S = 60.0  # limit for steps that take a moment


def children_of(pid: int) -> set[int]:
    return {child for child, parent in parents().items() if parent == pid and is_alive(child)}


def large(item: int) -> Any:
    return np.full(300_000, item, np.float32)


# ---- a fork of the main process


def test_a_fork_that_exits_as_usual_shuts_nothing_down() -> None:
    """Its finalizers shut down the socket that it shared with the main process. Each time, a
    supervisor was lost.
    """
    run_child(
        """
        import os, sys
        import numpy as np
        import loaderpool as lp

        def fn(item):
            return np.full(300_000, item, np.float32)

        if __name__ == "__main__":
            with lp.Loader(range(400), fn, batch_size=1, workers=2) as loader:
                batches = iter(loader)
                kept = next(batches)
                pid = os.fork()
                if not pid:
                    sys.exit(0)
                assert os.waitpid(pid, 0)[1] == 0
                for number in range(1, 200):
                    assert (next(batches) == number).all()
                assert (kept == 0).all()
                assert loader.statistics().supervisor_restarts == 0
        """
    ).check()


# ---- an answer belongs to its ticket


def test_an_error_that_cannot_be_sent_costs_that_batch_only() -> None:
    """The error was dropped, and the next answer was taken for it. Or the worker ended, and the
    pool was broken.
    """

    def fn(item: int) -> Any:
        if item == 34:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
            raise ValueError("y" * 40_000)
        return np.full(1000, item, np.float32)

    got = []
    with lp.Loader(range(400), fn, batch_size=1, workers=2) as loader:
        with pytest.raises(lp.LoaderpoolError):
            for batch in loader:
                got.append(np.unique(batch).tolist())
        assert not loader.statistics().supervisor_restarts
    assert got == [[number] for number in range(34)]


# ---- a channel holds all its messages


def test_a_pool_of_many_loaders_with_long_payloads_recovers_from_its_supervisors_death() -> None:
    """The ninth loader caused an AssertionError in the user's line, and all payloads were sent
    again at once.
    """

    def fn(item: int, table: bytes, number: int) -> Any:
        return item + number + len(table)

    with lp.Pool(2) as pool:
        functions = [
            functools.partial(fn, table=bytes(25_000), number=number) for number in range(20)
        ]
        loaders = [lp.Loader(range(100), each, batch_size=1, workers=pool) for each in functions]
        iterators = [iter(loader) for loader in loaders]
        for number, each in enumerate(iterators):
            assert next(each).tolist() == [number + 25_000]
        assert not loaders[0].statistics().supervisor_restarts
        kill_supervisor(loaders[0])
        for number, each in enumerate(iterators):
            expected = [[item + number + 25_000] for item in range(100)]
            assert [batch.tolist() for batch in each] == expected[1:]
            assert [batch.tolist() for batch in loaders[number]] == expected
        assert loaders[0].statistics().supervisor_restarts == 1


# ---- many open files


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3000,
    reason="this user may not open so many files",
)
def test_a_main_process_with_more_than_1024_open_files_gets_its_batches() -> None:
    """`select` accepts no descriptor above 1,023: the first `next` raised a ValueError."""
    run_child(
        """
        import os, resource
        import loaderpool as lp

        if __name__ == "__main__":
            resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
            files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
            with lp.Loader(range(64), float, batch_size=4, workers=2) as loader:
                assert [batch[0] for batch in loader] == list(range(0, 64, 4))
        """
    ).check()


# ---- processes that are stopped


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_pool_with_a_stopped_supervisor_ends(end: str) -> None:
    """`close` and the end of the program waited for it forever."""
    loaders = [lp.Loader(range(400), large, batch_size=1, workers=2)]
    next(iter(loaders[0]))
    supervisor = supervisor_of(loaders[0])
    workers = sorted(children_of(supervisor))

    def end_it() -> None:
        loader = loaders.pop()
        if end == "close":
            loader.close()

    ending = threading.Thread(target=end_it, daemon=True)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        ending.start()
        ending.join(DEADLINE_S)
        assert not ending.is_alive()
        assert not wait_gone([supervisor, *workers], DEADLINE_S)
    finally:
        end_all([supervisor])


class Stopped:
    """Context with a loader whose supervisor is stopped."""

    def __init__(self) -> None:
        self.loader = lp.Loader(range(400), np.int64, batch_size=4, workers=2)
        self.rows = [int(row) for batch in self.loader for row in batch]
        self.supervisor = supervisor_of(self.loader)

    def __enter__(self) -> None:
        os.kill(self.supervisor, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self.supervisor, signal.SIGCONT)

    def in_a_thread(self, work: Callable[[], object]) -> None:
        """Run a function in a thread, which must end."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def resize_often(loader: lp.Loader, last: int) -> None:
    for number in range(10_000):
        loader.resize(1 + number % 2)
    loader.resize(last)


def has_workers(loader: lp.Loader, count: int) -> bool:
    return len(loader.statistics().workers) == count


def test_resizing_beside_a_stopped_supervisor_waits_for_nobody() -> None:
    """After some 2,700 calls it waited for room in the channel, and Ctrl-C did not end the wait."""
    stopped = Stopped()
    with stopped.loader as loader:
        with stopped:
            stopped.in_a_thread(lambda: resize_often(loader, last=3))
        wait_until(lambda: has_workers(loader, 3), DEADLINE_S)
        assert [int(row) for batch in loader for row in batch] == stopped.rows


def test_a_supervisor_in_a_stopped_ones_place_has_the_latest_size() -> None:
    stopped = Stopped()
    with stopped.loader as loader:
        os.kill(stopped.supervisor, signal.SIGSTOP)  # it never continues
        stopped.in_a_thread(lambda: resize_often(loader, last=3))
        assert [int(row) for batch in loader for row in batch] == stopped.rows
        wait_until(lambda: has_workers(loader, 3), DEADLINE_S)
        stopped.in_a_thread(lambda: resize_often(loader, last=1))
        wait_until(lambda: has_workers(loader, 1), DEADLINE_S)


def test_one_resize_at_most_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped()
    with stopped.loader as loader, stopped:
        sent: list[Any] = []
        session = loader._core.pool.worker_pool.session  # type: ignore[union-attr]
        send = session.send
        monkeypatch.setattr(session, "send", lambda message: (sent.append(message), send(message)))
        resize_often(loader, last=2)
        assert len(sent) == 1


def test_a_full_channel_ends_a_stopped_supervisor(tmp_path: Path) -> None:
    """No call can fill it, unless a bound is wrong."""
    stopped = Stopped()
    with stopped.loader as loader:
        session = loader._core.pool.worker_pool.session  # type: ignore[union-attr]
        os.kill(stopped.supervisor, signal.SIGSTOP)
        stopped.in_a_thread(lambda: [session.send(Release(0, 0, 0)) for _ in range(10_000)])
        assert [int(row) for batch in loader for row in batch] == stopped.rows


# ---- a slow import


@pytest.mark.parametrize("end", ["loader.close()", "", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_supervisor_that_imports_a_slow_module_ends_with_its_pool(
    end: str, tmp_path: Path
) -> None:
    """`close` and the exit waited for the end of the import."""
    (tmp_path / "slow_module.py").write_text(
        "import pathlib, time\n"
        "from loaderpool.system import process\n"
        "if not process.is_trainer():\n"
        "    pathlib.Path('imported').touch()\n"
        "    time.sleep(3600)\n"
        "def fn(item):\n"
        "    return item\n"
    )
    ended = run_child(
        f"""
        import os, signal, sys, time
        sys.path.insert(0, os.getcwd())
        import loaderpool as lp
        import slow_module

        if __name__ == "__main__":
            loader = lp.Loader(range(8), slow_module.fn, batch_size=4, workers=1)
            while not os.path.exists("imported"):
                time.sleep(0.01)
            {end or "pass"}
        """,
        cwd=tmp_path,
    )
    assert ended.returncode == (-signal.SIGKILL if "SIGKILL" in end else 0), ended.stderr


# ---- memory of lost supervisors


def batch_files() -> dict[str, str]:
    """Return the files with slots that this process has mapped: their inodes, and a path of
    each.
    """
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        line[4]: f"/proc/self/map_files/{line[0]}"
        for line in mapped
        if "/memfd:loaderpool-batches" in line
    }


def may_look_at_mapped_files() -> bool:
    try:
        return any(os.stat(each) for each in Path("/proc/self/map_files").iterdir())
    except OSError:
        return False


@pytest.mark.skipif(not may_look_at_mapped_files(), reason="this user may not look at mapped files")
def test_kept_batches_of_lost_supervisors_keep_no_memory_but_their_own() -> None:
    """One kept row kept the memory of a whole file: 374, 741, 1,107, 1,473 MB after three
    deaths.
    """
    row_bytes, kept, before = 1 << 19, [], batch_files().keys()

    def taken() -> list[int]:
        return [
            os.stat(where).st_blocks * 512
            for file, where in batch_files().items()
            if file not in before
        ]

    def fn(item: int) -> Any:
        return np.full(row_bytes // 4, item, np.float32)

    with lp.Loader(range(4000), fn, batch_size=1, workers=2) as loader:
        batches = iter(loader)
        kept.append(next(batches))
        for death in range(3):
            wait_until(lambda: max(taken()) >= (loader.statistics().memory.buffers - 2) * row_bytes)
            kill_supervisor(loader)
            # until there is a batch of the next supervisor
            while sum(map(bool, taken())) < death + 2:
                next(batches)
            kept.append(next(batches))
        wait_until(lambda: max(taken()) >= (loader.statistics().memory.buffers - 2) * row_bytes)
        *lost, _ = sorted(taken())
        assert (
            0 < sum(lost) <= 4 * len(kept) * row_bytes
        )  # a slot may have two rows, and be the first of its file
        for batch in kept:  # kept batches have not changed
            assert np.unique(batch).tolist() == [batch[0, 0]]
        kept.clear()
        del batch
        wait_until(lambda: len(taken()) == 1)


def test_a_lost_supervisors_memory_goes_with_it_though_no_garbage_is_collected() -> None:
    """Each supervisor takes a terabyte of address space, of which there are 128."""

    def rows(loader: lp.Loader) -> list[float]:
        return [float(row) for batch in loader for row in batch]

    before = batch_files().keys()
    gc.collect()
    gc.disable()
    try:
        with lp.Pool(1) as pool:
            first = lp.Loader(range(16), float, batch_size=4, workers=pool)
            for deaths in range(1, 5):
                second = lp.Loader(range(16), float, batch_size=4, workers=pool)
                assert rows(first) == rows(second) == list(range(16))
                kill_supervisor(first)
                for _ in range(3):
                    assert rows(first) == rows(second) == list(range(16))
                assert first.statistics().supervisor_restarts == deaths
                second.close()
                assert len(batch_files().keys() - before) == 1
    finally:
        gc.enable()


# ---- loaders made while supervisors die


def test_a_loader_that_is_made_as_the_supervisor_is_replaced_gets_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next supervisor never got the loader, and `next` waited forever."""
    from loaderpool.engine import version

    with lp.Pool(1) as pool:
        first = lp.Loader(range(400), large, batch_size=4, workers=pool)
        batches = iter(first)
        next(batches)
        put = version.Sent

        def die_meanwhile(*arguments: Any) -> Any:
            kill_supervisor(first)
            other.start()  # reads all messages, and starts another supervisor
            other.join(1.0)
            return put(*arguments)

        other = threading.Thread(target=lambda: [next(batches) for _ in range(40)])

        monkeypatch.setattr(version, "Sent", die_meanwhile)
        second = lp.Loader(range(8), float, batch_size=4, workers=pool)
        monkeypatch.setattr(version, "Sent", put)
        assert [batch.tolist() for batch in second] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        other.join(DEADLINE_S)
        assert not other.is_alive()
        assert next(batches)[0, 0] == 4 * 41
