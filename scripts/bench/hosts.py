"""What a Ray cluster costs, beside the same loader on this machine: one worker, on one other raylet.

All processes are on one core, where each cost shows. Counted is CPU time by the scheduler's clock, raylets included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.measures import cpu_ms, tree, warm_and_measured
from bench.peers import make_loader
from bench.rows import Row
from bench.windows import Window
from bench.works import WORKS, Work, render_images

_ROOT = str(Path(__file__).resolve().parents[2])
_STORE_BYTES = 1 << 30


def beside_local(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Batches a second, or milliseconds of CPU time of all processes for one."""
    work = WORKS[row.work]
    with _on_one_core(), _places(contestant) as (workers, _), make_loader(work, workers) as loader:
        delivery, (spent_ms,) = warm_and_measured(loader, work, window, lambda: [cpu_ms(tree(os.getpid()))])
    return {contestant: delivery.rate if row.is_rate else spent_ms / delivery.count}


def after_a_kill(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Seconds from `Loader(...)` to the first batch on a running cluster; the longest wait around a host's SIGKILL."""
    work = WORKS[row.work]
    with _on_one_core(), _places("loaderpool") as (pool, cluster):
        started = time.perf_counter()
        with make_loader(work, pool) as loader:
            next(iter(loader))
            first_s = time.perf_counter() - started
        with make_loader(work, pool) as loader:
            return {"first": first_s, "loaderpool": _longest_wait(loader, work, cluster)}


def _longest_wait(loader: Any, work: Work, cluster: Any) -> float:
    waits: list[float] = []
    then = time.perf_counter()
    for number, batch in enumerate(loader):
        if batch[0].item(0) != number * work.batch_size:
            raise ValueError(f"batch {number} is wrong")
        now = time.perf_counter()
        waits.append(now - then)
        then = now
        if number == 40:
            commands = {pid: psutil.Process(pid).cmdline() for pid in tree(cluster.pid)}
            (actor,) = (pid for pid, words in commands.items() if words and words[0].startswith("ray::NodeActor"))
            os.kill(actor, signal.SIGKILL)
        elif number == 140:
            break
    return max(waits[41:])


@contextlib.contextmanager
def _places(contestant: str) -> Iterator[tuple[Any, Any]]:
    """The argument `workers`, and the cluster: a raylet that offers one CPU, beside a head that offers none."""
    if contestant == "local":
        yield 1, None
        return
    import loaderpool as lp
    from tests.support.ray_cluster import RayCluster

    with RayCluster(nodes=1, store_bytes=_STORE_BYTES) as cluster, lp.RayPool(cluster.address) as pool:
        yield pool, cluster


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """This process and all that it starts on one core, with JPEG files where the samples look for them."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray has it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, _ROOT]))
    sys.path.append(_ROOT)  # behind what is measured
    with tempfile.TemporaryDirectory() as folder:
        render_images(Path(folder))
        yield
