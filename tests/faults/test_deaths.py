"""Deaths of processes, and the results for users: the same bits, or an error at once. Nothing is
lost, left behind, or hangs.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import PoolBrokenError, WorkerLostError
from tests.support.batches import kill_supervisor
from tests.support.child import run_child
from tests.support.processes import is_alive, wait_gone

ITEMS, BATCH = 96, 4


def kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


WAYS: dict[str, Callable[[], object]] = {
    "SIGKILL": kill(signal.SIGKILL),
    "SIGTERM": kill(signal.SIGTERM),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
}
SIGNALS = {"SIGKILL": "SIGKILL", "SIGTERM": "SIGTERM", "segfault": "SIGSEGV", "abort": "SIGABRT"}


def dying(way: str, at: int, once: Path | None = None) -> Callable[[int, np.random.Generator], Any]:
    """Return a function that dies at one index: each time, or only while the file `once` does not
    exist.
    """
    die = WAYS[way]

    def fn(item: int, rng: np.random.Generator) -> Any:
        if item == at:
            try:
                if once is not None:
                    os.close(os.open(once, os.O_CREAT | os.O_EXCL))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                die()
            except FileExistsError:
                pass
        return {"item": item, "noise": rng.random(3)}

    return fn


def seen(batches: Iterator[Any]) -> tuple[list[int], bytes]:
    """Return the items and all bits of some batches."""
    items, noise = [], b""
    for batch in batches:
        items.extend(batch["item"].tolist())
        noise += batch["noise"].tobytes()
    return items, noise


# ---- a worker whose own descriptors are closed ----


def closing(item: int) -> np.int64:
    if item == 40:
        os.closerange(3, 400)
    return np.int64(item)


def of_length(item: int) -> Any:
    return np.full(1 + item % 3, closing(item))


def closing_generator(shard: int) -> Iterator[Any]:
    for item in range(64):
        yield closing(item)


@pytest.mark.parametrize("settings", [{}, {"fn": of_length, "pad": True}], ids=["fixed", "padded"])
def test_only_a_sample_that_closes_descriptors_is_skipped(settings: dict[str, Any]) -> None:
    settings = {"fn": closing, "batch_size": 32, "workers": 2, "on_error": "skip", **settings}
    with lp.Loader(range(96), **settings) as loader:
        got = [int(item) for batch in loader for item in np.reshape(batch, (len(batch), -1))[:, 0]]
    assert got == [item for item in range(96) if item != 40]


@pytest.mark.parametrize("batch_size", [4, 32, None])
def test_an_error_names_the_sample_that_closed_descriptors(batch_size: int | None) -> None:
    loader = lp.Loader(range(96), closing, batch_size=batch_size, workers=2)
    with loader, pytest.raises(WorkerLostError, match="closed file descriptors") as raised:
        list(loader)
    assert raised.value.index == 40


def test_an_error_names_the_item_that_closed_descriptors() -> None:
    loader = lp.Loader.from_generator(closing_generator, shards=[0], batch_size=32, workers=1)
    with loader, pytest.raises(WorkerLostError, match="item 40 of generator 0"):
        list(loader)


def test_an_error_names_the_setup_that_closed_descriptors() -> None:
    def setup() -> None:
        os.closerange(3, 400)

    loader = lp.Loader(range(96), np.int64, batch_size=32, workers=1, setup=setup)
    with loader, pytest.raises(WorkerLostError, match=r"setup.*\n.*closed file descriptors"):
        list(loader)


# ---- a worker ----


@pytest.mark.parametrize(("way", "at"), [("SIGKILL", 0), ("SIGKILL", 50), ("exit 0", ITEMS - 1)])
def test_a_sample_that_always_kills_is_named_and_all_before_it_delivered(way: str, at: int) -> None:
    with lp.Loader(range(ITEMS), dying(way, at), batch_size=BATCH, workers=2) as loader:
        for _ in range(2):  # the pool continues, so the same sample ends a worker in the next pass
            items: list[int] = []
            with pytest.raises(WorkerLostError) as raised:
                for batch in loader:
                    items += batch["item"].tolist()
            error = raised.value
            assert isinstance(error, PoolBrokenError)
            assert isinstance(error, RuntimeError)
            assert error.index == at
            assert error.signal_name == SIGNALS.get(way, "")
            assert f"index {at}" in str(error)
            assert str(loader.last_error) == str(error)
            assert items == list(range(at - at % BATCH))
            assert error.epoch is not None


@pytest.mark.parametrize("way", ["segfault", "abort", "SIGTERM", "exit 3"])
def test_how_it_died_is_said(way: str) -> None:
    stack = (
        r"Last output of the worker:\nFatal Python error: Aborted[\s\S]*in fn"
        if way == "abort"
        else ""
    )
    told = stack or SIGNALS.get(
        way, r"status 3 while loading source index 5[\s\S]*or from C code \(sys\.exit would be"
    )
    loader = lp.Loader(range(8), dying(way, 5), batch_size=BATCH, workers=1)
    with loader, pytest.raises(WorkerLostError, match=told) as raised:
        list(loader)
    assert (raised.value.index, raised.value.epoch, raised.value.signal_name) == (
        5,
        0,
        SIGNALS.get(way, ""),
    )


def test_a_function_that_calls_sys_exit_ends_no_worker() -> None:
    with lp.Loader(
        range(8), lambda item: sys.exit(123) if item == 5 else item, batch_size=4, workers=1
    ) as loader:
        with pytest.raises(lp.SampleError, match="SystemExit: 123") as raised:
            list(loader)
        assert raised.value.index == 5 and loader.statistics().restarts == 0


def test_how_many_deaths_are_too_many_can_be_set(tmp_path: Path) -> None:
    def fn(item: int) -> int:
        time.sleep(0.001)  # rows of slow functions are made one by one, so each crash has its row
        if item == 5:
            with open(tmp_path / "deaths", "ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    loader = lp.Loader(
        range(8), fn, batch_size=BATCH, workers=1, limits=lp.Limits(restarts_per_item=2)
    )
    with loader, pytest.raises(WorkerLostError, match="2 workers crashed on this task"):
        list(loader)
    assert (tmp_path / "deaths").read_bytes() == b"xx"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL in the setup hook"),
        (
            lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "inside a C extension that the setup hook uses",
        ),
        (lambda: os._exit(3), r"The setup hook \(or a library that it uses\) ended the process"),
    ],
    ids=["SIGKILL", "SIGSEGV", "_exit"],
)
def test_a_setup_hook_that_kills_is_an_error_that_names_it(how: Any, told: str) -> None:
    loader = lp.Loader(range(8), batch_size=BATCH, workers=2, setup=how)
    with loader, pytest.raises(WorkerLostError, match=told):
        list(loader)


@pytest.mark.parametrize("end", ["close", "the supervisor's death"])
def test_what_the_function_started_ends_with_its_workers(end: str) -> None:
    def fn(item: int) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(300)
        return pid

    with lp.Loader(range(8), fn, batch_size=2, workers=1) as loader:
        batches = iter(loader)
        grandchildren = next(batches).tolist()
        assert all(map(is_alive, grandchildren))
        if end != "close":
            kill_supervisor(loader)
            assert len(list(batches)) == 3
            assert len(list(loader)) == 4  # all batches before may have arrived
            assert wait_gone(grandchildren, 5.0) == []
    assert wait_gone(grandchildren, 5.0) == []


# ---- the main process; run_child fails if one of its processes is left ----

TRAINER = """
import os, signal, sys, threading, time
import numpy as np
import loaderpool as lp

