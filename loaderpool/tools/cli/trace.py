"""`loaderpool trace`: what happened in the last seconds of a training that runs, as a file for a trace viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loaderpool.tools.cli.only_training import only_training
from loaderpool.tools.cli.options import answering_for, read_seconds, whole_number
from loaderpool.tools.watching.trainings import TrainingEnded, UnwatchableError, WatchedTraining
from loaderpool.trainer.tracing.chrome import VIEWER, chrome_trace
from loaderpool.trainer.tracing.files import check_trace_path, write_trace
from loaderpool.trainer.tracing.merging import UnmergeableError, merge_traces

_MERGE = "merge"


def _read_output(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    path = Path(value)
    if problem := check_trace_path(path):
        raise click.BadParameter(f"{problem}.", context, parameter)
    return path


class _TraceCommand(click.Command):
    """Has another command's arguments where the first one is `merge`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == [_MERGE]:
            return merge.make_context(f"{info_name} {_MERGE}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    cls=_TraceCommand,
    options_metavar="[OPTIONS]",
    epilog="\b\nExamples:\n  loaderpool trace\n  loaderpool trace 12345 --last 10 -o slow.json.gz\n"
    "  loaderpool trace merge gpu.json trace.json -o both.json\n\n"
    "`loaderpool trace merge --help` tells how a trace is put beside that of a GPU.",
)
@click.argument("pid", required=False, type=whole_number(1))
@click.option(
    "--last",
    "seconds",
    metavar="SECONDS",
    callback=read_seconds,
    default="30",
    show_default=True,
    help="How far to look back.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    callback=_read_output,
    default="trace.json",
    show_default=True,
    help="Where to write it: .json, or .json.gz, a tenth as large.",
)
def trace(pid: int | None, seconds: float, output: Path) -> None:
    """Write what happened in the last seconds of a running training, for a trace viewer.

    PID is the training's process; where there is only one training that may be looked at, it need not be given. The
    training needs no flag for it, and is not touched: what its processes record all the time is read, as its user may.
    """
    try:
        recording = WatchedTraining(only_training() if pid is None else pid).recording()
    except (UnwatchableError, TrainingEnded) as error:
        raise click.ClickException(f"{error}.") from None
    found = chrome_trace(recording, seconds)
    nbytes = _write(output, found.text)
    click.echo(f"{recording.command} (pid {recording.pid})")
    click.echo(f"{output}: the last {found.seconds:.1f} s, {found.events:,} events, {nbytes / 1e6:.1f} MB")
    for place, wait in enumerate(found.waits):
        click.echo(f"{'  and' if place else 'Waited'} {wait}")
    _tell(found.notes)


@click.command(
    epilog="\b\nExamples:\n  loaderpool trace merge gpu.json trace.json -o both.json\n"
    "  loaderpool trace merge profile/plugins/profile/*/*.trace.json.gz trace.json -o both.json.gz",
)
@click.argument("files", nargs=-1, required=True, metavar="FILE FILE...", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", callback=_read_output, required=True, help="Where to write it.")
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Put traces on one time line: of `loaderpool trace`, of torch.profiler, of JAX' and TensorFlow's profilers.

    Times are those of the wall clock, which each of them knows; JAX and TensorFlow note it in the .xplane.pb that
    they write beside the .trace.json.gz, where it is looked for.
    """
    try:
        merged = merge_traces(files)
    except UnmergeableError as error:
        raise click.ClickException(f"{error}.") from None
    nbytes = _write(output, merged.text)
    click.echo(f"{output}: {merged.seconds:.1f} s, {merged.events:,} events, {nbytes / 1e6:.1f} MB")
    _tell(merged.notes)


def _write(output: Path, text: str) -> int:
    with answering_for(output):
        write_trace(output, text)
        return output.stat().st_size


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        click.echo(f"Note: {note}.")
    click.echo(f"Open it in {VIEWER}, which shows it without sending it anywhere.")
