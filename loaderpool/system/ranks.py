"""Processes of one distributed training that share this machine, and this process's share of it.

Launchers store the number of processes in environment variables. The main process and its
supervisor read the same ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

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


# Environment variables that identify a job. Its launcher sets them equal in all processes of the
# job.
_JOB_NAMES = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",  # torchrun, DeepSpeed, Lightning, Ray Train
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",  # Open MPI 5, PRRTE
    "OMPI_MCA_ess_base_jobid",  # Open MPI 4
    "PALS_APID",  # HPE Cray
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "RAY_JOB_ID",
    "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "JAX_COORDINATOR_ADDRESS",
)


def job() -> str:
    """Return a name of this process's distributed job, or "" if there is none.

    All processes of the job on this machine return the same name, and other jobs another one.
    """
    parts = [f"{name}={os.environ[name]}" for name in _JOB_NAMES if name in os.environ]
    with FailuresIgnored():  # TensorFlow; only the part that all processes have
        parts.append(repr(json.loads(os.environ["TF_CONFIG"])["cluster"]))
    with FailuresIgnored():  # raised if JAX is not initialized
        address = sys.modules["jax._src.distributed"].global_state.coordinator_address
        parts += [f"jax={address}"] * bool(address)
    return " ".join(parts)


def are_here() -> bool:
    """Return True if several processes of one distributed job run on this machine."""
    return local_count() > 1 and bool(job())


def local_count() -> int:
    """Return the number of processes of this training on this machine, at least 1.

    It is the largest number that a launcher reports, because one launcher may start another that
    starts one process each.
    """
    counts = [_number(name) for name in _LOCAL_SIZES]
    if "CROSS_SIZE" in os.environ:  # set by DeepSpeed
        counts.append(_number("LOCAL_SIZE"))
    # processes of torch that no launcher has started
    if _is_here(os.environ.get("MASTER_ADDR", "")):
        counts.append(_number("WORLD_SIZE"))
    return max(1, *counts, _slurm_tasks(), _jax_processes())


def usable_cpu_count() -> int:
    """Return the number of usable CPUs for this process, at least 1.

    If a launcher has bound each process to its own CPUs, these are the process's share.
    """
    usable, count = capacity.usable_cpu_count(), local_count()
    if count == 1:
        return usable
    return max(1, min(usable, max(usable, _cpus_of_all()) // count))


def memory_bytes() -> int:
    """Return this process's share of the free memory, in bytes."""
    return capacity.available_memory_bytes() // local_count()


def _cpus_of_all() -> int:
    """Return the number of CPUs of all these processes together: those of their launcher.

    The launcher is the parent process. It is not bound to a part of the CPUs.
    """
    # The launcher of SLURM tasks may use all of the machine.
    cpus = _number("SLURM_CPUS_ON_NODE") if _slurm_tasks() > 1 else 0
    if not cpus:
        # The parent has ended, or the system has no such call.
        with contextlib.suppress(OSError, AttributeError):
            cpus = len(os.sched_getaffinity(os.getppid()))
    return min(cpus, os.cpu_count() or 1, int((capacity.cgroup_cpu_quota() or cpus) + 0.5))


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _slurm_tasks() -> int:
    """Return the number of tasks of this SLURM step on this node, or 0 if unknown.

    In "4(x2),3", the third node has 3. SLURM_NTASKS_PER_NODE does not help: a program that `sbatch`
    runs has this variable, too, but is a single process.
    """
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            counts += [int(found[1])] * int(found[2] or 1)
    return next(iter(counts[_number("SLURM_NODEID") :]), 0)


def _jax_processes() -> int:
    """Return the number of processes that JAX has connected.

    0 if their coordinator is on another machine, or if JAX is not connected.
    """
    with FailuresIgnored():  # JAX is not imported, or only in part
        state = sys.modules["jax._src.distributed"].global_state
        if _is_here(state.coordinator_address or ""):
            return int(state.num_processes)
    return 0


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0] if re.search(r"\]:\d+$|^[^:]*:\d+$", address) else address
    return host.strip("[]") in ("localhost", "::1") or host.startswith("127.")
