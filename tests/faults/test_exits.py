"""The trainer leaves, in every way it can: nothing is left behind, nobody hangs, nothing is said on stderr."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ClosedError
from tests.support.child import run_child
from tests.support.processes import wait_gone


def slow(item: int) -> int:
    time.sleep(0.004)
    return item


def stuck(item: int) -> int:
    if item >= 4:
        time.sleep(600)
    return item


def pids_of(loader: lp.Loader) -> list[int]:
    _ = loader.element_spec
    return [worker.pid for worker in loader.statistics().workers]


# ---- the loop ends early ----


def test_break_then_close_ends_every_worker() -> None:
    with lp.Loader(range(400), slow, batch_size=4, workers=3) as loader:
        for at, _ in enumerate(loader):
            if at == 3:
                break
        pids = pids_of(loader)
    assert wait_gone(pids, 5.0) == []


def test_an_exception_in_the_loop_leaves_the_loader_usable() -> None:
    with lp.Loader(range(60), slow, batch_size=4, workers=2) as loader:
        with pytest.raises(LookupError):
            for batch in loader:
                raise LookupError(batch)
        assert np.concatenate(list(loader)).tolist() == list(range(60))


def test_an_iterator_dropped_unread_or_midway_leaves_nothing() -> None:
    with lp.Loader(range(400), slow, batch_size=4, workers=2) as loader:
        for taken in (0, 1, 5):
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            del batches
        kept = iter(loader)
        assert next(kept).tolist() == [0, 1, 2, 3]
        kept.close()


def test_a_loader_dropped_without_close_ends_its_workers() -> None:
    loader = lp.Loader(range(400), slow, batch_size=4, workers=2)
    batches = iter(loader)
    next(batches)
    pids = pids_of(loader)
    gone = weakref.ref(loader)
    del loader, batches
    gc.collect()
    assert gone() is None
    assert wait_gone(pids, 5.0) == []


def test_a_loader_dropped_after_an_error_ends_its_workers() -> None:
    """The error's traceback has frames, the frames have the loader: nothing of the pool may hold the error."""

    def fn(item: int) -> int:
        if item in (0, 5):
            raise ValueError(item)
        return item

    def use(source: range) -> tuple[list[int], Any]:
        loader = lp.Loader(source, fn, batch_size=4, workers=1)
        with pytest.raises(ValueError):
            list(loader)
        return [worker.pid for worker in loader.statistics().workers], weakref.ref(loader)

    for source in (range(8), range(1, 8)):
        pids, gone = use(source)
        gc.collect()
        assert gone() is None
        assert wait_gone(pids, 5.0) == []


# ---- close ----


def test_close_twice_and_use_afterwards() -> None:
    loader = lp.Loader(range(40), batch_size=4, workers=1)
    batches = iter(loader)
    next(batches)
    for _ in range(3):
        loader.close()
    for use in (
        lambda: next(batches),
        lambda: iter(loader),
        lambda: loader.element_spec,
        lambda: loader.resize(2),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert loader.statistics().batches == 1
    assert "closed" in repr(loader)


@pytest.mark.parametrize("first_batch", ["comes", "never comes"])
@pytest.mark.parametrize("use_pool", [False, True])
def test_close_wakes_the_waiter_whether_or_not_the_pool_goes_on(use_pool: bool, first_batch: str) -> None:
    def fn(item: int) -> int:
        if item or first_batch == "never comes":
            time.sleep(600)
        return item

    raised: list[BaseException] = []

    def consume(loader: lp.Loader) -> None:
        try:
            list(loader)
        except BaseException as error:
            raised.append(error)

    with lp.Pool(1) as pool:
        where = {"workers": pool} if use_pool else {"workers": 1}
        loader = lp.Loader(range(8), fn, batch_size=1, **where)  # type: ignore[arg-type]
        thread = threading.Thread(target=consume, args=(loader,))
        thread.start()
        time.sleep(0.4)
        loader.close()
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in raised] == [ClosedError]


# ---- the interpreter ends ----

SCRIPT = """
import sys, threading, time
import numpy as np
import loaderpool as lp

def stuck(item):
    if item >= 4: time.sleep(600)
    return item

loader = lp.Loader(range(64), stuck, batch_size=4, workers=2)
"""
ENDS = {
    "started": "",
    "first sample made": "loader.element_spec",
    "in a pass": "it = iter(loader); next(it)",
    "several": "more = [lp.Loader(range(8), workers=1) for _ in range(3)]; its = [iter(l) for l in more]; next(its[1])",
    "batch and cycle kept": "it = iter(loader); loader.it = it; kept = next(it)[1:]",
}


@pytest.mark.parametrize("state", ENDS)
def test_the_interpreter_ends_silently_with_a_loader_open(state: str) -> None:
    result = run_child(SCRIPT + ENDS[state] + "\nprint('end')\n", timeout_s=30).check()
    assert result.stdout == "end\n"
    assert result.stderr == ""


def test_sys_exit_in_a_thread_ends_only_the_thread() -> None:
    result = run_child(
        SCRIPT
        + """
loader.close()
loader = lp.Loader(range(64), batch_size=4, workers=2)

def consume():
    for batch in loader:
        sys.exit(3)

thread = threading.Thread(target=consume)
thread.start()
thread.join()
assert next(iter(loader)).tolist() == [0, 1, 2, 3]
print("end")
""",
        timeout_s=30,
    ).check()
    assert (result.stdout, result.stderr) == ("end\n", "")


