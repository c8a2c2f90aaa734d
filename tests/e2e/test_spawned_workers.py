"""Spawned workers make the same bits as other workers, also after deaths, and on systems without a
fork.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import signal
import sys
import textwrap
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.supervisor.state import State
from loaderpool.system import machine
from tests.support.batches import assert_same, kill_worker, read, read_while, told_when
from tests.support.child import run_child
from tests.support.notes import bytes_copied, bytes_shared, notes
from tests.support.processes import count_fds, is_alive, wait_gone
from tests.support.samples import noisy_image

SUPPORT = Path(__file__).parents[1] / "support"
SHAPES = (
    "single batches",
    "written into out",
    "threads",
    "coroutines",
    "chunks of tiny batches",
    "global random streams",
    "row ranges of slow batches",
    "varying, padded",
    "by length, padded",
    "ragged and text",
    "oversize batches",
    "rows fail, skip",
    "whole elements",
    "batch_fn",
    "from_sequence, hooks",
)
QUICK = (
    "coroutines",
    "chunks of tiny batches",
    "row ranges of slow batches",
    "oversize batches",
    "from_sequence, hooks",
)
# One tracker for the whole test run, so it does not count as a leak of a test.
resource_tracker.ensure_running()


def loader_of(workers: int | lp.Pool, items: int = 600, **settings: Any) -> lp.Loader:
    return lp.Loader(
        range(items), noisy_image, batch_size=6, shuffle=True, seed=3, workers=workers, **settings
    )


def spawned(workers: int = 2, **settings: Any) -> lp.Pool:
    return lp.Pool(workers, start="spawn", **settings)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES],
)
def test_spawned_workers_make_the_same_bits(shapes: ModuleType, tmp_path: Path, name: str) -> None:
    """In two epochs, while some items end their workers."""
    shape = shapes.SHAPES[name]

    def made(faults_one_in: int, **where: Any) -> list[Any]:
        faults = shapes.Faults(str(tmp_path), os.getpid(), faults_one_in)
        with shapes.make(shape, faults, 7, **where) as loader:
            return read(loader, passes=2)

    with spawned(restarts=None) as pool:
        assert_same(made(2 * shape.faults_one_in, workers=pool), made(0, workers=0))


def test_the_supervisor_looks_for_deaths_several_times_a_second() -> None:
    with lp.Pool(1, start="spawn") as pool, lp.Loader(range(8), workers=pool) as loader:
        list(loader)
        supervisor: Any = pool.worker_pool.session
        assert supervisor._supervisor._ticks.every_ms <= 200


def test_a_large_array_and_a_captured_one_are_copied_and_writes_stay_private() -> None:
    rows, captured = np.arange(3_000_000.0).reshape(100, -1), np.ones(500_000)

    def overwrites(row: Any) -> Any:
        captured[:] = captured[0] + 0  # only this worker's copy changes
        total = row.sum() * captured[-1]
        row[:] = 0
        return total

    with (
        spawned() as pool,
        lp.Loader(rows.copy(), overwrites, batch_size=5, workers=pool) as loader,
    ):
        got = np.concatenate(list(loader))
        statistics = loader.statistics()
    assert got.tolist() == rows.sum(axis=1).tolist()
    assert bytes_shared(statistics) == 0
    assert bytes_copied(statistics) == rows.nbytes + captured.nbytes
    assert "spawned" in notes(statistics, "copied into")[0]


def test_workers_die_come_and_go_and_a_second_loader_shares_them() -> None:
    with loader_of(0) as loader, loader_of(0, items=90) as other:
        expected, of_other = read(loader, passes=3), read(other)
    with spawned(1) as pool, loader_of(pool) as loader, loader_of(pool, items=90) as other:
        kill = functools.partial(kill_worker, loader)
        got = read_while(loader, {5: kill, 40: kill}) + read_while(loader, {80: kill})
        told_when(loader, lambda told: told.restarts >= 2)
        others = iter(other)
        more = read(itertools.islice(others, 5))
        got += read_while(loader, {10: lambda: pool.resize(3), 60: lambda: pool.resize(1)})
        more += read(others)
    assert_same(got, expected)
    assert_same(more, of_other)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raises", KeyError, "no such frame"),
        ("hangs", lp.SampleTimeoutError, r"longer than Limits\(timeout_s=0\.5\)"),
        ("falls", lp.WorkerLostError, "SIGSEGV"),
        ("closes", lp.WorkerLostError, "closed file descriptors"),
    ],
)
def test_what_ends_a_sample_is_told(
    how: str, error: Any, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def fn(item: int) -> int:
        if item == 9:
            if how == "raises":
                raise KeyError("no such frame")
            if how == "falls":
                import ctypes

                ctypes.string_at(0)
            if how == "closes":
                os.closerange(3, 1000)
            while how == "hangs":
                time.sleep(0.01)
        return item

    limits, got = lp.Limits(timeout_s=0.5 if how == "hangs" else None), list[int]()
    with (
        spawned(1) as pool,
        lp.Loader(range(20), fn, batch_size=4, workers=pool, limits=limits) as loader,
    ):
        with pytest.raises(error, match=said) as caught:
            for batch in loader:
                got += batch.tolist()
        del batch
    assert got == list(range(8)) and (how == "closes" or caught.value.index == 9)
    assert how != "raises" or (
        isinstance(caught.value, lp.SampleError) and "in fn" in str(caught.value)
    )
    assert how != "falls" or "in fn" in capfd.readouterr().err
    assert "loaderpool-commands" not in str(caught.value) and "connection.py" not in str(
        caught.value
    )


def test_a_payload_that_cannot_be_loaded_is_told() -> None:
    class Loads:
        def __call__(self, item: int) -> int:
            return item

        def __setstate__(self, state: Any) -> None:
            raise RuntimeError("not here")

        def __getstate__(self) -> Any:
            return {"a": 1}

    pool = spawned(1)
    with (
        pool,
        lp.Loader(range(20), Loads(), workers=pool) as loader,
        pytest.raises(lp.LoaderpoolError, match="not here"),
    ):
        list(loader)


def test_a_process_that_a_worker_has_forked_holds_up_nothing(tmp_path: Path) -> None:
    """The process has the worker's end of the connection, so it does not end with the worker."""
    forked = tmp_path / "forked"

    def forks(item: int) -> int:
        if item == 7 and not forked.exists():
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            forked.write_text(str(child))
            os._exit(1)
        return item

    try:
        with spawned(1) as pool, lp.Loader(range(20), forks, batch_size=1, workers=pool) as loader:
            assert [int(batch[0]) for batch in loader] == list(range(20))
            assert loader.statistics().restarts == 1
    finally:
        os.kill(int(forked.read_text()), signal.SIGKILL)


