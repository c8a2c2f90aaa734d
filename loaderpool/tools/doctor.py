"""`loaderpool doctor`: what this machine allows, whether a pool works on it, and what to change."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click
import numpy as np
import numpy.typing as npt
from rich.text import Text

from loaderpool.errors import ClusterError, counted, readable_bytes
from loaderpool.ray.pool import RayPool
from loaderpool.system import capacity, clock, machine
from loaderpool.tools.commands import plain_table, read_cluster, read_json, results, say, write_json
from loaderpool.trainer.loader import Loader

# Of a supervisor and a worker with NumPy: below it they hardly fit. And what leaves room for a small loader's batches.
_LEAST_MEMORY, _GOOD_MEMORY = 128 << 20, 1 << 30
# What a pool needs (counted, rounded up), with some files of the user's own. Where fewer workers find room, fewer run.
_DESCRIPTORS, _WORKER_DESCRIPTORS = 140, 5
# A pool starts in half a second. Smaller would call a slow network file system, or a busy machine, a failure; larger
# only makes a real hang take longer.
_DEADLINE_S = 60.0
_SLOW_START_S = 5.0
_CLUSTER_S = 10.0  # until all nodes have begun
_ROWS, _BATCH, _DEADLY = 48, 4, 41
# One worker may come to the deadly item while it makes the second epoch's batches ahead, before another one has come to
# it in the first. Of two epochs all batches that wait for such a death are read, and then it was told.
_PASSES = 2


@dataclasses.dataclass(frozen=True)
class Check:
    """A line of `loaderpool doctor`."""

    name: str
    status: Literal["ok", "warn", "fail"]  # warn: it works, with a price or a risk; fail: it does not work
    found: str
    change: str = ""  # what to do about it; empty where it is ok


def machine_checks() -> list[Check]:
    """Return a check of CPUs, memory, descriptors and shared memory."""
    return [_cpus(), _memory(), _descriptors(), _memory_file()]


def _cpus() -> Check:
    usable = capacity.usable_cpu_count()
    if usable > 1:
        return Check("CPUs", "ok", describe_cpus())
    change = "workers overlap waiting (files, network) and training, but computing gets no faster"
    return Check("CPUs", "warn", describe_cpus(), change)


def describe_cpus() -> str:
    """How many CPUs can be used, and the three counts of which that is the smallest."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "none"
    quota = capacity.cgroup_cpu_quota()
    return (
        f"{counted(capacity.usable_cpu_count(), 'usable CPU')} (os.cpu_count() {os.cpu_count() or 1}, affinity mask "
        f"{affinity}, cgroup quota {'none' if quota is None else f'{quota:g}'})"
    )


def _memory() -> Check:
    free, limit = capacity.available_memory_bytes(), capacity.cgroup_memory_limit()
    found = f"{readable_bytes(free)} free, cgroup limit {'none' if limit is None else readable_bytes(limit)}"
    if free >= _GOOD_MEMORY:
        return Check("memory", "ok", found)
    change = "end other programs, give the container more (docker --memory), or set a smaller Limits.memory"
    return Check("memory", "warn" if free >= _LEAST_MEMORY else "fail", found, change)