def sleeping(item):
    if item >= 8: time.sleep(600)
    return item

def in_c(item):
    if item >= 8: np.sort(np.random.default_rng(item).random(1 << 27))
    return item

def spinning(item):
    while item >= 8: pass
    return item

def deaf(item):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return sleeping(item)

def parent(item):
    if item == 1 and os.fork() == 0: time.sleep(600)
    return sleeping(item)

def fails():
    raise LookupError("the end of the trainer")

DIE = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "_exit": lambda: os._exit(5),
    "exception": fails,
    "exit": lambda: sys.exit(6),
}
loader = lp.Loader(range(640), FN, batch_size=4, workers=2)
DIE_NOW
"""
MOMENTS = {
    "before the first batch": "loader.element_spec; DIE[HOW]()",
    "in a pass": "it = iter(loader); next(it); next(it); DIE[HOW]()",
    "in a thread's pass": (
        "t = threading.Thread(target=lambda: [b for b in loader], daemon=True); t.start(); time.sleep(0.5); DIE[HOW]()"
    ),
}
STATUS = {"SIGKILL": -signal.SIGKILL, "_exit": 5, "exception": 1, "exit": 6}


def trainer(function: str, how: str, moment: str) -> str:
    return (
        TRAINER.replace("FN", function)
        .replace("DIE_NOW", MOMENTS[moment])
        .replace("HOW", repr(how))
    )


@pytest.mark.parametrize(
    ("how", "moment"),
    [
        ("SIGKILL", "in a thread's pass"),
        ("_exit", "in a pass"),
        ("exception", "in a pass"),
        ("exit", "before the first batch"),
    ],
)
def test_when_the_trainer_dies_nothing_is_left(how: str, moment: str) -> None:
    result = run_child(trainer("sleeping", how, moment))
    assert result.returncode == STATUS[how]
    if how != "exception":
        assert result.stderr == ""
    else:
        assert result.stderr.count("Traceback") == 1
        assert "LookupError: the end of the trainer" in result.stderr


@pytest.mark.parametrize("function", ["in_c", "spinning", "deaf", "parent"])
def test_when_the_trainer_dies_busy_workers_and_their_children_end_too(function: str) -> None:
    assert run_child(trainer(function, "SIGKILL", "in a pass")).returncode == -signal.SIGKILL


def test_stopped_processes_end_with_the_trainer() -> None:
    """Supervisor and workers were stopped (SIGSTOP), so none of them notices the end of another
    one.
    """
    stop = """
it = iter(loader); next(it)
pid = loader.statistics().workers[0].pid
of = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
for each in (of, pid): os.kill(each, signal.SIGSTOP)
DIE["SIGKILL"]()
"""
    assert (
        run_child(TRAINER.replace("FN", "sleeping").replace("DIE_NOW", stop)).returncode
        == -signal.SIGKILL
    )


def test_each_of_two_passes_is_told_that_no_worker_is_left() -> None:
    """Before a fix, the second one waited forever if a third one had tried again meanwhile."""

    def fn(item: int) -> int:
        if 60 <= item < 75:
            os._exit(7)
        time.sleep(0.01)
        return item

    limits = lp.Limits(restarts_per_item=10)
    with (
        lp.Pool(2, restarts=(3, 60.0)) as pool,
        lp.Loader(range(200), fn, batch_size=1, workers=pool, limits=limits) as loader,
    ):
        first, second = iter(loader), iter(loader)
        next(second)
        for batches in (first, iter(loader), second):
            with pytest.raises(lp.LoaderpoolError):
                list(batches)
