"""`loaderpool doctor`: what this machine allows, whether a pool works on it, and what to change."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from loaderpool.errors import counted, readable_bytes
from loaderpool.system import capacity, machine
from loaderpool.tools.commands import results
from loaderpool.tools.tune import describe_cpus
from loaderpool.trainer.loader import Loader

# Of a supervisor and a worker with NumPy: below it they hardly fit. And what leaves room for a small loader's batches.
_LEAST_MEMORY, _GOOD_MEMORY = 128 << 20, 1 << 30
# What a pool needs (counted, rounded up), with some files of the user's own. Where fewer workers find room, fewer run.
_DESCRIPTORS, _WORKER_DESCRIPTORS = 140, 5
# A pool starts in half a second. Smaller would call a slow network file system, or a busy machine, a failure; larger
# only makes a real hang take longer.
_DEADLINE_S = 60.0
_ROWS, _BATCH, _DEADLY = 48, 4, 41
# One worker may come to the deadly item while it makes the second epoch's batches ahead, before another one has come to
# it in the first. Of two epochs all batches that wait for such a death are read, and then it was told.
_PASSES = 2
_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}


def _check(name: str, found: str, change: str, *, fails: bool = False, warns: bool = False) -> tuple[str, str, str]:
    """Return a line: its status, its name, and what was found, with what to change where it fails or has a price."""
    status = "fail" if fails else "warn" if warns else "ok"
    return status, name, found if status == "ok" else f"{found}\n-> {change}"


def machine_checks() -> list[tuple[str, str, str]]:
    """Return a check of CPUs, memory and descriptors; of shared memory the start of a pool tells."""
    cpus, free = capacity.usable_cpu_count(), capacity.available_memory_bytes()
    one = "with one CPU, workers overlap waiting (files, network) with training, but computing gets no faster"
    more = "stop other programs, give the container more memory (docker --memory), or set a smaller Limits.memory"
    (soft, hard), needed = machine.descriptor_limits(), _DESCRIPTORS + _WORKER_DESCRIPTORS * cpus
    files = f"soft limit {soft:,}, hard limit {hard:,}; {counted(cpus, 'worker')} may need {needed}"
    ulimit, few = f"ulimit -n {max(1024, needed)}", 0 <= soft < needed  # RLIM_INFINITY is -1
    return [
        _check("CPUs", describe_cpus(), one, warns=cpus == 1),
        _check("memory", f"{readable_bytes(free)} free", more, fails=free < _LEAST_MEMORY, warns=free < _GOOD_MEMORY),
        _check("file descriptors", files, ulimit, fails=few and soft < needed // 2, warns=few),
    ]


def crash_test() -> tuple[str, str, str]:
    """Kill a worker of a pool, and compare all batches with those that are made here."""
    name, report, batches = "crash test", "please report it with this output", list[bytes]()
    with tempfile.TemporaryDirectory(prefix="loaderpool-doctor-") as folder:
        died = Path(folder, "died")
        try:
            row = functools.partial(_row, died)
            with Loader(range(_ROWS), row, batch_size=_BATCH, shuffle=True, workers=2) as loader:
                batches += _batches(loader)
                restarts = loader.statistics().restarts
        except Exception as error:
            return _check(name, f"{type(error).__name__}: {error}", report, fails=True)
        if not died.exists() or not restarts:
            found = f"the crash of a worker was not detected (killed: {died.exists()}, replaced: {restarts})"
            return _check(name, found, report, fails=True)
        with loader.replace(workers=0) as calm:  # none dies a second time
            if batches != _batches(calm):
                return _check(name, "batches differ after a worker crashed", report, fails=True)
    found = f"a worker was killed by SIGKILL and replaced; all {len(batches)} batches are bit-identical"
    return _check(name, found, "")


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
def doctor() -> None:
    """Check this machine, crash-test a worker pool, and suggest fixes.

    The exit status is 1 if a check fails, or if the pool hangs for a minute: then the stacks are printed.
    """
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=2)
    checks = [*machine_checks(), crash_test()]
    faulthandler.cancel_dump_traceback_later()
    console = results()
    table = Table(box=None, show_header=False, pad_edge=False)
    for status, name, text in checks:
        table.add_row(Text(status, style=_STYLES[status]), name, text)
    console.print(table)
    failed = sum(status == "fail" for status, _, _ in checks)
    console.print(f"{len(checks)} checks, {failed} failed.", style="bold red" if failed else "bold")
    if failed:
        raise click.exceptions.Exit(1)
