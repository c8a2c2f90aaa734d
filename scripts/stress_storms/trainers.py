"""Trainers that die at random moments: how long their processes outlive them, and whether any is
left.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import loaderpool as lp
from tests.support.processes import describe, end_all, marked

from .shapes import SHAPES, Faults, make

LATE_S = 1.0  # time after which no process of a trainer may be left
_GIVE_UP_S = 10.0
_LOOK_S = 0.005
_MARK = "LOADERPOOL_STRESS_TRAINER"
_WAYS = ("SIGKILL", "SIGTERM", "SIGSEGV", "os._exit", "exception")
# State of the workers when the trainer dies: the shape's work, C code that keeps the GIL, a stop,
# or user code that forks.
_WORKERS_ARE = ("at work", "at work", "in C code", "stopped")
# longest time from the loader's construction to the death, which may come during the start
_MOST_S = 0.8
_SHAPES = (
    "single batches", "chunks of tiny batches", "oversize batches", "rows fail, skip", "from_sequence, hooks",
    "stream, read by a process", "iterator, read once, in a window", "files interleaved", "generators of shards",
    "cached in memory", "cached on disk",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Death:
    """Death of a trainer, and its consequences."""

    way: str
    workers_are: str
    shape: str
    seconds: float  # time from the trainer's end to the end of its last process
    left: list[str]  # processes that are left after some seconds


def run_trainer_deaths(
    count: int, seed: int, deadline_s: float, say: Callable[[str], None]
) -> list[Death]:
    """Run this number of trainers, one after the other. Each must die within `deadline_s`."""
    draw = random.Random(f"{seed}/trainers")
    ways = itertools.cycle(itertools.product(_WORKERS_ARE, _WAYS))
    found = []
    for number, (workers_are, way) in enumerate(itertools.islice(ways, count), 1):
        # an exception is raised where a batch arrives
        if way == "exception" and workers_are != "at work":
            way = "SIGKILL"
        shape = draw.choice(_SHAPES)
        task = {
            "way": way, "workers_are": workers_are, "shape": shape, "seed": draw.randrange(2**31),
            "after_s": draw.random() * _MOST_S, "workers": draw.randrange(1, 5),
        }  # fmt: skip
        found.append(Death(way, workers_are, shape, *_watch_one(task, deadline_s)))
        if number % 10 == 0:
            say(f"{number} trainers dead")
    return found


def _watch_one(task: dict[str, Any], deadline_s: float) -> tuple[float, list[str]]:
    """Run a trainer that dies. Return how long its processes outlived it, and those that are
    left.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        given = json.dumps({**task, "folder": folder})
        with subprocess.Popen(
            [sys.executable, "-c", f"from stress_storms.trainers import be_trainer; be_trainer({given!r})"],
            env={**os.environ, _MARK: mark}, start_new_session=True,
            stderr=subprocess.DEVNULL,  # hides the traceback of the exception, and of faulthandler
        ) as trainer:  # fmt: skip
            give_up = time.monotonic() + deadline_s
            while trainer.poll() is None:
                if time.monotonic() > give_up:
                    trainer.kill()
                    raise TimeoutError(
                        f"a trainer that should die did not within {deadline_s:g} s: {given}"
                    )
                time.sleep(_LOOK_S)
        ended = time.monotonic()
        while (living := marked(_MARK, mark)) and time.monotonic() < ended + _GIVE_UP_S:
            time.sleep(_LOOK_S)
        seconds = time.monotonic() - ended
        left = [describe(pid) for pid in living]
        end_all(living)
        return seconds, left


# ---- in the trainer ----


def be_trainer(task_json: str) -> None:
    """Train until the chosen moment, then die."""
    task = json.loads(task_json)
    is_over = threading.Event()
    loader: list[lp.Loader] = []

    def die() -> None:
        time.sleep(task["after_s"])
        if task["workers_are"] == "stopped" and loader:
            for worker in loader[0].statistics().workers[:1]:
                with contextlib.suppress(ProcessLookupError):  # hooks replace workers
                    os.kill(worker.pid, signal.SIGSTOP)
        if task["way"] == "exception":
            is_over.set()
        elif task["way"] == "os._exit":
            os._exit(5)
        else:
            os.kill(os.getpid(), getattr(signal, task["way"]))

    threading.Thread(target=die, daemon=True).start()
    if task["workers_are"] == "in C code":
        loader.append(lp.Loader(range(999), _in_c, batch_size=2, workers=task["workers"]))
    else:
        loader.append(_make(task))
    while True:
        for _ in loader[0]:
            if is_over.is_set():
                raise LookupError("the end of the trainer")
        if task["workers_are"] != "in C code" and SHAPES[task["shape"]].is_one_shot:
            loader[0] = _make(task)


def _make(task: dict[str, Any]) -> lp.Loader:
    faults = Faults(task["folder"], os.getpid(), 0)
    return make(SHAPES[task["shape"]], faults, task["seed"], workers=task["workers"])


def _in_c(item: int) -> int:
    if item >= 4:
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL
    return item
