"""How many CPUs there are to use, and which of the three counts says so."""

from __future__ import annotations

import dataclasses
import os

from loaderpool.system import capacity
from loaderpool.system.readable import counted


@dataclasses.dataclass(frozen=True)
class CpuBudget:
    """The CPUs that this process may use, and where the number comes from."""

    usable: int  # what "auto" starts workers for
    machine: int  # os.cpu_count()
    affinity: int | None  # CPUs in the affinity mask; None where the system has no such mask
    quota: float | None  # CPUs' worth of time that the cgroup grants; None without a quota

    @property
    def decided_by(self) -> str:
        """The count that is the smallest; a tie goes to the plainer one."""
        if self.machine <= self.usable:
            return "os.cpu_count()"
        if self.affinity is not None and self.affinity <= self.usable:
            return "the affinity mask"
        return "the cgroup's CPU quota"

    def __str__(self) -> str:
        affinity = "none" if self.affinity is None else str(self.affinity)
        quota = "none" if self.quota is None else f"{self.quota:g}"
        return (
            f"{counted(self.usable, 'usable CPU')}, decided by {self.decided_by} "
            f"(os.cpu_count() {self.machine}, affinity mask {affinity}, cgroup quota {quota})"
        )


def cpu_budget() -> CpuBudget:
    """The counts as they are now."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return CpuBudget(capacity.usable_cpu_count(), os.cpu_count() or 1, affinity, capacity.cgroup_cpu_quota())
