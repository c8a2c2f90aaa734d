"""What does a Ray cluster cost, against the same loader on this machine and against Ray Data?

Work: batches of 32 samples of 2 ms of Python and 2 KB in all; 32 JPEGs, 4.8 MB; 64 images of float32, 38.5 MB, hardly
any work; 32 samples of 16 float32, hardly any work. One worker, on one other raylet; all processes on one core, where
each cost shows, with Ray's niceness at 0. Counted is CPU time by the scheduler's clock: of all processes, raylets
included; of the process that trains; of the dispatcher. "first": from `Loader(...)` to its first batch on a cluster
that runs. "host": the longest wait for a batch around a SIGKILL of a host.
Baselines: the same loader with one worker of this machine; Ray Data's `map_batches` in order; what is allowed.
Bars: CPU time of all 1.06 of local at 64 ms of work, 1.20 at JPEG; 0.3 ms more than local in the process that trains,
at 38.5 MB; 0.15 ms a MB in the dispatcher; half of the local rate at tiny batches; Ray Data behind in each rate; the
first batch within 2.5 s; a killed host within 1 s.
Verified: first and last sample of every batch, all numbers of the first three.
Command: scripts/bench/run hosts
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchlib import images, ours
from benchlib.model import Bar, Contestant, Figure, Measured, Question, Window, require
from benchlib.processes import cpu_ms
from benchlib.samples import slow
from benchlib.windows import delivered
from benchlib.work import Array, Work, check_batches, check_tokens
from benchlib.works import WORKS

_ROOT = Path(__file__).resolve().parents[2]
_STORE_BYTES = 1 << 30
_KEPT = 3
# What is allowed, by name: ms of CPU time, ms a MB, seconds.
_ALLOWED = {"allowed_trainer": 0.3, "allowed_dispatcher": 0.15, "allowed_first": 2.5, "allowed_host": 1.0}


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


def _measure(work: Work, batches: Iterator[Any], window: Window, dispatcher: int = 0) -> dict[str, float]:
    """Rate, and CPU time of all descendants, of this process and of the dispatcher for each batch, in ms."""
    first: list[Array] = []
    positions = itertools.count()

    def look(batch: Any) -> tuple[int, float, float]:
        position = next(positions)
        if position < _KEPT:
            first.append(batch.copy())
        return position, batch[0].item(0), batch[-1].item(0)

    seen = delivered(batches, Window(0.1, window.warm_s, {}), look).seen
    before = _cpu_of([os.getpid(), *_descendants(os.getpid())]), _cpu_of([dispatcher] if dispatcher else [])
    delivery = delivered(batches, Window(window.seconds, 0.0, {}), look)
    after = _cpu_of([os.getpid(), *_descendants(os.getpid())]), _cpu_of([dispatcher] if dispatcher else [])
    check_batches(work, first)
    check_tokens(work, [*seen, *delivery.seen])
    count = len(delivery.seen)
    cpu, of_dispatcher = ((now - then) / count for now, then in zip(after, before, strict=True))
    return {"rate": delivery.rate, "cpu": cpu, "trainer": delivery.cpu_s * 1e3, "dispatcher": of_dispatcher}


def _on_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as Ray has it
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # threads of Ray Data's would, to a cluster that has gone
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, str(_ROOT)]))
    sys.path.append(str(_ROOT))  # behind what is measured


def local(name: str, window: Window) -> Measured:
    _on_one_core()
    with ours.loader(_WORKS[name], 1) as loader:
        found = _measure(_WORKS[name], iter(loader), window)
    return Measured(_named("local", name, found), {f"local_{name}_trainer": found["trainer"]})


def hosts(name: str, window: Window) -> Measured:
    import loaderpool as lp

    _on_one_core()
    from tests.support.ray_cluster import RayCluster

    work = _WORKS[name]
    fn = images.scale_into if work.write is not None else work.fn
    with RayCluster(nodes=1, store_bytes=_STORE_BYTES) as cluster, lp.RayPool(cluster.address) as pool:
        started = time.perf_counter()
        with lp.Loader(range(work.items), fn, batch_size=work.batch_size, workers=pool) as loader:
            batches = iter(loader)
            next(batches)
            first_s = time.perf_counter() - started
        with lp.Loader(range(work.items), fn, batch_size=work.batch_size, workers=pool) as loader:
            found = _measure(work, iter(loader), window, _dispatcher())
        figures = _named("hosts", name, found)
        if name == "burn":
            figures |= {"first": first_s, "host": _gap(pool, work, cluster)}
    if name == "wide":
        figures["trainer"] = found["trainer"] - window.facts.get(f"local_{name}_trainer", 0.0)
    if name in ("jpeg", "wide"):
        figures[f"dispatcher_{name}"] = found["dispatcher"] / (work.batch_bytes / 1e6)
    return Measured(figures)


def ray_data(name: str, window: Window) -> Measured:
    _on_one_core()
    from tests.support.ray_cluster import RayCluster

    work = _WORKS[name]
    with RayCluster(nodes=1, store_bytes=_STORE_BYTES) as cluster:
        import ray
        import ray.data

        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        items = ray.data.range(work.items, override_num_blocks=2048)
        made = items.map_batches(functools.partial(_make, work.fn), batch_size=work.batch_size)
        batches = (each["sample"] for each in made.iter_batches(batch_size=work.batch_size, prefetch_batches=2))
        found = _measure(work, batches, window)
        batches.close()
        ray.shutdown()
    return Measured(_named("raydata", name, found))


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
    """The longest wait for a batch in the second after a host was killed, less the longest before it, in seconds."""
    import loaderpool as lp

    with lp.Loader(range(work.items), work.fn, batch_size=work.batch_size, workers=pool) as loader:
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
_CONTESTANTS: dict[str, Contestant] = {
    f"{side}, {name}": functools.partial(measure, name) for name in _WORKS for side, measure in _SIDES.items()
}

QUESTION = Question(
    name="hosts",
    figures=(
        *(
            Figure(f"{side}_{name}_{what}", unit, f"{_WORKS[name].what}, {side}")
            for name in _WORKS
            for what, unit in (("rate", "batches/s"), ("cpu", "ms"))
            for side in _SIDES
        ),
        Figure("trainer", "ms", "CPU time of the process that trains above a local loader's, 38.5 MB"),
        Figure("dispatcher_jpeg", "ms", "CPU time of the dispatcher for each MB, batches of 4.8 MB"),
        Figure("dispatcher_wide", "ms", "CPU time of the dispatcher for each MB, batches of 38.5 MB"),
        Figure("first", "s", "from `Loader(...)` to its first batch, on a cluster that runs"),
        Figure("host", "s", "longest wait around a host's SIGKILL"),
        *(Figure(name, "s" if name in ("allowed_first", "allowed_host") else "ms", "") for name in _ALLOWED),
    ),
    contestants={"what is allowed": allowed, **_CONTESTANTS},
    bars=(
        Bar("hosts_burn_cpu", "local_burn_cpu", at_most=1.06),
        Bar("hosts_jpeg_cpu", "local_jpeg_cpu", at_most=1.2),
        Bar("hosts_tiny_rate", "local_tiny_rate", at_least=0.5),
        *(Bar(f"raydata_{name}_rate", f"hosts_{name}_rate", at_most=1.0) for name in _WORKS),
        Bar("trainer", "allowed_trainer", at_most=1.0),
        Bar("dispatcher_jpeg", "allowed_dispatcher", at_most=1.0),
        Bar("dispatcher_wide", "allowed_dispatcher", at_most=1.0),
        Bar("first", "allowed_first", at_most=1.0),
        Bar("host", "allowed_host", at_most=1.0),
    ),
    rounds=3,
    seconds=6.0,
    warm_s=2.0,
)
