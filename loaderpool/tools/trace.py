"""`loaderpool trace`: what happened in the last seconds of a training that runs, as a file for a trace viewer."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import click

from loaderpool.tools.commands import SECONDS, output
from loaderpool.tools.top import find_training, memory_files, read_at, read_pages
from loaderpool.trainer.tracing import (
    VIEWER,
    PoolRecords,
    Recording,
    chrome_trace,
    read_clocks,
    read_loader,
    read_pool,
    write_trace,
)


@click.command(epilog="Example:  loaderpool trace 12345 --last 10 -o slow.json.gz")
@click.argument("pid", required=False, type=click.IntRange(1))
@click.option("--last", "seconds", metavar="SECONDS", type=SECONDS, default=30, help="Seconds to include.")
@click.option(
    "-o", "--output", "path", metavar="FILE", callback=output(".json", ".json.gz"), default="trace.json",
    help="Output file: .json, or .json.gz (about a tenth of the size).",
)  # fmt: skip
def trace(pid: int | None, seconds: float, path: str) -> None:
    """Write a trace of the last seconds of a running training.

    PID is the process of the training. It is optional if only one training is running. The training is not interrupted.
    """
    training = find_training(pid)
    try:
        found = chrome_trace(_recording(training), seconds)
    except OSError as error:
        raise click.ClickException(f"process {training['pid']} has ended or closed a loader: {error}.") from None
    write_trace(Path(path), found.text)
    click.echo(f"{training['process']} (pid {training['pid']})")
    click.echo(f"{path}: the last {found.seconds:.1f} s, {found.events:,} events, {os.stat(path).st_size / 1e6:.1f} MB")
    for line in (*(f"Waited {wait}" for wait in found.waits), *(f"Note: {note}." for note in found.notes)):
        click.echo(line)
    click.echo(f"Open it in {VIEWER}, which does not upload it.")


def _recording(training: dict[str, Any]) -> Recording:
    """Return what the processes of a training have recorded."""
    arenas = {(at.st_dev, at.st_ino): path for path in memory_files(training["pid"], "arena") if (at := os.stat(path))}
    pools: dict[tuple[int, ...], PoolRecords] = {}
    loaders = []
    for path, page in read_pages(training["pid"]).items():
        (told,) = page["loaders"]
        arena, has_nodes = tuple(told["arena"] or ()), any(not each["pid"] for each in told["workers"])
        if arena in arenas and arena not in pools:
            read = functools.partial(read_at, arenas[arena])
            pools[arena] = read_pool(read, os.stat(arenas[arena]).st_size, has_nodes)
        place = list(pools).index(arena) if arena in pools else None
        loaders.append(read_loader(told, place, functools.partial(read_at, path)))
    return Recording(training["pid"], training["process"], loaders, list(pools.values()), *read_clocks())
