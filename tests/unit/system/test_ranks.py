"""Number of a training's processes on this machine, by the variables of their launchers, and the
share of each.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from loaderpool.config import Auto
from loaderpool.system import capacity, ranks

LAUNCHERS = [
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "LOCAL_SIZE",
    "CROSS_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_CPUS_ON_NODE",
    "MASTER_ADDR",
    "WORLD_SIZE",
    "TF_CONFIG",
    *ranks._JOB_NAMES,
]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "jax._src.distributed", raising=False)


def setenv(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    for each in settings.split():
        monkeypatch.setenv(*each.split("=", 1))


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ("", 1),
        ("LOCAL_WORLD_SIZE=8", 8),
        ("OMPI_COMM_WORLD_LOCAL_SIZE=4", 4),
        ("MPI_LOCALNRANKS=4", 4),
        ("MV2_COMM_WORLD_LOCAL_SIZE=4", 4),
        ("PMI_LOCAL_SIZE=12", 12),
        ("HOROVOD_LOCAL_SIZE=2", 2),
        ("CROSS_SIZE=1 LOCAL_SIZE=8", 8),
        ("LOCAL_SIZE=8", 1),  # DeepSpeed sets both
        ("LOCAL_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=4", 4),
        ("SLURM_STEP_TASKS_PER_NODE=1 LOCAL_WORLD_SIZE=8", 8),
        ("SLURM_STEP_TASKS_PER_NODE=4", 4),
        ("SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_NODEID=1", 4),
        ("SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_NODEID=2", 3),
        ("SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_NODEID=3", 1),
        ("SLURM_STEP_TASKS_PER_NODE=some SLURM_NODEID=0", 1),
        ("MASTER_ADDR=localhost WORLD_SIZE=4", 4),
        ("MASTER_ADDR=127.0.0.1 WORLD_SIZE=4", 4),
        ("MASTER_ADDR=10.0.0.7 WORLD_SIZE=4", 1),
        ("WORLD_SIZE=4", 1),
        ("LOCAL_WORLD_SIZE=0", 1),
        ("LOCAL_WORLD_SIZE=-3", 1),
        ("LOCAL_WORLD_SIZE=many", 1),
    ],
)
def test_processes_are_counted_by_what_launchers_set(
    monkeypatch: pytest.MonkeyPatch, settings: str, count: int
) -> None:
    setenv(monkeypatch, settings)
    assert ranks.local_count() == count


@pytest.mark.parametrize(
    ("address", "count"),
    [("localhost:1234", 3), ("127.0.0.1:1234", 3), ("[::1]:1234", 3), ("10.0.0.7:1", 1), (None, 1)],
)
def test_processes_of_jax_are_counted_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, address: str | None, count: int
) -> None:
    state = SimpleNamespace(coordinator_address=address, num_processes=3)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))  # type: ignore[arg-type]
    assert ranks.local_count() == count


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ("TORCHELASTIC_RUN_ID=1 MASTER_ADDR=a MASTER_PORT=1", "MASTER_ADDR=a MASTER_PORT=1"),
        ("MASTER_ADDR=localhost MASTER_PORT=1", "MASTER_ADDR=localhost MASTER_PORT=2"),
        ("SLURM_JOB_ID=7 SLURM_STEP_ID=0", "SLURM_JOB_ID=7 SLURM_STEP_ID=1"),
        ("PMIX_NAMESPACE=prterun-1@1", "PMIX_NAMESPACE=prterun-2@1"),
        ("RAY_JOB_ID=01000000", "RAY_JOB_ID=02000000"),
        ("KERAS_DISTRIBUTION_JOB_ADDRESSES=a:1,b:1", ""),
    ],
)
def test_jobs_have_different_names(
    monkeypatch: pytest.MonkeyPatch, settings: str, other: str
) -> None:
    assert ranks.job() == ""
    setenv(monkeypatch, settings)
    named = ranks.job()
    assert named and ranks.job() == named
    for each in settings.split():
        monkeypatch.delenv(each.split("=")[0])
    setenv(monkeypatch, other)
    assert ranks.job() != named


def test_tasks_of_tensorflow_and_processes_of_jax_have_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()
    for task in range(2):
        config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": task}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        state = SimpleNamespace(coordinator_address="localhost:1", num_processes=2, process_id=task)
        monkeypatch.setitem(
            sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state)
        )  # type: ignore[arg-type]
        names.add(ranks.job())
    assert len(names) == 1 and "a:1" in names.pop()
    monkeypatch.setenv("TF_CONFIG", "no JSON")
    assert "localhost:1" in ranks.job()


def machine_of(
    monkeypatch: pytest.MonkeyPatch, cpus: int, own: int, launchers: int, quota: float | None = None
) -> None:
    """Pretend that this process is bound to some CPUs, and the process that launched it to others."""
    masks = {os.getppid(): set(range(launchers)), 0: set(range(own))}
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
    monkeypatch.setattr(capacity, "cgroup_cpu_quota", lambda: quota)


@pytest.mark.parametrize(
    ("cpus", "own", "launchers", "quota", "settings", "share"),
    [
        (64, 64, 64, None, "", 64),
        (64, 64, 64, None, "LOCAL_WORLD_SIZE=8", 8),
        (64, 64, 64, 16.0, "LOCAL_WORLD_SIZE=8", 2),
        (2, 2, 2, None, "LOCAL_WORLD_SIZE=8", 1),
        (64, 8, 64, None, "LOCAL_WORLD_SIZE=8", 8),  # each is bound to its own CPUs
        (64, 16, 16, None, "LOCAL_WORLD_SIZE=8", 2),  # all are bound to the same CPUs
        (64, 32, 64, None, "OMPI_COMM_WORLD_LOCAL_SIZE=8", 8),  # four are bound to each socket
        (64, 8, 64, None, "SLURM_STEP_TASKS_PER_NODE=8 SLURM_CPUS_ON_NODE=64", 8),
        (64, 16, 64, None, "SLURM_STEP_TASKS_PER_NODE=8 SLURM_CPUS_ON_NODE=16", 2),
        (64, 1, 64, None, "LOCAL_WORLD_SIZE=2", 1),
    ],
)
def test_cpus_are_divided_among_processes(
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    own: int,
    launchers: int,
    quota: float | None,
    settings: str,
    share: int,
) -> None:
    machine_of(monkeypatch, cpus, own, launchers, quota)
    setenv(monkeypatch, settings)
    assert ranks.usable_cpu_count() == share


def test_a_launcher_that_is_gone_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of(monkeypatch, 64, 16, 64)
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {*range(16)} if not pid else os.kill(pid, 0)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks.usable_cpu_count() == 2


def test_memory_is_divided_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 64 << 30)
    assert ranks.memory_bytes() == 64 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks.memory_bytes() == 8 << 30


@pytest.mark.parametrize(
    ("auto", "cpus", "processes", "first", "bounds"),
    [
        (Auto(), 64, 1, 64, (1, 256)),
        (Auto(), 8, 8, 8, (1, 32)),
        (Auto(), 1, 8, 1, (1, 4)),
        (Auto(), 1, 64, 1, (1, 4)),
        (Auto(), 2, 1, 2, (1, 32)),
        (Auto(2, 8), 1, 8, 2, (2, 8)),  # for each process
        (Auto(6), 1, 8, 6, (6, 6)),
    ],
)
def test_auto_is_bounded_by_the_share(
    auto: Auto, cpus: int, processes: int, first: int, bounds: tuple[int, int]
) -> None:
    assert (auto.first(cpus, processes), auto.bounds(cpus, processes)) == (first, bounds)
