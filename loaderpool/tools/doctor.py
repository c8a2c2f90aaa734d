"""`loaderpool doctor`: what this machine allows, whether a pool works on it, and what to change."""

from __future__ import annotations

import contextlib
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
from rich.table import Table
from rich.text import Text

from loaderpool.errors import counted, readable_bytes
from loaderpool.system import capacity, clock, machine
from loaderpool.tools.commands import output, results, write_json
from loaderpool.tools.tune import describe_cpus
from loaderpool.trainer.loader import Loader

# Of a supervisor and a worker with NumPy: below it they hardly fit. And what leaves room for a small loader's batches.
_LEAST_MEMORY, _GOOD_MEMORY = 128 << 20, 1 << 30
# What a pool needs (counted, rounded up), with some files of the user's own. Where fewer workers find room, fewer run.
_DESCRIPTORS, _WORKER_DESCRIPTORS = 140, 5
# A pool starts in half a second. Smaller would call a slow network file system, or a busy machine, a failure; larger
# only makes a real hang take longer.
_DEADLINE_S = 60.0
_SLOW_START_S = 5.0
_DRILL_WORKERS = 2  # more show nothing more, and take longer to start
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


def check(name: str, found: str, change: str = "", *, fails: bool = False, warns: bool = False) -> Check:
    """Return a check; what to change is said where it is not well."""
    status: Literal["ok", "warn", "fail"] = "fail" if fails else "warn" if warns else "ok"
    return Check(name, status, found, change if status != "ok" else "")


def machine_checks() -> list[Check]:
    """Return a check of CPUs, memory and descriptors; of shared memory the start of a pool tells."""
    cpus, free, limit = capacity.usable_cpu_count(), capacity.available_memory_bytes(), capacity.cgroup_memory_limit()
    one = "with one CPU, workers overlap waiting (files, network) with training, but computing gets no faster"
    memory = f"{readable_bytes(free)} free, cgroup limit {'none' if limit is None else readable_bytes(limit)}"
    more = "stop other programs, give the container more memory (docker --memory), or set a smaller Limits.memory"
    (soft, hard), needed = machine.descriptor_limits(), _DESCRIPTORS + _WORKER_DESCRIPTORS * cpus
    files = f"soft limit {soft:,}, hard limit {hard:,}; {counted(cpus, 'worker')} may need {needed}"
    ulimit, few = f"ulimit -n {max(1024, needed)}", 0 <= soft < needed  # RLIM_INFINITY is -1
    return [
        check("CPUs", describe_cpus(), one, warns=cpus == 1),
        check("memory", memory, more, fails=free < _LEAST_MEMORY, warns=free < _GOOD_MEMORY),
        check("file descriptors", files, ulimit, fails=few and soft < needed // 2, warns=few),
    ]


def pool_checks(workers: int, deadline_s: float = _DEADLINE_S) -> list[Check]:
    """Start a pool and kill one of its workers. Blocks: at most `deadline_s` each."""
    start = _in_time("pool start", lambda: _start(workers), deadline_s)
    if start[0].status == "fail":
        return start
    return start + _in_time("crash test", lambda: _drill(workers), deadline_s)


def _in_time(name: str, look: Callable[[], list[Check]], deadline_s: float) -> list[Check]:
    """What `look` finds; a failed check where it raises, or goes on for longer than it may."""
    found: list[Check] = []

    def run() -> None:
        try:
            found.extend(look())
        except BaseException as error:
            found.append(check(name, f"{type(error).__name__}: {error}", fails=True))

    thread = threading.Thread(target=run, name=f"loaderpool doctor: {name}", daemon=True)
    thread.start()
    thread.join(deadline_s)
    change = "find out where it hangs: py-spy dump --subprocesses --pid PID"
    return found or [check(name, f"not finished after {deadline_s:g} s", change, fails=True)]


def _start(workers: int) -> list[Check]:
    started_s = clock.monotonic_s()
    with Loader(range(_ROWS), float, batch_size=_BATCH, workers=workers) as loader:
        next(iter(loader))
        elapsed_s = clock.monotonic_s() - started_s
    found = f"{elapsed_s:.2f} s to the first batch, with {counted(workers, 'worker')}"
    change = "importing Python modules is slow: install them on a local disk"
    return [check("pool start", found, change, warns=elapsed_s > _SLOW_START_S)]


def _drill(workers: int) -> list[Check]:
    name, report = "crash test", "please report it with this output"
    with tempfile.TemporaryDirectory(prefix="loaderpool-doctor-") as folder:
        died = Path(folder, "died")
        loader = Loader(range(_ROWS), functools.partial(_row, died), batch_size=_BATCH, shuffle=True, workers=workers)
        with loader:
            batches = _batches(loader)
            restarts = loader.statistics().restarts
        if not died.exists() or not restarts:
            found = f"the crash of a worker was not detected (killed: {died.exists()}, replaced: {restarts})"
            return [check(name, found, report, fails=True)]
        with loader.replace(workers=0) as calm:  # none dies a second time
            if batches != _batches(calm):
                return [check(name, "batches differ after a worker crashed", report, fails=True)]
    return [check(name, f"a worker was killed by SIGKILL and replaced; all {len(batches)} batches are bit-identical")]


def _batches(loader: Loader) -> list[bytes]:
    return [batch.tobytes() for _ in range(_PASSES) for batch in loader]


def _row(died: Path, item: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A sample; the first to come to a certain item, where there is no file `died` yet, is the end of its worker."""
    if item == _DEADLY:
        with contextlib.suppress(FileExistsError):
            died.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return rng.random(16) + item


@click.command()
@click.option("--json", "json_to", metavar="FILE", callback=output(), help="Write checks as JSON to FILE; -: stdout.")
def doctor(json_to: str | None) -> None:
    """Check this machine, crash-test a worker pool, and suggest fixes.

    The exit status is 1 if a check fails.
    """
    checks = machine_checks() + pool_checks(_DRILL_WORKERS)
    console = results(json_to)
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        style = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}[check.status]
        change = Text(f"\n-> {check.change}", style=style) if check.change else Text()
        table.add_row(Text(check.status, style=style), check.name, Text(check.found) + change)
    console.print(table)
    failed = sum(check.status == "fail" for check in checks)
    console.print(f"{len(checks)} checks, {failed} failed.", style="bold red" if failed else "bold")
    write_json(json_to, "doctor", {"ok": not failed, "checks": [dataclasses.asdict(c) for c in checks]})
    if failed:
        raise click.exceptions.Exit(1)
