"""What does a Ray cluster cost, against the same loader on this machine and against Ray Data?

Work: batches of 32 samples of 2 ms of Python and 2 KB in all; 32 JPEGs, 4.8 MB; 64 images of float32, 38.5 MB, hardly
any work; 32 samples of 16 float32, hardly any work. One worker, on one other raylet; all processes on one core, where
each cost shows, with Ray's niceness at 0. Counted is CPU time by the scheduler's clock: of all processes, raylets
included; of the process that trains; of the dispatcher. "first": from `Loader(...)` to its first batch on a cluster
that runs. "host": the longest wait for a batch around a SIGKILL of a host.
Baselines: the same loader with one worker of this machine; Ray Data's `map_batches` in order; what is allowed.
Bars: CPU time of all 1.06 of local at 64 ms of work, 1.20 at JPEG; 0.3 ms more than local in the process that trains,
at 38.5 MB; 0.15 ms a MB in the dispatcher; half of the local rate at tiny batches; Ray Data behind in each rate; the
first batch within 2.5 s; a killed host within 1 s. What JPEG costs beside local's 50 ms, by process: the two raylets
6.0 ms (1.2 a MB, always), the worker itself 2.5, the dispatcher 1.5, the host's actor 1.1, the cluster at rest 0.9.
Verified: first and last sample of every batch, all numbers of the first three.
Command: scripts/bench/run hosts

Last result; others kept up to 1.0 CPUs busy meanwhile, run again on a quiet machine
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    hosts       local_burn_rate    21.1 batches/s [20.2 .. 21.3]
    hosts       hosts_burn_rate      20 batches/s [19.3 .. 20.8]
    hosts       raydata_burn_rate    17.2 batches/s [16.3 .. 18]       0.86 x hosts_burn_rate (best 0.86; bar ≤ 1)
    hosts       local_burn_cpu    47.3 ms        [47.1 .. 49.6]
    hosts       hosts_burn_cpu    49.6 ms        [47.7 .. 51.5]     1.05 x local_burn_cpu (best 1.01; bar ≤ 1.06)
    hosts       raydata_burn_cpu    57.5 ms        [55.1 .. 60.5]
    hosts       local_jpeg_rate    19.9 batches/s [19.5 .. 20.2]
    hosts       hosts_jpeg_rate      16 batches/s [15.7 .. 16.4]
    hosts       raydata_jpeg_rate    12.7 batches/s [12.5 .. 13.5]     0.79 x hosts_jpeg_rate (best 0.83; bar ≤ 1)
    hosts       local_jpeg_cpu    50.2 ms        [49.5 .. 51.4]
    hosts       hosts_jpeg_cpu    61.6 ms        [60.2 .. 62.6]     1.23 x local_jpeg_cpu (best 1.21; bar ≤ 1.2) MISSED
    hosts       raydata_jpeg_cpu    77.4 ms        [72.4 .. 78.3]
    hosts       local_wide_rate     349 batches/s [310 .. 364]
    hosts       hosts_wide_rate    17.3 batches/s [16.5 .. 19]
    hosts       raydata_wide_rate      11 batches/s [10.8 .. 11.5]     0.63 x hosts_wide_rate (best 0.61; bar ≤ 1)
    hosts       local_wide_cpu    2.86 ms        [2.75 .. 3.23]
    hosts       hosts_wide_cpu    52.8 ms        [47.8 .. 55.4]
    hosts       raydata_wide_cpu    84.4 ms        [80.1 .. 86.5]
    hosts       local_tiny_rate  29,119 batches/s [28,924 .. 31,501]
    hosts       hosts_tiny_rate  23,818 batches/s [22,970 .. 26,010]  0.82 x local_tiny_rate (best 0.83; bar ≥ 0.5)
    hosts       raydata_tiny_rate   2,073 batches/s [2,045 .. 2,212]  0.087 x hosts_tiny_rate (best 0.085; bar ≤ 1)
    hosts       local_tiny_cpu  0.0343 ms        [0.0317 .. 0.0346]
    hosts       hosts_tiny_cpu  0.0421 ms        [0.0385 .. 0.0435]
    hosts       raydata_tiny_cpu   0.483 ms        [0.452 .. 0.489]
    hosts       trainer           0.18 ms        [0.151 .. 0.191]   0.60 x most_trainer (best 0.50; bar ≤ 1)
    hosts       dispatcher_jpeg   0.326 ms        [0.295 .. 0.342]   2.17 x most_dispatcher (best 1.96; bar ≤ 1) MISSED
    hosts       dispatcher_wide   0.186 ms        [0.178 .. 0.197]   1.24 x most_dispatcher (best 1.19; bar ≤ 1) MISSED
    hosts       first             1.22 s         [1.16 .. 1.4]      0.49 x most_first (best 0.47; bar ≤ 1)
    hosts       host              0.75 s         [0.68 .. 0.769]    0.75 x most_host (best 0.68; bar ≤ 1)
    hosts       most_trainer     0.3 ms        [0.3 .. 0.3]
    hosts       most_dispatcher    0.15 ms        [0.15 .. 0.15]
    hosts       most_first      2.5 s         [2.5 .. 2.5]
    hosts       most_host         1 s         [1 .. 1]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchlib import images
from benchlib.model import Bar, Contestant, Figure, Measured, Question, Window, require
from benchlib.processes import cpu_ms
from benchlib.samples import slow
from benchlib.windows import delivered
from benchlib.work import Array, Work, check_batches, check_tokens
from benchlib.works import WORKS

_ROOT = Path(__file__).resolve().parents[2]
_STORE_BYTES = 1 << 30
_KEPT = 3
# More, or larger ones, and Ray Data's first batch takes most of a minute.
_RAY_DATA_BLOCKS, _RAY_DATA_TINY_ROWS = 256, 8192
# What is allowed, by name: ms of CPU time, ms a MB, seconds.
_ALLOWED = {"most_trainer": 0.3, "most_dispatcher": 0.15, "most_first": 2.5, "most_host": 1.0}


def burn(item: int) -> Array:
    """int64[8]: the item first, after about 2 ms of Python."""
    slow(item, 16_000)
    return np.full(8, item)


_WORKS = {
    "burn": Work("burn", "2 ms of Python a sample", burn, (8,), np.int64, 32, 10**5),
    "jpeg": WORKS["jpeg"],
    "wide": WORKS["wide"],
    "tiny": WORKS["tiny32"],
}


def _descendants(pid: int) -> list[int]:
    from tests.support.processes import descendants

    return descendants(pid)


def _cpu_of(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            total += cpu_ms(pid)
    return total


def _measure(work: Work, batches: Iterator[Any], window: Window, root: int, dispatcher: int = 0) -> dict[str, float]:
    """Rate; CPU time of the root and its descendants, of this process and of the dispatcher for each batch, in ms."""
    first: list[Array] = []
    positions = itertools.count()

    def look(batch: Any) -> tuple[int, float, float]:
        position = next(positions)
        if position < _KEPT:
            first.append(batch.copy())
        return position, batch[0].item(0), batch[-1].item(0)

    seen = delivered(batches, Window(0.1, window.warm_s, {}), look).seen
    before = _cpu_of([root, *_descendants(root)]), _cpu_of([dispatcher] if dispatcher else [])
    delivery = delivered(batches, Window(window.seconds, 0.0, {}), look)
    after = _cpu_of([root, *_descendants(root)]), _cpu_of([dispatcher] if dispatcher else [])
    check_batches(work, first)
    check_tokens(work, [*seen, *delivery.seen])
    count = len(delivery.seen)
    cpu, of_dispatcher = ((now - then) / count for now, then in zip(after, before, strict=True))
    return {"rate": delivery.rate, "cpu": cpu, "trainer": delivery.cpu_s * 1e3, "dispatcher": of_dispatcher}


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """This process and all that it starts on one core, with JPEG files where the samples look for them."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray has it
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # threads of Ray Data's would, to a cluster that has gone
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, str(_ROOT)]))
    sys.path.append(str(_ROOT))  # behind what is measured
    with tempfile.TemporaryDirectory() as folder:
        images.render_images(Path(folder))
        yield


