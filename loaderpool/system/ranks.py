"""Processes of one distributed training that share this machine, and the part of it that this process has.

Launchers tell their number in environment variables. The main process and its supervisor read the same ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

from loaderpool.system import capacity
from loaderpool.system.interrupts import FailuresIgnored

# Number of processes on this machine, by launcher.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun, Ray Train
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH2
    "PMI_LOCAL_SIZE",  # HPE Cray
    "PALS_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def local_count() -> int:
    """Return the number of processes of this training on this machine, at least 1: the largest that a launcher tells.

    The largest, as one launcher may start another, which starts one process each.
    """
    counts = [_number(name) for name in _LOCAL_SIZES]
    if "CROSS_SIZE" in os.environ:  # DeepSpeed
        counts.append(_number("LOCAL_SIZE"))
    if _is_here(
        os.environ.get("MASTER_ADDR", "")
    ):  # processes of torch that no launcher has started
        counts.append(_number("WORLD_SIZE"))
    return max(1, *counts, _slurm_tasks(), _jax_processes())


def usable_cpu_count() -> int:
    """Return this process's part of the usable CPUs, at least 1.

    Where a launcher has bound each process to CPUs of its own, these are its part.
    """
    usable, count = capacity.usable_cpu_count(), local_count()
    if count == 1:
        return usable
    return max(1, min(usable, max(usable, _cpus_of_all()) // count))


def memory_bytes() -> int:
    """Return this process's part of the memory that is free."""
    return capacity.available_memory_bytes() // local_count()


def _cpus_of_all() -> int:
    """Return the number of CPUs that the processes have together: those of the launcher, which is not bound."""
    cpus = (
        _number("SLURM_CPUS_ON_NODE") if _slurm_tasks() > 1 else 0
    )  # its launcher may use all of the machine
    if not cpus:
        with contextlib.suppress(
            OSError, AttributeError
        ):  # it has ended, or the system has no such call
            cpus = len(os.sched_getaffinity(os.getppid()))
    return min(cpus, os.cpu_count() or 1, int((capacity.cgroup_cpu_quota() or cpus) + 0.5))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _slurm_tasks() -> int:
    """Return the number of tasks of this step of SLURM's on this node: the third of "4(x2),3" has 3; 0: not known.

    Not SLURM_NTASKS_PER_NODE: a program that `sbatch` runs has that too, and is alone.
    """
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    return next(iter(counts[_number("SLURM_NODEID") :]), 0)


def _jax_processes() -> int:
    """Return the number of processes that JAX has connected, if their coordinator is on this machine; else 0."""
    with FailuresIgnored():  # it is not imported, or not to its end
        state: Any = sys.modules["jax._src.distributed"].global_state
        if _is_here(state.coordinator_address or ""):
            return int(state.num_processes)
    return 0


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0] if re.search(r"\]:\d+$|^[^:]*:\d+$", address) else address
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")
