"""`loaderpool tune`: measures numbers of workers, and of threads, and says which to use."""

from __future__ import annotations

from pathlib import Path

import click

from loaderpool.tools.cli.options import (
    read_cluster,
    read_counts,
    read_hosts,
    read_json,
    read_plot,
    read_seconds,
    read_threads,
)
from loaderpool.tools.cli.report import tune_data, tune_table
from loaderpool.tools.cli.target import load_target
from loaderpool.tools.cli.terminal import progress, results, say, write_json
from loaderpool.tools.cli.tune_hosts import tune_hosts
from loaderpool.tools.tuning import Setting, cpu_budget, default_counts, measure_settings, recommend, settings_of

_ROUNDS = 2


@click.command(
    epilog="\b\nExamples:\n"
    "  loaderpool tune train:make_loader\n"
    "  loaderpool tune train:make_loader --workers 0,8,16,32 --seconds 10\n"
    "  loaderpool tune train:make_loader --workers 1,2 --threads 1,4,16\n"
    "  loaderpool tune train:make_loader --json rates.json --plot rates.png\n"
    "  loaderpool tune train:make_loader --ray auto --hosts 1,2,4"
)
@click.argument("target")
@click.option(
    "--seconds", metavar="N", callback=read_seconds, default="3", show_default=True, help="How long each is measured."
)
@click.option(
    "--workers",
    "counts",
    metavar="N,N,...",
    callback=read_counts,
    help="Numbers of workers to measure, such as 0,1,2,4.  [default: 0, 1, 2, 4, ... twice the CPUs]",
)
@click.option(
    "--threads",
    metavar="N,N,...",
    callback=read_threads,
    is_eager=True,  # known when --workers is checked
    help="Numbers of threads of each worker to measure, such as 1,4,16, with each number of workers.  "
    "[default: as many as TARGET has]",
)
@click.option(
    "--json", "json_to", metavar="FILE", callback=read_json, help="Write all measurements to this file, - for stdout."
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    callback=read_plot,
    help="Draw the rates into this .png, .svg or .pdf.",
)
@click.option(
    "--ray",
    "address",
    metavar="ADDRESS",
    callback=read_cluster,
    help='Measure on the Ray cluster there, "auto" or host:port, and say before what more hosts would bring.',
)
@click.option(
    "--hosts",
    metavar="N,N,...",
    callback=read_hosts,
    help="Numbers of the cluster's hosts to measure.  [default: 1, 2, 4, ... all]",
)
def tune(
    target: str,
    seconds: float,
    counts: tuple[int, ...] | None,
    threads: tuple[int, ...] | None,
    json_to: Path | str | None,
    plot_path: Path | None,
    address: str | None,
    hosts: tuple[int, ...] | None,
) -> None:
    """Measure TARGET with several numbers of workers, and of threads, and say which to use and why.

    TARGET is package.module:name, a Loader or a function without arguments that makes one. Each number is measured on
    a loader of its own, in two rounds, forth and back. Nothing is trained: the rates are what the loader can deliver
    to a training step that takes no time. A cache is left out, so that each number finds the same work to do.

    With --ray the numbers are of hosts, one on each node of a cluster. What they would bring is told first, from one
    worker here.
    """
    if hosts is not None and address is None:
        raise click.UsageError("--hosts are of a Ray cluster: name it by --ray, such as --ray auto")
    if address is not None and (counts or threads or plot_path):
        raise click.UsageError("--workers, --threads and --plot are about this machine: with --ray give --hosts")
    cpus = cpu_budget()
    loader = load_target(target)
    loader.close()  # its own workers would idle beside the measured ones, in memory that those want
    if threads is not None:
        Setting(0, max(threads)).apply(loader).close()  # a loader that can have none says so before it is measured
    has_cache = loader._core.arguments["cache"] is not None
    if has_cache:  # on disk what one number fills would be there for the next; in memory, for the passes of the faster
        loader = loader.replace(cache=None)
    if address is not None:
        tune_hosts(target, loader, address, hosts, seconds, json_to)
        return
    batch_size = loader.config.batch_size
    unit = "samples" if batch_size is not None else "elements"
    settings = settings_of(counts or default_counts(cpus.usable), threads, loader.config)
    with progress(len(settings) * _ROUNDS, _ROUNDS, unit) as watcher:
        measurements = measure_settings(loader, settings, seconds, rounds=_ROUNDS, watcher=watcher)
    recommendation = recommend(measurements, cpus.usable)

    console = results(json_to)
    say(console, f"{target}, batch_size={batch_size}", style="bold")
    console.print(tune_table(recommendation, unit, console.is_terminal))
    say(console, f"{cpus}.", style="dim")
    say(console, f"The ideal is {recommendation.ideal}.", style="dim")
    if recommendation.excess:
        say(console, f"*: {recommendation.excess}.", style="dim")
    say(console, "Rates are of the faster round; the spread says how far the slower one is behind.\n", style="dim")
    say(console, f"Use {recommendation.setting.arguments}: {recommendation.reason}.", style="bold")
    for note in recommendation.notes:
        say(console, f"Note: {note}")
    if has_cache:
        say(console, "Note: measured without the loader's cache, as in an epoch that fills it; later ones are faster.")
    write_json(console, json_to, tune_data(target, batch_size, cpus, seconds, recommendation))
    if plot_path is not None:
        from loaderpool.tools.cli.plot import write_plot  # matplotlib takes most of a second to import

        write_plot(plot_path, target, unit, cpus.usable, recommendation)
        say(console, f"Wrote {plot_path}.")
