"""Trainers with a pool on a cluster that die in the middle of anything: how long what they started outlives them."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import loaderpool as lp

from .cluster import StormedCluster
from .shapes import ON_HOSTS, SHAPES, Faults, make
from .trainers import Death, watch_one

__all__ = ["be_cluster_trainer", "run_cluster_trainer_deaths"]

_WAYS = ("SIGKILL", "SIGTERM", "SIGINT", "exit")
# From the first batch to the death, or, for one in three, from the pool's making: while dispatcher and hosts start.
_MOST_S = 3.0
_IN_START = 1 / 3
_LEFT_OUT = ("from_sequence, hooks",)  # a pass of it may not be left


def run_cluster_trainer_deaths(
    count: int, cluster: StormedCluster, seed: int, deadline_s: float, say: Callable[[str], None]
) -> list[Death]:
    """So many trainers, one after the other, on a cluster that nobody else uses.

    Args:
        count: how many.
        cluster: on which.
        seed: of what is drawn.
        deadline_s: for each to die in.
        say: is told how far it is.
    """
    draw = random.Random(f"{seed}/cluster trainers")
    shapes = [name for name in ON_HOSTS if name not in _LEFT_OUT]
    found = []
    for number, way in enumerate(itertools.islice(itertools.cycle(_WAYS), count), 1):
        task = {
            "address": cluster.address,
            "way": way,
            "shape": draw.choice(shapes),
            "seed": draw.randrange(2**31),
            "is_in_start": draw.random() < _IN_START,
            "after_s": draw.random() * _MOST_S,
        }
        with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
            given = json.dumps({**task, "folder": folder})
            code = f"from stress_storms.cluster_trainers import be_cluster_trainer; be_cluster_trainer({given!r})"
            found.append(Death(way, "on a cluster", task["shape"], *watch_one(code, {}, cluster.ours, deadline_s)))
        if number % 10 == 0:
            say(f"{number} trainers dead, the slowest end {max(each.seconds for each in found):.2f} s")
    return found


# ---- in the trainer ----


def be_cluster_trainer(task_json: str) -> None:
    """Train until it is time to die."""
    task = json.loads(task_json)
    is_over, has_first_batch = threading.Event(), threading.Event()

    def die() -> None:
        if not task["is_in_start"]:
            has_first_batch.wait()
        time.sleep(task["after_s"])
        if task["way"] == "exit":
            is_over.set()
        else:
            os.kill(os.getpid(), getattr(signal, task["way"]))

    threading.Thread(target=die, daemon=True).start()
    faults = Faults(task["folder"], os.getpid(), 0)
    pool = lp.RayPool(task["address"])
    loader = make(SHAPES[task["shape"]], faults, task["seed"], workers=pool)
    while True:
        for _ in loader:
            has_first_batch.set()
            if is_over.is_set():
                sys.exit()  # with all of it open
