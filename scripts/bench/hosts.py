"""Cost of a Ray cluster: one worker on another raylet, compared with the same loader without Ray.

All processes run on one core, so that each cost shows. CPU time is that of the scheduler's clock,
and includes the raylets.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.measures import tree
from bench.peers import make_loader
from bench.rows import Row
from bench.windows import Window, delivered
from bench.works import WORKS, check_ends, render_images

_ROOT = str(Path(__file__).resolve().parents[2])
_STORE_BYTES = 1 << 30


def beside_local(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Return the batches per second, or the CPU time of all processes for one batch in ms."""
    work = WORKS[row.work]
    ends: list[tuple[int, float, float]] = []

    def look(batch: Any) -> None:
        ends.append((len(ends), batch[0].item(0), batch[-1].item(0)))

    with _on_one_core(), _places(contestant) as workers, make_loader(work, workers) as loader:
        batches = iter(loader)
        delivered(batches, Window(0.1, window.warm_s), look)
        before_ms = _cpu_ms()
        delivery = delivered(batches, Window(window.seconds, 0.0), look)
        spent_ms = _cpu_ms() - before_ms
    check_ends(work, ends)
    return {contestant: delivery.rate if row.is_rate else spent_ms / delivery.count}


def _cpu_ms() -> float:
    """Return the CPU time of all descendants of this process, by the scheduler's clock. psutil
    counts ticks of 10 ms.
    """
    threads = [
        file for pid in tree(os.getpid()) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
    ]
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e6


@contextlib.contextmanager
def _places(contestant: str) -> Iterator[Any]:
    """Return the argument `workers`. A cluster is a raylet with one CPU, and a head without
    CPUs.
    """
    if contestant == "local":
        yield 1
        return
    import loaderpool as lp
    from tests.support.ray_cluster import RayCluster

    with (
        RayCluster(nodes=1, store_bytes=_STORE_BYTES) as cluster,
        lp.RayPool(cluster.address) as pool,
    ):
        yield pool


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Move this process and all that it starts to one core, and write the JPEG files of the
    samples.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray has it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, _ROOT]))
    sys.path.append(_ROOT)  # last, so that the measured package is found first
    with tempfile.TemporaryDirectory() as folder:
        render_images(Path(folder))
        yield
