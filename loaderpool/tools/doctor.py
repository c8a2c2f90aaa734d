"""`loaderpool doctor`: resources of this machine, and a crash test of a pool."""

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

from loaderpool.errors import counted, readable_bytes
from loaderpool.memory.adoption import why_copied
from loaderpool.system import capacity, machine
from loaderpool.tools.tune import describe_cpus
from loaderpool.trainer.loader import Loader

# A pool starts in half a second. Smaller: a slow network file system or a busy machine would fail
# the test. Larger: only a real hang takes longer to report.
_DEADLINE_S = 60.0
_ROWS, _BATCH, _DEADLY = 48, 4, 41
# A worker may reach the deadly item of the second epoch, made ahead, before another reaches that of
# the first epoch. All batches that wait for its death are read within two epochs, so the death has
# been reported by then.
_PASSES = 2
# Enough for the batches of a small loader, beside a supervisor and a worker with NumPy.
_GOOD_MEMORY = 1 << 30
# File descriptors that a pool and each worker need (counted, rounded up), with some files of the
# user's own.
_DESCRIPTORS, _WORKER_DESCRIPTORS = 140, 5
# More than the largest threshold from which glibc maps blocks. Smaller: the answer would depend on
# earlier calls of free(). Larger: only more address space, because nothing writes to the array.
_LARGE_BYTES = 40 << 20


def describe_machine() -> dict[str, str]:
    """Return the available resources by name, with advice if there is little of one."""
    soft, hard = machine.descriptor_limits()
    cpus, free = capacity.usable_cpu_count(), capacity.available_memory_bytes()
    needed = _DESCRIPTORS + _WORKER_DESCRIPTORS * cpus
    one = (
        "; workers overlap waiting for files and network with training, but computing gets no "
        "faster"
    )
    little = (
        "; stop other programs, give the container more memory, or set a small Limits(memory=...)"
    )
    few = f"; {counted(cpus, 'worker')} may need {needed}: ulimit -n {max(1024, needed)}"
    return {
        "CPUs": describe_cpus() + one * (cpus == 1),
        "memory": f"{readable_bytes(free)} free" + little * (free < _GOOD_MEMORY),
        # RLIM_INFINITY is -1
        "file descriptors": f"soft limit {soft:,}, hard limit {hard:,}"
        + few * (0 <= soft < needed),
        "large arrays": describe_large_arrays(),
    }


def describe_large_arrays() -> str:
    """Return how large arrays reach the workers on this machine.

    They are shared in place, or copied; then the text has the reason.
    """
    reason = why_copied(np.zeros(_LARGE_BYTES, np.uint8).data)
    return (
        "shared with the workers in place"
        if reason is None
        else f"copied for the workers: {reason}"
    )


def crash_test() -> tuple[bool, str]:
    """Kill a worker of a pool, and compare all batches with those made without workers.

    Return True if the batches are equal, and a text with the details.
    """
    batches: list[bytes] = []
    with tempfile.TemporaryDirectory(prefix="loaderpool-doctor-") as folder:
        died = Path(folder, "died")
        try:
            row = functools.partial(_row, died)
            with Loader(range(_ROWS), row, batch_size=_BATCH, shuffle=True, workers=2) as loader:
                batches += _batches(loader)
                restarts = loader.statistics().restarts
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"
        if not died.exists() or not restarts:
            return (
                False,
                (
                    f"the crash of a worker was not detected (killed: {died.exists()}, "
                    f"replaced: {restarts})"
                ),
            )
        with loader.replace(workers=0) as calm:  # no worker dies again: the file `died` exists
            if batches != _batches(calm):
                return False, "batches differ after a worker crashed"
    return (
        True,
        (
            f"a worker was killed by SIGKILL and replaced; all {len(batches)} batches are "
            "bit-identical"
        ),
    )


def _batches(loader: Loader) -> list[bytes]:
    return [batch.tobytes() for _ in range(_PASSES) for batch in loader]


def _row(died: Path, item: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return a sample. The first process to reach the deadly item is killed.

    It creates the file `died` first, so that no other process is killed.
    """
    if item == _DEADLY:
        with contextlib.suppress(FileExistsError):
            died.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
    return rng.random(16) + item


@click.command()
def doctor() -> None:
    """Show what this machine has, and crash-test a worker pool.

    The exit status is 1 if the test fails, or if the pool hangs for a minute: then the stacks are
    printed.
    """
    for name, found in describe_machine().items():
        click.echo(f"{name:<17} {found}")
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=2)
    has_passed, why = crash_test()
    faulthandler.cancel_dump_traceback_later()
    click.echo(f"{'crash test':<17} {'passed' if has_passed else 'failed'}: {why}")
    if not has_passed:
        raise click.exceptions.Exit(1)
