"""Every way in which the main process can end: nothing is left behind, nothing hangs, and stderr is
empty.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ClosedError
from tests.support.child import run_child
from tests.support.processes import status_of_fork
from tests.support.samples import slow_number

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


@pytest.mark.parametrize(("first_batch", "use_pool"), [("comes", False), ("never comes", True)])
def test_close_wakes_the_waiter_whether_or_not_the_pool_goes_on(
    first_batch: str, use_pool: bool
) -> None:
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
    "several are begun or not, and a batch and a cycle are kept": """
more = [lp.Loader(range(8), workers=1) for _ in range(3)]
its = [iter(each) for each in more[:2]]
next(its[1])
loader.it = iter(loader)
kept = next(loader.it)[1:]
""",
    "a thread waits, and another makes batches here": """
from loaderpool.engine import session
here = lp.Loader(range(10**6), lambda item: time.sleep(0.01) or item, batch_size=4, workers=0)
for each in (loader, here):
    threading.Thread(target=list, args=(each,), daemon=True).start()
time.sleep(0.5)
session.child_process.start = lambda *_, **__: print("another supervisor")
""",
    "a Ctrl-C comes meanwhile": """
import signal, subprocess
it = iter(loader)
next(it)
wait = subprocess.Popen.wait  # by which a supervisor's end is waited for
def interrupted(process, timeout=None):
    signal.raise_signal(signal.SIGINT)
    code = wait(process, timeout)
    signal.raise_signal(signal.SIGINT)
    return code
subprocess.Popen.wait = interrupted
""",
}


@pytest.mark.parametrize("state", ENDS)
def test_the_interpreter_ends_silently_with_a_loader_open(state: str) -> None:
    result = run_child(SCRIPT + ENDS[state] + "\nprint('end')\n", timeout_s=30).check()
    assert result.stdout == "end\n"
    assert result.stderr == ""


CTRL_C = """
import os, signal
threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()  # the terminal sends it to the whole group
"""


def test_ctrl_c_is_one_keyboard_interrupt_and_no_noise_of_workers() -> None:
    handled = "try:\n    for _ in loader: pass\nexcept KeyboardInterrupt:\n    print('interrupted')\nloader.close()"
    result = run_child(SCRIPT + CTRL_C + handled, timeout_s=30).check()
    assert (result.stdout, result.stderr) == ("interrupted\n", "")


def test_ctrl_c_unhandled_ends_with_one_traceback() -> None:
    result = run_child(SCRIPT + CTRL_C + "for batch in loader: pass", timeout_s=30)
    assert result.returncode == -signal.SIGINT
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_in_the_instant_before_a_wait_is_not_lost(tmp_path: Path) -> None:
    """The thread has found no batch, and is about to wait. Nothing else would wake it."""
    code = f"""
from loaderpool.system import fault_points
fault_points.arm({str(tmp_path)!r})
next(batches := iter(loader))
try:
    with open({str(tmp_path / "trainer.waiting")!r}, "w") as file: file.write("SIGINT")
    next(batches)
except KeyboardInterrupt:
    print("interrupted")
loader.close()
"""
    result = run_child(SCRIPT + code, timeout_s=30).check()
    assert (result.stdout, result.stderr) == ("interrupted\n", "")
    assert (tmp_path / "trainer.waiting.met").exists()


# ---- forks of the main process ----


def test_a_fork_cannot_use_the_loader_and_does_not_disturb_it() -> None:
    with lp.Loader(range(200), slow_number, batch_size=4, workers=2) as loader:
        batches: Any = iter(loader)
        taken = [next(batches)]

        def use() -> None:
            signal.alarm(20)  # if it hangs, SIGALRM ends it, so that the tests continue
            uses: list[Callable[[], Any]] = [
                lambda: next(iter(loader)), lambda: list(batches), lambda: loader.element_spec, lambda: loader.resize(1)
            ]  # fmt: skip
            for each in uses:
                with pytest.raises(ClosedError):
                    each()
            loader.statistics()
            batches.close()
            loader.close()
            taken.clear()
            gc.collect()

        assert status_of_fork(use) == 0
        taken += list(batches)
        assert np.concatenate(taken).tolist() == list(range(200))
        assert np.concatenate(list(loader)).tolist() == list(range(200))


def test_a_fork_may_make_a_loader_of_its_own() -> None:
    def own() -> None:
        signal.alarm(20)
        with lp.Loader(range(8), batch_size=4, workers=1) as mine:
            assert np.concatenate(list(mine)).tolist() == list(range(8))

    with lp.Loader(range(40), batch_size=4, workers=1) as loader:
        next(iter(loader))
        assert status_of_fork(own) == 0
        assert np.concatenate(list(loader)).tolist() == list(range(40))


# ---- functions that change their process ----


def add_one(item: int) -> int:
    return item + 1


@pytest.mark.parametrize("threads", [1, 4])
def test_multiprocessing_inside_the_function_works(threads: int) -> None:
    def fn(item: int) -> Any:
        with multiprocessing.get_context("fork").Pool(2) as inner:
            return np.array(inner.map(add_one, [item, item + 1]))

    with lp.Loader(range(4), fn, batch_size=2, workers=2, threads=threads) as loader:
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


def test_a_function_that_closes_its_standard_streams_works() -> None:
    def fn(item: int) -> int:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()
        os.closerange(0, 3)
        return item

    with lp.Loader(range(8), fn, batch_size=2, workers=2) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(8))
