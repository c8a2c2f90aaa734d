"""`loaderpool bench`: measures a loader as it is configured."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from loaderpool.system.readable import counted
from loaderpool.tools.cli.options import read_json, read_seconds
from loaderpool.tools.cli.report import bench_data, bench_table, workers_table
from loaderpool.tools.cli.target import load_target
from loaderpool.tools.cli.terminal import progress, results, say, write_json
from loaderpool.tools.tuning import Setting, cpu_budget, measure


@click.command(epilog="\b\nExample:\n  loaderpool bench train:make_loader --seconds 10 --json result.json")
@click.argument("target")
@click.option(
    "--seconds", metavar="N", callback=read_seconds, default="5", show_default=True, help="How long it is measured."
)
@click.option(
    "--json", "json_to", metavar="FILE", callback=read_json, help="Write the measurement to this file, - for stdout."
)
def bench(target: str, seconds: float, json_to: Path | str | None) -> None:
    """Measure TARGET as it is configured: rates, waits, and what each worker does with its time.

    TARGET is package.module:name, a Loader or a function without arguments that makes one. Nothing is trained: a batch
    is let go as soon as it is there.
    """
    cpus = cpu_budget()
    with contextlib.closing(load_target(target)) as loader:
        batch_size, workers = loader.config.batch_size, loader.workers
        if loader._core.pool is not None:
            loader._core.pool._keep_workers()  # or the rate would be that of no number
        unit = "samples" if batch_size is not None else "elements"
        with progress(1, 1, unit) as watcher:
            watcher.begin(Setting(workers), 1)
            window = measure(loader, seconds, on_progress=watcher.advance)
            watcher.end(window)

    console = results(json_to)
    count = "in this process" if workers == 0 else counted(workers, "worker")
    say(console, f"{target}, batch_size={batch_size}, {count}", style="bold")
    console.print(bench_table(window, unit, console.is_terminal))
    if window.workers:
        console.print(workers_table(window, unit, console.is_terminal))
    say(console, f"{cpus}.", style="dim")
    write_json(console, json_to, bench_data(target, batch_size, cpus, workers, window))