def _cluster() -> Any:
    """A raylet that offers one CPU, beside a head that offers none."""
    from tests.support.ray_cluster import RayCluster

    return RayCluster(nodes=1, store_bytes=_STORE_BYTES)


def local(name: str, window: Window) -> Measured:
    from benchlib import ours

    with _on_one_core(), ours.loader(_WORKS[name], 1) as loader:
        found = _measure(_WORKS[name], iter(loader), window, os.getpid())
    return Measured(_named("local", name, found), {f"local_{name}_trainer": found["trainer"]})


def hosts(name: str, window: Window) -> Measured:
    import loaderpool as lp
    from benchlib import ours

    work = _WORKS[name]
    with _on_one_core(), _cluster() as cluster, lp.RayPool(cluster.address) as pool:
        started = time.perf_counter()
        with ours.loader(work, pool) as loader:
            next(iter(loader))
            first_s = time.perf_counter() - started
        with ours.loader(work, pool) as loader:
            found = _measure(work, iter(loader), window, os.getpid(), _dispatcher())
        figures = _named("hosts", name, found)
        if name == "burn":
            figures |= {"first": first_s, "host": _gap(pool, work, cluster)}
    if name == "wide":
        figures["trainer"] = found["trainer"] - window.facts.get(f"local_{name}_trainer", 0.0)
    if name in ("jpeg", "wide"):
        figures[f"dispatcher_{name}"] = found["dispatcher"] / (work.batch_bytes / 1e6)
    return Measured(figures)


