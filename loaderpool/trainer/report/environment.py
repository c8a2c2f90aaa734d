"""What a training runs on: versions, and what the machine and its cgroups grant."""

from __future__ import annotations

import contextlib
import os
import platform
import sys

from loaderpool.system import capacity
from loaderpool.system.readable import readable_bytes

# By the module's name: each is told if it is imported, so by nothing that the training does not use.
_LIBRARIES = ("loaderpool", "numpy", "cloudpickle", "tensorflow", "keras", "torch", "jax", "ray")


def environment() -> dict[str, str]:
    """Return what it is, by name; there is no path, name of a user or name of a machine in it."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    quota, memory = capacity.cgroup_cpu_quota(), capacity.cgroup_memory_limit()
    told = {
        **{name: str(getattr(sys.modules[name], "__version__", "?")) for name in _LIBRARIES if name in sys.modules},
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "Keras' backend": _keras_backend(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": _cpu_model(),
        "CPUs of the machine": str(os.cpu_count()),
        "CPUs by affinity": "" if affinity is None else str(affinity),
        "CPUs by cgroup": "no limit" if quota is None else f"{quota:g}",
        "usable CPUs": str(capacity.usable_cpu_count()),
        "memory by cgroup": "no limit" if memory is None else readable_bytes(memory),
        "memory available": readable_bytes(capacity.available_memory_bytes()),
    }
    return {name: value for name, value in told.items() if value}


def _keras_backend() -> str:
    with contextlib.suppress(AttributeError, KeyError):
        return str(sys.modules["keras"].backend.backend())
    return ""


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()