def test_what_workers_have_in_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    names = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHASHSEED", "LOADERPOOL_ROLE"]

    def found(item: int) -> Any:
        return "|".join(
            [*(os.environ.get(name, "-") for name in names), *{"a", "b", "c", "d", "e"}]
        )

    with spawned(3) as pool, lp.Loader(range(60), found, batch_size=1, workers=pool) as loader:
        seen = {str(batch[0]) for batch in loader}
    assert len(seen) == 1, "sets have one order in all of them"
    assert seen.pop().startswith("|1|0|worker|")
    assert os.environ["PYTHONHASHSEED"] == "random"


@pytest.mark.parametrize("status", ["exit 3", "kill -9 $$"])
def test_worker_that_dies_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str
) -> None:
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(
        f"#!/bin/sh\necho >> {starts}\n[ $(wc -l < {starts}) -le 3 ] && {status}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with spawned(1) as pool, loader_of(pool, items=60) as loader:
        got = read(loader)
        assert loader.statistics().restarts == 3
    with loader_of(0, items=60) as loader:
        assert_same(got, read(loader))


def test_workers_that_never_start_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (
        spawned() as pool,
        loader_of(pool, items=60) as loader,
        pytest.raises(lp.LoaderpoolError, match="exited with status 3 before it started"),
    ):
        read(loader)


def test_interpreter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with (
        spawned() as pool,
        loader_of(pool, items=60) as loader,
        pytest.raises(
            lp.LoaderpoolError, match=r"sys\.executable is .*python, which cannot be run"
        ),
    ):
        read(loader)


def test_worker_that_dies_while_it_loads_is_replaced(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"

    class Dies:
        def __call__(self, item: int) -> int:
            return item

        def __getstate__(self) -> Any:
            return {"a": 1}

        def __setstate__(self, state: Any) -> None:
            if not loaded.exists():
                loaded.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    with spawned(1) as pool, lp.Loader(range(20), Dies(), batch_size=5, workers=pool) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(20))
        assert loader.statistics().restarts == 1


def test_deaths_leave_no_descriptor_open() -> None:
    with spawned(1) as pool, loader_of(pool, items=90) as loader:
        kill = functools.partial(kill_worker, loader)
        read_while(loader, {2: kill})
        told_when(loader, lambda told: told.restarts >= 1)
        before = count_fds(os.getpid())
        read_while(loader, {2: kill, 8: kill})
        told_when(loader, lambda told: told.restarts >= 3)
        read(loader)
        assert count_fds(os.getpid()) == before


def test_another_way_to_start_is_refused() -> None:
    with pytest.raises(lp.ArgumentError, match='start must be "fork", "spawn" or None'):
        lp.Pool(1, start="thread")  # type: ignore[arg-type]


def test_where_there_is_no_memfd_a_pool_is_spawned_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with loader_of(2, items=60) as loader:
        got = read(loader)
        assert loader.statistics().workers_start == "spawn"
    with loader_of(0, items=60) as loader:
        assert_same(got, read(loader))
    with pytest.raises(lp.ArgumentError, match="memfd_create"):
        lp.Pool(1, start="fork")
    with pytest.raises(lp.ArgumentError, match='cache="memory" needs workers'):
        lp.Loader(range(4), abs, workers=1, cache="memory")


@pytest.fixture
def refused_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seccomp filter that refuses memfd_create, as `SystemCallFilter=~memfd_create` of systemd."""

    def refused(*_: object) -> Any:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refused)


@pytest.mark.usefixtures("refused_memfd")
def test_refused_memfd_spawns_workers_with_a_warning() -> None:
    with pytest.warns(
        lp.LoaderpoolWarning, match=r"refuses memfd_create \(Operation not permitted\)"
    ):
        loader = loader_of(2, items=60)
    with loader:
        got = read(loader)
        assert loader.statistics().workers_start == "spawn"
    with loader_of(0, items=60) as loader:
        assert_same(got, read(loader))


@pytest.mark.usefixtures("refused_memfd")
def test_spawned_pool_needs_no_memfd() -> None:
    with spawned(1) as pool, loader_of(pool, items=60) as loader:  # a warning would be an error
        assert read(loader)
    assert lp.share(np.arange(5)).tolist() == list(range(5))


@pytest.mark.usefixtures("refused_memfd")
def test_refused_memfd_is_named() -> None:
    with pytest.raises(
        lp.ArgumentError,
        match=r"memfd_create, which this system refuses \(Operation not permitted\)",
    ):
        lp.Pool(1, start="fork")
    with pytest.raises(lp.CacheError, match="memfd_create"):
        lp.Loader(range(4), abs, workers=0, cache="memory")
    with pytest.raises(OSError, match="allow memfd_create in the seccomp profile"):
        machine.create_memory_file("batches")


def test_batches_that_are_kept_outlive_the_pool_and_workers_do_not() -> None:
    pool = spawned(1)
    with loader_of(pool, items=30) as loader:
        kept = list(loader)
        pids = [worker.pid for worker in loader.statistics().workers if worker.pid]
    assert pids and all(map(is_alive, pids))
    pool.close()
    assert wait_gone(pids, 5) == []
    with loader_of(0, items=30) as loader:
        assert_same(kept, read(loader))


# ---- processes of their own ----


def system_env(system: str, folder: Path) -> dict[str, str]:
    """Environment of a child that finds another system: "darwin", "win32", "no memfd" or, "", this one."""
    if not system:
        return {}
    site = SUPPORT / ("without_memfd" if system == "no memfd" else "elsewhere")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return {"ELSEWHERE": system, "ELSEWHERE_MEMORY": str(folder), "PYTHONPATH": path}


ANOTHER_SYSTEM = """
    import numpy as np
    import loaderpool as lp
    from loaderpool.system import machine

    assert not hasattr(machine.os, "fork") and not hasattr(machine.os, "memfd_create"), "it is hidden from loaderpool"
    assert machine.sys.platform == "{platform}"
    rows = np.arange(300_000.0).reshape(60, -1)

    def fn(row, rng):
        import loaderpool.system.machine as there
        assert not hasattr(there.os, "fork"), "nor do workers find it"
        return {{"row": row * 2, "noise": rng.random(3), "length": np.arange(len(row) % 7)}}

    def draws(rng):
        for number in range(30):
            yield number, rng.random(2)

    class Numbers:
        def __iter__(self):
            return iter(range(30))

    def made(workers):
        got = []
        with lp.Loader(rows, fn, batch_size=4, shuffle=True, seed=3, workers=workers) as loader:
            got += [leaf.copy() for _ in range(2) for batch in loader for leaf in batch.values()]
            starts = loader.statistics().workers_start
        with lp.Loader({lines!r} and lp.TextLines({lines!r}), batch_size=3, workers=workers) as loader:
            got += [batch.copy() for batch in loader]
        with lp.Loader(Numbers(), batch_size=4, shuffle=7, workers=workers) as loader:
            got += [batch.copy() for _ in range(2) for batch in loader]
            assert not workers or "the stream is read on a thread" in str(loader.statistics().notes)
        with lp.Loader.from_generator(draws, copies=2, batch_size=4, seed=5, workers=workers) as loader:
            got += [leaf.copy() for batch in loader for leaf in batch]
        return got, starts

    (theirs, start), (ours, _) = made(2), made(0)
    assert start == "spawn" and len(theirs) == len(ours) > 100
    assert all(one.dtype == other.dtype and (one == other).all() for one, other in zip(theirs, ours))
"""


@pytest.mark.parametrize("platform", ["darwin", pytest.param("win32", marks=pytest.mark.slow)])
def test_an_epoch_on_a_system_that_has_nothing_of_linux(platform: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"line {number}\n" for number in range(20)))
    code = ANOTHER_SYSTEM.format(platform=platform, lines=str(lines))
    run_child(code, env=system_env(platform, tmp_path), timeout_s=100).check()


NO_GUARD = """
    import loaderpool as lp
    print("once")
    factor = 3

    def fn(item):
        return item * factor

    with lp.Pool(2, start="spawn") as pool, lp.Loader(range(8), fn, batch_size=4, workers=pool) as loader:
        print([batch.tolist() for batch in loader])
"""


@pytest.mark.parametrize(
    "way", ["file", pytest.param("stdin", marks=pytest.mark.slow), "command", "module"]
)
def test_a_script_needs_no_guard(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(NO_GUARD))
    options = {
        "command": "'-c', open('script.py').read()",
        "module": "'-m', 'script'",
    }
    code = f"""
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, {options.get(way)}]).returncode)
    """
    code = code if way in options else NO_GUARD
    result = run_child(code, stdin_code=way == "stdin", cwd=tmp_path).check()
    assert result.stdout.splitlines() == ["once", "[[0, 3, 6, 9], [12, 15, 18, 21]]"]


def test_a_pool_that_is_not_closed_ends_with_the_interpreter() -> None:
    result = run_child("""
        import loaderpool as lp
        loader = lp.Loader(range(800), abs, batch_size=4, workers=lp.Pool(2, start="spawn"))
        print(next(iter(loader)).tolist())
    """).check()
    assert result.stdout.split() == ["[0,", "1,", "2,", "3]"]
    assert "leaked" not in result.stderr


@pytest.mark.parametrize(
    "system", ["", "no memfd", "darwin", pytest.param("win32", marks=pytest.mark.slow)]
)
def test_workers_end_with_a_trainer_that_is_killed(system: str, tmp_path: Path) -> None:
    code = """
        import os, signal, time
        import loaderpool as lp

        def fn(item):
            time.sleep(30 if os.path.exists("hang") else 0.001)
            return item

        loader = lp.Loader(range(10_000), fn, batch_size=1, workers=lp.Pool(2, start="spawn"))
        batches = iter(loader)
        for _ in range(40):
            next(batches)
        with open("/proc/self/maps") as file:
            print({line.split()[5] for line in file if "/dev/shm/" in line and "(deleted)" not in line}, flush=True)
        print(*(worker.pid for worker in loader.statistics().workers), flush=True)
        open("hang", "w").close()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = run_child(code, env=system_env(system, tmp_path))
    assert result.returncode == -signal.SIGKILL
    blocks, pids = result.stdout.splitlines()
    assert blocks == "set()", "no memory has a name that would stay"
    assert len(pids.split()) == 2 and wait_gone(map(int, pids.split()), 5) == []


def test_ctrl_c_ends_a_wait_and_no_worker() -> None:
    result = run_child("""
        import os, signal, threading, time
        import loaderpool as lp

        def fn(item):
            if item == 20:
                time.sleep(3)
            return item

        with lp.Pool(2, start="spawn") as pool, lp.Loader(range(60), fn, batch_size=1, workers=pool) as loader:
            got, batches = [], iter(loader)
            got.append(int(next(batches)[0]))
            threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
            while True:
                try:
                    for batch in batches:
                        got.append(int(batch[0]))
                    break
                except KeyboardInterrupt:
                    print("interrupted")
            statistics = loader.statistics()
            print(got == list(range(60)), statistics.restarts)
    """).check()
    assert result.stdout.splitlines() == ["interrupted", "True 0"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_threads_own_is_followed_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, answers = State.done, itertools.count()

    def done(*arguments: Any) -> Any:
        if next(answers) == 5:
            raise RuntimeError("a defect")
        return real(*arguments)

    monkeypatch.setattr(State, "done", done)
    with spawned() as pool, loader_of(pool, items=120) as loader:
        got = read(loader)
        assert loader.statistics().supervisor_restarts == 1
    with loader_of(0, items=120) as loader:
        assert_same(got, read(loader))