def _descriptors() -> Check:
    soft, hard = machine.descriptor_limits()
    workers = capacity.usable_cpu_count()
    needed = _DESCRIPTORS + _WORKER_DESCRIPTORS * workers
    found = f"limits of {soft:,} (soft) and {hard:,} (hard), {counted(workers, 'worker')} may need {needed}"
    if min(soft, hard) < 0 or soft >= needed:  # RLIM_INFINITY is -1
        return Check("file descriptors", "ok", found)
    return Check("file descriptors", "warn" if soft >= needed // 2 else "fail", found, f"ulimit -n {max(1024, needed)}")


def _memory_file() -> Check:
    try:
        descriptor = machine.create_memory_file("doctor")
        try:
            machine.reserve(descriptor, 0, 1 << 20)
        finally:
            os.close(descriptor)
    except Exception as error:
        change = "allow memfd_create in the container's seccomp profile, and free some memory"
        return Check("shared memory", "fail", str(error), change)
    return Check("shared memory", "ok", "works")


def pool_checks(workers: int, deadline_s: float = _DEADLINE_S) -> list[Check]:
    """Start a pool and kill one of its workers. Blocks: at most `deadline_s` each."""
    start = _in_time("start of a pool", lambda: _start(workers), deadline_s)
    if start.status == "fail":
        return [start]
    return [start, _in_time("crash drill", lambda: _drill(workers), deadline_s)]


def cluster_checks(address: str, deadline_s: float = _DEADLINE_S) -> list[Check]:
    """Return a check for each node of a Ray cluster that makes batches. Blocks: at most `deadline_s`."""
    nodes: list[Check] = []
    overall = _in_time("Ray cluster", lambda: _cluster(address, nodes), deadline_s)
    return [overall, *nodes]


def _cluster(address: str, nodes: list[Check]) -> Check:
    with RayPool(address) as pool, Loader(range(_ROWS), float, workers=pool) as loader:
        began_s = clock.monotonic_s()
        while clock.monotonic_s() - began_s < _CLUSTER_S:
            for _ in loader:
                pass
        for host in loader.statistics().hosts:
            found = f"{counted(host.workers, 'worker')}, {host.batches:,} batches"
            nodes.append(Check(f"node {host.address}", "ok", found))
    if not nodes:
        raise ClusterError("no node has made a batch")
    return Check("Ray cluster", "ok", f"{counted(len(nodes), 'node')} at {address}")


def _in_time(name: str, look: Callable[[], Check], deadline_s: float) -> Check:
    """What `look` finds; a failed check where it raises, or goes on for longer than it may."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.append(look())
        except BaseException as error:
            found.append(Check(name, "fail", f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name=f"loaderpool doctor: {name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    change = "something hangs: `py-spy dump --subprocesses --pid PID` shows where"
    return found[0] if found else Check(name, "fail", f"not done after {deadline_s:g} s", change)


def _start(workers: int) -> Check:
    started_s = clock.monotonic_s()
    with Loader(range(_ROWS), float, batch_size=_BATCH, workers=workers) as loader:
        next(iter(loader))
        elapsed_s = clock.monotonic_s() - started_s
    found = f"{elapsed_s:.2f} s to the first batch, with {counted(workers, 'worker')}"
    if elapsed_s < _SLOW_START_S:
        return Check("start of a pool", "ok", found)
    return Check("start of a pool", "warn", found, "importing Python modules is slow here: put them on a local disk")


def _drill(workers: int) -> Check:
    with Loader(range(_ROWS), functools.partial(_row, None), batch_size=_BATCH, shuffle=True, workers=0) as calm:
        expected = _stream(calm)
    with tempfile.TemporaryDirectory(prefix="loaderpool-doctor-") as folder:
        died = Path(folder, "died")
        started_s = clock.monotonic_s()
        deadly = functools.partial(_row, died)
        with Loader(range(_ROWS), deadly, batch_size=_BATCH, shuffle=True, workers=workers) as loader:
            stream = _stream(loader)
            restarts = loader.statistics().restarts
        elapsed_s = clock.monotonic_s() - started_s
        was_killed = died.exists()
    name, report = "crash drill", "report it, please, with this output"
    if not was_killed or not restarts:
        found = f"no worker was seen to die (killed: {was_killed}, replaced: {restarts})"
        return Check(name, "fail", found, report)
    if stream != expected:
        same = sum(one == other for one, other in zip(stream, expected, strict=False))
        return Check(name, "fail", f"after a worker's death {same} of {len(expected)} batches are right", report)
    found = f"a worker killed by SIGKILL, replaced; all {len(stream)} batches the same to the bit, {elapsed_s:.2f} s"
    return Check(name, "ok", found)


def _stream(loader: Loader) -> list[bytes]:
    return [batch.tobytes() for _ in range(_PASSES) for batch in loader]


def _row(died: Path | None, item: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A sample; the first to come to a certain item, where there is no file `died` yet, is the end of its worker."""
    if died is not None and item == _DEADLY:
        try:
            os.close(os.open(died, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return rng.random(16) + item


_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
_DRILL_WORKERS = 2  # more show nothing more, and take longer to start


@click.command(epilog="\b\nExamples:\n  loaderpool doctor\n  loaderpool doctor --ray auto --json doctor.json")
@click.option("--json", "json_to", metavar="FILE", callback=read_json, help="Write all checks here, - for stdout.")
@click.option(
    "--ray", "address", metavar="ADDRESS", callback=read_cluster,
    help='Look at the nodes of the Ray cluster there, too: "auto" or host:port.',
)  # fmt: skip
def doctor(json_to: str | None, address: str | None) -> None:
    """Look at what this machine allows, start a pool, kill a worker of it on purpose, and say what to change.

    The exit status is 1 where something fails.
    """
    checks = machine_checks() + pool_checks(_DRILL_WORKERS)
    if address is not None:
        checks += cluster_checks(address)
    console = results(json_to)
    table = plain_table(console.is_terminal, show_header=False)
    for check in checks:
        found = Text(check.found)
        if check.change:
            found.append(f"\n-> {check.change}", style=_STYLES[check.status])
        table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, found)
    console.print(table)
    failed = sum(check.status == "fail" for check in checks)
    say(console, f"{len(checks)} checks, {failed} failed.", style="bold red" if failed else "bold")
    write_json(console, json_to, "doctor", {"ok": not failed, "checks": [dataclasses.asdict(c) for c in checks]})
    if failed:
        raise click.exceptions.Exit(1)