def ray_data(name: str, window: Window) -> Measured:
    # In a process of its own, which ends at once: the executor of a pipeline that is left works on for a minute.
    context = multiprocessing.get_context("spawn")
    with _on_one_core(), _cluster() as cluster:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_read_ray_data, args=(cluster.address, name, window, os.getpid(), sender))
        process.start()
        sender.close()
        found = receiver.recv()
        process.join()
    return Measured(_named("raydata", name, found))


def _read_ray_data(address: str, name: str, window: Window, root: int, sender: Any) -> None:
    import ray
    import ray.data

    work = _WORKS[name]
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    rows = _RAY_DATA_TINY_ROWS if work.is_tiny else 2 * work.batch_size  # of a block; enough of them for the window
    items = ray.data.range(_RAY_DATA_BLOCKS * rows, override_num_blocks=_RAY_DATA_BLOCKS)
    made = items.map_batches(functools.partial(_make, work.fn), batch_size=work.batch_size)
    batches = (each["sample"] for each in made.iter_batches(batch_size=work.batch_size, prefetch_batches=2))
    sender.send(_measure(work, batches, window, root))
    os._exit(0)


def _make(fn: Any, batch: dict[str, Array]) -> dict[str, Array]:
    return {"sample": np.stack([fn(item) for item in batch["id"].tolist()])}


def allowed(window: Window) -> Measured:
    return Measured(dict(_ALLOWED))


def _dispatcher() -> int:
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if b"loaderpool-dispatcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise AssertionError("there is no dispatcher")


def _gap(pool: Any, work: Work, cluster: Any) -> float:
    """The longest wait, in seconds, for one of the hundred batches after a host was killed."""
    from benchlib import ours

    with ours.loader(work, pool) as loader:
        waits: list[float] = []
        killed = 0
        then = time.perf_counter()
        for number, batch in enumerate(loader):
            require(batch[0].item(0) == number * work.batch_size, f"batch {number} is wrong")
            now = time.perf_counter()
            waits.append(now - then)
            then = now
            if number == 40:
                (host,) = (pid for pid in _descendants(cluster.pid) if _is_host(pid))
                os.kill(host, signal.SIGKILL)
                killed = number + 1
            elif number == 140:
                break
    return max(waits[killed:])


def _is_host(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::HostActor")
    return False


def _named(side: str, name: str, found: dict[str, float]) -> dict[str, float]:
    return {f"{side}_{name}_rate": found["rate"], f"{side}_{name}_cpu": found["cpu"]}


_SIDES: dict[str, Any] = {"local": local, "hosts": hosts, "raydata": ray_data}
_WHO = {"local": "a worker here", "hosts": "a host", "raydata": "Ray Data"}
_CONTESTANTS: dict[str, Contestant] = {
    f"{side}, {name}": functools.partial(measure, name) for name in _WORKS for side, measure in _SIDES.items()
}

QUESTION = Question(
    name="hosts",
    figures=(
        *(
            Figure(f"{side}_{name}_{what}", unit, f"{_WORKS[name].what}, {_WHO[side]}")
            for name in _WORKS
            for what, unit in (("rate", "batches/s"), ("cpu", "ms"))
            for side in _SIDES
        ),
        Figure("trainer", "ms", "CPU time of the process that trains above a local loader's, 38.5 MB"),
        Figure("dispatcher_jpeg", "ms", "CPU time of the dispatcher for each MB, batches of 4.8 MB"),
        Figure("dispatcher_wide", "ms", "CPU time of the dispatcher for each MB, batches of 38.5 MB"),
        Figure("first", "s", "from `Loader(...)` to its first batch, on a cluster that runs"),
        Figure("host", "s", "longest wait around a host's SIGKILL"),
        *(Figure(name, "s" if name in ("most_first", "most_host") else "ms", "what is allowed") for name in _ALLOWED),
    ),
    contestants={"what is allowed": allowed, **_CONTESTANTS},
    bars=(
        Bar("hosts_burn_cpu", "local_burn_cpu", at_most=1.06),
        Bar("hosts_jpeg_cpu", "local_jpeg_cpu", at_most=1.2),
        Bar("hosts_tiny_rate", "local_tiny_rate", at_least=0.5),
        *(Bar(f"raydata_{name}_rate", f"hosts_{name}_rate", at_most=1.0) for name in _WORKS),
        Bar("trainer", "most_trainer", at_most=1.0),
        Bar("dispatcher_jpeg", "most_dispatcher", at_most=1.0),
        Bar("dispatcher_wide", "most_dispatcher", at_most=1.0),
        Bar("first", "most_first", at_most=1.0),
        Bar("host", "most_host", at_most=1.0),
    ),
    rounds=3,
    seconds=6.0,
    warm_s=2.0,
)
