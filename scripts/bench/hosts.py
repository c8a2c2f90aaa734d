"""What a Ray cluster costs, beside the same loader on this machine: one worker, on one other raylet.

All processes are on one core, where each cost shows. Counted is CPU time by the scheduler's clock, raylets included.
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
    """Batches a second, or milliseconds of CPU time of all processes for one."""
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
    """Of all processes below this one, by the scheduler's clock; what psutil tells is in ticks of 10 ms."""
    threads = [
        file for pid in tree(os.getpid()) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
    ]
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e6


@contextlib.contextmanager
def _places(contestant: str) -> Iterator[Any]:
    """The argument `workers`; a cluster is a raylet that offers one CPU, beside a head that offers none."""
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
    """This process and all that it starts on one core, with JPEG files where the samples look for them."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray has it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, _ROOT]))
    sys.path.append(_ROOT)  # behind what is measured
    with tempfile.TemporaryDirectory() as folder:
        render_images(Path(folder))
        yield
