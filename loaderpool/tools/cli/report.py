"""Measurements as tables for people and as plain data for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

import loaderpool
from loaderpool.system.readable import readable_number
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.tuning import Comparison, CpuBudget, Recommendation, Setting, Window
from loaderpool.trainer.loader import Loader

_FORMAT_VERSION = 1  # of the JSON files; raised when a key changes its meaning or goes away


def tune_table(recommendation: Recommendation, unit: str, is_terminal: bool) -> Table:
    """One row for each setting; the recommended one is marked, and with * what is above the ideal."""
    names_threads = recommendation.setting.names_threads
    base = recommendation.comparisons[0].measurement.setting
    over = f"speed-up over {base.label if names_threads and base.workers else base.workers}"
    table = plain_table(is_terminal)
    for heading in ("workers", *["threads"] * names_threads, f"{unit}/s", "spread", "CPU use", over, "of the ideal"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for each in recommendation.comparisons:
        measurement = each.measurement
        setting = measurement.setting
        is_chosen = setting == recommendation.setting
        table.add_row(
            str(setting.workers),
            *[str(setting.threads) if setting.workers else "-"] * names_threads,
            readable_number(measurement.samples_per_s),
            f"-{measurement.spread:.0%}" if len(measurement.windows) > 1 else "one round",
            f"{measurement.cpu_use:.2f}",
            f"{each.speedup:.2f}",
            f"{each.share_of_ideal:.0%}{'*' * each.is_above_ideal}",
            "<- use" if is_chosen else "",
            style="bold green" if is_chosen else None,
        )
    return table


def bench_table(window: Window, unit: str, is_terminal: bool) -> Table:
    """What a loader handed over, in rows of name and value."""
    table = plain_table(is_terminal, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in (
        (f"{unit}/s", readable_number(window.samples_per_s)),
        ("batches/s", readable_number(window.batches / window.elapsed_s)),
        ("MB/s", readable_number(window.bytes_per_s / 1e6)),
        ("CPUs in use", f"{window.cpu_use:.2f}"),
        ("time measured", f"{window.elapsed_s:.2f} s"),
        (
            "of it, waited for a batch",
            f"{window.consumer_wait_s:.2f} s ({window.consumer_wait_s / window.elapsed_s:.0%})",
        ),
    ):
        table.add_row(name, value)
    return table


def workers_table(window: Window, unit: str, is_terminal: bool) -> Table:
    """One row for each worker: what it did with its time."""
    table = plain_table(is_terminal)
    for heading in ("worker", "pid", f"{unit}", "busy", "waiting", "CPU"):
        table.add_column(heading, justify="right")
    for worker in sorted(window.workers, key=lambda worker: worker.index):
        shares = (worker.busy_s, worker.wait_s, worker.cpu_s)
        table.add_row(
            str(worker.index),
            worker.host or str(worker.pid),
            f"{worker.samples:,}",
            *(f"{seconds / window.elapsed_s:.0%}" for seconds in shares),
        )
    return table


def tune_data(
    target: str, batch_size: int | None, cpus: CpuBudget, seconds: float, recommendation: Recommendation
) -> dict[str, Any]:
    """All that `tune` found, for a JSON file."""
    return {
        **head_data("tune", target, batch_size, cpus),
        "seconds": seconds,
        "recommendation": {
            **_setting_data(recommendation.setting),
            "reason": recommendation.reason,
            "notes": list(recommendation.notes),
            "ideal": recommendation.ideal,
            "excess": recommendation.excess,
        },
        "measurements": [_comparison_data(each) for each in recommendation.comparisons],
    }


def bench_data(target: str, batch_size: int | None, cpus: CpuBudget, workers: int, window: Window) -> dict[str, Any]:
    """All that `bench` found, for a JSON file."""
    return {**head_data("bench", target, batch_size, cpus), "workers": workers, **window_data(window)}


def doctor_data(target: str | None, loader: Loader | None, cpus: CpuBudget, checks: Sequence[Check]) -> dict[str, Any]:
    """All that `doctor` found, for a JSON file."""
    return {
        **head_data("doctor", target, loader.config.batch_size if loader is not None else None, cpus),
        "ok": all(check.status != "fail" for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }


def head_data(command: str, target: str | None, batch_size: int | None, cpus: CpuBudget) -> dict[str, Any]:
    """What each JSON file begins with."""
    return {
        "format": _FORMAT_VERSION,
        "command": command,
        "loaderpool": loaderpool.__version__,
        "target": target,
        "batch_size": batch_size,
        "cpus": {
            "usable": cpus.usable,
            "decided_by": cpus.decided_by,
            "os_cpu_count": cpus.machine,
            "affinity": cpus.affinity,
            "cgroup_quota": cpus.quota,
        },
    }


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    measurement = comparison.measurement
    return {
        **_setting_data(measurement.setting),
        "samples_per_s": measurement.samples_per_s,
        "spread": measurement.spread,
        "cpu_use": measurement.cpu_use,
        "speedup": comparison.speedup,
        "ideal_speedup": comparison.ideal_speedup,
        "share_of_ideal": comparison.share_of_ideal,
        "windows": [window_data(window) for window in measurement.windows],
    }


def _setting_data(setting: Setting) -> dict[str, int]:
    """The threads stand there where they were varied."""
    return {"workers": setting.workers, **({"threads": setting.threads} if setting.names_threads else {})}


def window_data(window: Window) -> dict[str, Any]:
    """A window for a JSON file."""
    return {
        "elapsed_s": window.elapsed_s,
        "batches": window.batches,
        "samples": window.samples,
        "bytes": window.nbytes,
        "samples_per_s": window.samples_per_s,
        "bytes_per_s": window.bytes_per_s,
        "consumer_wait_s": window.consumer_wait_s,
        "cpu_use": window.cpu_use,
        "own_cpu_s": window.own_cpu_s,
        "queued_s": window.queued_s,
        "per_worker": [
            {
                "index": worker.index,
                "pid": worker.pid,
                "batches": worker.batches,
                "samples": worker.samples,
                "busy_s": worker.busy_s,
                "wait_s": worker.wait_s,
                "cpu_s": worker.cpu_s,
            }
            for worker in window.workers
        ],
    }


def plain_table(is_terminal: bool, *, show_header: bool = True) -> Table:
    """An empty table: ruled on a terminal, columns of plain text elsewhere."""
    return Table(box=box.SIMPLE_HEAD if is_terminal else None, show_header=show_header, pad_edge=is_terminal)