@pytest.mark.parametrize("wait", ["the first sample", "a batch"])
def test_ctrl_c_is_one_keyboard_interrupt_and_no_noise_of_workers(wait: str) -> None:
    result = run_child(
        SCRIPT
        + f"""
import os, signal
loader.close()
wait = {wait!r}

def fn(item):
    if wait == "the first sample" or item >= 4: time.sleep(600)
    return item

loader = lp.Loader(range(64), fn, batch_size=4, workers=2)
threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()  # the terminal sends it to the whole group
try:
    for batch in loader:
        assert wait == "a batch"
except KeyboardInterrupt:
    print("interrupted")
loader.close()
print("end")
""",
        timeout_s=30,
    ).check()
    assert result.stdout == "interrupted\nend\n"
    assert result.stderr == ""


def test_ctrl_c_unhandled_ends_with_one_traceback() -> None:
    result = run_child(
        SCRIPT
        + """
import os, signal
threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()
for batch in loader: pass
""",
        timeout_s=30,
    )
    assert result.returncode == -signal.SIGINT
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")


# ---- forks of the trainer ----


def in_fork(action: Callable[[], str], tmp_path: Path, leave: Callable[[], object] | None = None) -> str:
    """What `action` gives, or raises, in a fork of this process that then leaves by `leave`."""
    answer = tmp_path / "answer"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)  # a hang is a death by SIGALRM, not a hang of the tests
            try:
                text = action()
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            answer.write_text(text)
            if leave is not None:
                leave()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    return answer.read_text()


@pytest.mark.parametrize("use_pool", [False, True])
def test_a_fork_cannot_use_the_loader_and_does_not_disturb_it(use_pool: bool, tmp_path: Path) -> None:
    with lp.Pool(2) as pool:
        where = {"workers": pool} if use_pool else {"workers": 2}
        with lp.Loader(range(200), slow, batch_size=4, **where) as loader:  # type: ignore[arg-type]
            batches = iter(loader)
            taken = [next(batches)]

            def use(action: Callable[[], Any]) -> Callable[[], str]:
                return lambda: str(action())

            uses: dict[str, Callable[[], Any]] = {
                "iter": lambda: next(iter(loader)),
                "next": lambda: [next(batches) for _ in range(50)],
                "spec": lambda: loader.element_spec,
                "resize": lambda: loader.resize(1),
            }
            for action in uses.values():
                assert in_fork(use(action), tmp_path, gc.collect).startswith(ClosedError.__name__)

            def end() -> str:
                loader.statistics()
                batches.close()
                loader.close()
                pool.close()
                taken.clear()
                return "closed"

            assert in_fork(end, tmp_path, gc.collect) == "closed"
            taken += list(batches)
            assert np.concatenate(taken).tolist() == list(range(200))
            assert np.concatenate(list(loader)).tolist() == list(range(200))


def test_a_fork_may_make_a_loader_of_its_own(tmp_path: Path) -> None:
    with lp.Loader(range(40), batch_size=4, workers=1) as loader:
        next(iter(loader))

        def own() -> str:
            with lp.Loader(range(8), batch_size=4, workers=1) as mine:
                return str(np.concatenate(list(mine)).tolist())

        assert in_fork(own, tmp_path) == str(list(range(8)))
        assert np.concatenate(list(loader)).tolist() == list(range(40))


# ---- what functions do to their process ----


def add_one(item: int) -> int:
    return item + 1


def test_multiprocessing_inside_the_function_works() -> None:
    def fn(item: int) -> Any:
        with multiprocessing.get_context("fork").Pool(2) as inner:
            return np.array(inner.map(add_one, [item, item + 1]))

    with lp.Loader(range(4), fn, batch_size=2, workers=2) as loader:
        assert np.concatenate(list(loader)).tolist() == [[i + 1, i + 2] for i in range(4)]


def test_a_thread_left_by_the_function_disturbs_nobody() -> None:
    def fn(item: int) -> int:
        threading.Thread(target=time.sleep, args=(600,)).start()
        return item

    with lp.Loader(range(8), fn, batch_size=2, workers=2) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(8))


def test_what_the_function_prints_is_seen_without_a_flush() -> None:
    result = run_child(
        """
        import loaderpool as lp
        def fn(item):
            print("item", item)
            return item
        with lp.Loader(range(8), fn, batch_size=4, workers=2) as loader:
            list(loader)
        """,
        env={"PYTHONUNBUFFERED": None},
    ).check()
    lines = result.stdout.splitlines()
    assert set(lines) == {f"item {item}" for item in range(8)}


def test_a_function_that_changes_its_directory_changes_only_its_own(tmp_path: Path) -> None:
    here = os.getcwd()

    def fn(item: int) -> str:
        os.chdir(tmp_path)
        return os.getcwd()

    with lp.Loader(range(4), fn, batch_size=2, workers=1) as loader:
        assert {str(path) for batch in loader for path in batch} == {str(tmp_path.resolve())}
    assert os.getcwd() == here


def test_a_function_that_closes_its_standard_streams_works() -> None:
    def fn(item: int) -> int:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()
        os.closerange(0, 3)
        return item

    with lp.Loader(range(8), fn, batch_size=2, workers=2) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(8))
