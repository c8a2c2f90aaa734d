"""`loaderpool trace`: writes the last seconds of a running training for a trace viewer."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import click

from loaderpool.errors import readable_bytes
from loaderpool.system import clock
from loaderpool.tools.commands import SECONDS, WholeNumber, output
from loaderpool.tools.top import find_training, memory_files, read_at, read_pages
from loaderpool.trainer.tracing import VIEWER, Tracing, write_trace


@click.command(epilog="Example:  loaderpool trace 12345 --last 10 -o slow.json.gz")
@click.argument("pid", required=False, type=WholeNumber(1))
@click.option(
    "--last", "seconds", metavar="SECONDS", type=SECONDS, default=30, help="Seconds to include."
)
@click.option(
    "-o", "--output", "path", metavar="FILE", callback=output(".json", ".json.gz"),
    default="trace.json", help="Output file: .json, or .json.gz (about a tenth of the size).",
)  # fmt: skip
def trace(pid: int | None, seconds: float, path: str) -> None:
    """Write a trace of the last seconds of a running training.

    PID is the process of the training. It is optional if only one training is running. The training
    is not interrupted.
    """
    training = find_training(pid)
    try:
        found = _tracing(training).trace(seconds)
    except OSError as error:
        raise click.ClickException(
            f"process {training['pid']} has ended or closed a loader: {error}."
        ) from None
    write_trace(Path(path), found.text)
    click.echo(f"{training['process']} (pid {training['pid']})")
    click.echo(
        f"{path}: the last {found.seconds:.1f} s, {found.events:,} events, "
        f"{readable_bytes(os.stat(path).st_size)}"
    )
    for line in (
        *(f"Waited {wait}." for wait in found.waits),
        *(f"Note: {note}." for note in found.notes),
    ):
        click.echo(line)
    click.echo(f"Open it in {VIEWER}, which does not upload it.")


def _tracing(training: dict[str, Any]) -> Tracing:
    """Return the recorders of a training's processes, read from its memory files."""
    pid, pages = (
        training["pid"],
        {path: page["loaders"][0] for path, page in read_pages(training["pid"]).items()},
    )
    tracing = Tracing(
        pid, training["process"], len(pages) == 1, clock.monotonic_ns(), clock.wall_ns()
    )
    # Several descriptors may refer to the same arena.
    found = [(path, os.stat(path)) for path in memory_files(pid, "arena")]
    for path, arena in {(file.st_dev, file.st_ino): (path, file) for path, file in found}.values():
        tracing.add_pool(functools.partial(read_at, path), arena.st_size)
    for path, told in pages.items():
        tracing.add_loader(told, functools.partial(read_at, path))
    return tracing
