"""What the results are from: the machine and its versions, what disturbed a run, JSON lines of all that happened."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchlib.quiet import QUIET_CPUS

__all__ = ["Emit", "disturbance", "machine", "machine_line", "number", "write_events"]

_PACKAGES = ("numpy", "tensorflow-cpu", "tensorflow")

Emit = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def write_events(file: Path | None) -> Iterator[Emit]:
    """Append each event to the file as a line of JSON, with the time; None: they are dropped."""
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(file.open("a", encoding="utf-8")) if file else None

        def emit(event: dict[str, Any]) -> None:
            if sink is not None:
                print(json.dumps({**event, "at": _now().isoformat(timespec="seconds")}), file=sink, flush=True)

        yield emit


def disturbance(busy_cpus: float) -> str:
    """What to say of a run during which others kept so many CPUs busy; empty where the machine was quiet."""
    if busy_cpus <= QUIET_CPUS:
        return ""
    return f"others kept up to {busy_cpus:.1f} CPUs busy meanwhile, run again on a quiet machine"


def number(value: float) -> str:
    """Three digits at least, with thousands set apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def machine(packages: Iterable[str] = _PACKAGES) -> dict[str, Any]:
    """CPUs, load, and the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"cpu": _cpu_name(), "cpus": len(_usable_cpus()), "load_1min": os.getloadavg()[0], "versions": versions}


def machine_line(packages: Iterable[str] = _PACKAGES) -> str:
    """Date, CPUs and versions, in one line."""
    found = machine(packages)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{_now():%Y-%m-%d}, {found['cpus']} x {found['cpu']}, {versions}"


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
