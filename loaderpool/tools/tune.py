"""`loaderpool tune`: measures numbers of workers and of threads, and says which to use."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loaderpool.errors import ArgumentError, counted, readable_number
from loaderpool.ray.pool import RayPool
from loaderpool.settings.groups import MAX_THREADS, MAX_WORKERS
from loaderpool.system import capacity, clock
from loaderpool.system.capacity import machine_cpu_s
from loaderpool.tools.commands import (
    SECONDS,
    answering_for,
    numbers,
    output,
    plain_table,
    read_cluster,
    read_json,
    results,
    say,
    write_json,
)
from loaderpool.tools.doctor import describe_cpus
from loaderpool.tools.target import load_target
from loaderpool.trainer.epochs.statistics import Statistics
from loaderpool.trainer.loader import Loader

# The first calls import and open files, and the first batches fault the slots' pages in. Smaller counts some of that;
# larger only lengthens the measuring.
_WARM_UP_S = 1.0
_SETTLE_S = 10.0  # until all nodes of a cluster have begun
_TOLERANCE = 0.05  # rates that differ by less are the same
_FULL = 0.9  # of the CPUs
_MUCH = 0.3  # CPUs of other programs that are worth a word


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """What is varied; of two, the smaller one takes less memory."""

    workers: int  # processes, 0: this one; of a cluster: nodes
    threads: int = 1  # of each worker
    address: str = ""  # of the Ray cluster; empty: this machine

    def __str__(self) -> str:
        """What to write in a loader's call."""
        if self.address:
            return f"workers=lp.RayPool({self.address!r}, hosts={self.workers})"
        threads = f", threads={self.threads}" if self.threads > 1 else ""
        return f"workers={self.workers}{threads}"

    @contextlib.contextmanager
    def applied(self, loader: Loader) -> Generator[Loader, None, None]:
        """A loader like this one that has the setting; closed at the end, with its pool."""
        with contextlib.ExitStack() as stack:
            workers = stack.enter_context(RayPool(self.address, hosts=self.workers)) if self.address else self.workers
            yield stack.enter_context(loader.replace(workers=workers, threads=self.threads))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a loader with one setting handed over, in the faster of its rounds."""

    setting: Setting
    samples_per_s: float
    bytes_per_s: float
    cpus: float  # in use by this process and its workers
    other_cpus: float  # in use by other processes of this machine
    spread: float = 0.0  # by what share the slower round is below the faster


def measure_all(
    loader: Loader,
    settings: Sequence[Setting],
    seconds: float,
    on_round: Callable[[Setting, Measurement | None], None] = lambda setting, measurement: None,
) -> list[Measurement]:
    """Measure each setting in two rounds, forth and back, so that a machine that gets busier favors none.

    0 workers come last: a function that ends its process is an error with the sample's name in a worker, and ends this
    process here. Blocks: `seconds` for each setting and round, and longer where batches take longer.

    Args:
        loader: each setting is measured on a loader made of it; this one is not iterated.
        settings: what to measure, each once.
        seconds: for each setting in each round.
        on_round: called before each measurement with None, and after it.

    Raises:
        ArgumentError: a pass over the loader has no batch.
    """
    order = sorted(settings, key=lambda setting: (setting.workers == 0, setting))
    rounds: dict[Setting, list[Measurement]] = {setting: [] for setting in sorted(settings)}
    for setting in [*order, *reversed(order)]:
        on_round(setting, None)
        with setting.applied(loader) as measured:
            rounds[setting].append(_measure(measured, setting, seconds))
        on_round(setting, rounds[setting][-1])
    pairs = [sorted(pair, key=lambda each: each.samples_per_s) for pair in rounds.values()]
    # Whatever else runs on the machine only ever makes a round slower.
    return [dataclasses.replace(best, spread=1 - other.samples_per_s / best.samples_per_s) for other, best in pairs]


def _measure(loader: Loader, setting: Setting, seconds: float) -> Measurement:
    """One window over a loader in its steady state.

    Workers that began together finish together, and a ticket may cover several batches, so batches come in bursts. The
    window begins and ends with the first batch of a burst: a cut elsewhere would be off by up to all of one.
    """
    with contextlib.closing(_bursts(loader)) as bursts:
        start_s = began_s = next(bursts)
        at_most_s = _SETTLE_S if setting.address else _WARM_UP_S
        while not _is_warm(loader.statistics(), setting) and start_s - began_s < at_most_s:
            start_s = next(bursts)
        before, cpu_s, machine_s = loader.statistics(), clock.process_cpu_ns() / 1e9, machine_cpu_s()
        while (end_s := next(bursts)) - start_s < seconds:
            pass
        after, cpu_s, machine_s = loader.statistics(), clock.process_cpu_ns() / 1e9 - cpu_s, machine_cpu_s() - machine_s
    began_with_s = {worker.pid: worker.cpu_s for worker in before.workers}
    cpu_s += sum(worker.cpu_s - began_with_s.get(worker.pid, 0.0) for worker in after.workers)
    samples, nbytes, took_s = after.samples - before.samples, after.bytes - before.bytes, end_s - start_s
    return Measurement(setting, samples / took_s, nbytes / took_s, cpu_s / took_s, max(0.0, machine_s - cpu_s) / took_s)


def _is_warm(seen: Statistics, setting: Setting) -> bool:
    """Whether each worker has made a sample, and each slot was used."""
    at_work = [worker for worker in seen.workers if worker.samples]
    return len(at_work) >= max(setting.workers, len(seen.workers)) and seen.batches >= seen.memory.slots


def _bursts(loader: Loader) -> Generator[float, None, None]:
    """When the first batch of each burst was handed over: it alone was waited for. Pass follows pass."""
    first_s = latest_s = 0.0
    taken = 0
    while True:
        before = taken
        for _ in loader:  # a batch is let go when the next one is asked for, as training does
            now_s = clock.monotonic_s()
            first_s = first_s or now_s  # the start is no gap
            taken += 1
            # Half of the mean gap: in a burst gaps are next to none, before one they are its size times the mean, and
            # in an even stream all of them are near the mean.
            is_first = now_s - latest_s >= 0.5 * (now_s - first_s) / taken
            latest_s = now_s
            if is_first:
                yield now_s
        if taken == before:
            raise ArgumentError("a pass over the loader has no batch, so there is nothing to measure")


def default_counts(cpus: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and `cpus`, up to twice `cpus`: work that waits gains from more workers than CPUs."""
    return sorted({0, cpus, 2 * cpus, *(1 << power for power in range((2 * cpus).bit_length()))})


def choose(measurements: Sequence[Measurement], cpus: int) -> tuple[Measurement, str]:
    """Return the smallest setting whose rate is within 5 % of the best one, and why, in a sentence.

    Args:
        measurements: of different settings, ascending, at least one.
        cpus: CPUs that may be used.
    """
    best = max(measurements, key=lambda each: each.samples_per_s)
    chosen = next(each for each in measurements if each.samples_per_s >= (1 - _TOLERANCE) * best.samples_per_s)
    first, last = measurements[0], measurements[-1]
    gain = f"{chosen.samples_per_s / first.samples_per_s:.2f} times the rate of {first.setting}"
    if len(measurements) == 1:
        reason = "it is the only setting that was measured"
    elif chosen is last:
        more = "--threads" if first.setting.threads < last.setting.threads else "--workers"
        reason = f"the largest setting measured is the fastest ({gain}); larger numbers for {more} would look further"
    elif not best.setting.address and best.cpus + best.other_cpus >= _FULL * cpus:
        others = f", {best.other_cpus:.1f} of them with other programs" if best.other_cpus > _MUCH else ""
        reason = f"{gain}; more bring less than 5 %, for {counted(cpus, 'CPU')} are full{others}"
    elif chosen is first and not chosen.setting.workers:
        reason = "workers gain less than 5 %: handing batches over costs as much, or what they share is the limit"
    else:
        reason = (
            f"{gain}; more bring less than 5 %, with {best.cpus:.1f} of {counted(cpus, 'CPU')} in use: what the "
            "workers share is the limit (a disk, a network, a lock)"
        )
    return chosen, reason


def nodes_of(address: str, loader: Loader) -> int:
    """Return how many nodes of a Ray cluster take part in this loader's work, some seconds after the first batch."""
    with RayPool(address) as pool, loader.replace(workers=pool) as running:
        times = _bursts(running)
        began_s = next(times)
        while next(times) - began_s < _SETTLE_S / 2:
            pass
        times.close()
        return sum(host.state == "running" for host in running.statistics().hosts)


@click.command(
    epilog="\b\nExamples:\n"
    "  loaderpool tune train:make_loader\n"
    "  loaderpool tune train:make_loader --workers 1,2 --threads 1,4,16\n"
    "  loaderpool tune train:make_loader --json rates.json --plot rates.png\n"
    "  loaderpool tune train:make_loader --ray auto"
)
@click.argument("target")
@click.option(
    "--seconds", metavar="N", type=SECONDS, default=3, show_default=True,
    help="How long each setting is measured.",
)  # fmt: skip
@click.option(
    "--workers", "counts", metavar="N,N,...", callback=numbers("workers", 0, MAX_WORKERS),
    help="Numbers of workers to measure; with --ray, of nodes.  [default: 0, 1, 2, 4, ... twice the CPUs; of nodes: "
    "1, 2, 4, ... all]",
)  # fmt: skip
@click.option(
    "--threads", metavar="N,N,...", callback=numbers("threads", 1, MAX_THREADS),
    help="Numbers of threads of each worker to measure.  [default: as many as TARGET has]",
)  # fmt: skip
@click.option("--json", "json_to", metavar="FILE", callback=read_json, help="Write all rates here, - for stdout.")
@click.option(
    "--plot", "plot_path", metavar="FILE", callback=output(".png", ".svg", ".pdf"),
    help="Draw the rates: .png, .svg or .pdf.",
)  # fmt: skip
@click.option(
    "--ray", "address", metavar="ADDRESS", callback=read_cluster,
    help='Measure numbers of nodes of the Ray cluster there: "auto" or host:port.',
)  # fmt: skip
def tune(
    target: str,
    seconds: float,
    counts: tuple[int, ...] | None,
    threads: tuple[int, ...] | None,
    json_to: str | None,
    plot_path: Path | None,
    address: str | None,
) -> None:
    """Measure TARGET with several numbers of workers, and of threads, and say which to use and why.

    TARGET is package.module:name, a Loader or a function without arguments that makes one. Each setting is measured on
    a loader of its own, in two rounds, forth and back. Nothing is trained: the rates are what the loader can deliver
    to a training step that takes no time. A cache is left out, so that each setting finds the same work to do.
    """
    if address is not None and threads is not None:
        raise click.UsageError("--threads are of workers of this machine: leave them out with --ray")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("a plot needs matplotlib; install it by: pip install 'loaderpool[cli]'")
    cpus = capacity.usable_cpu_count()
    loader = load_target(target)
    loader.close()  # its own workers would idle beside the measured ones, in memory that those want
    if threads is not None:
        with Setting(0, max(threads)).applied(loader):  # a loader that can have none says so now
            pass
    if has_cache := loader._core.arguments["cache"] is not None:
        loader = loader.replace(cache=None, workers=0)
    each = threads or (loader.config.threads,)
    if address is not None:
        nodes = nodes_of(address, loader)
        settings = {Setting(count, each[0], address) for count in counts or default_counts(nodes) if 0 < count <= nodes}
        if not settings:
            raise click.ClickException(f"the cluster has {counted(nodes, 'node')} with CPUs free")
    else:
        counts = counts or tuple(default_counts(cpus))
        settings = {Setting(count, number if count else 1) for count in counts for number in each}
    unit = "samples" if loader.config.batch_size is not None else "elements"
    with _progress(2 * len(settings), unit) as on_round:
        measurements = measure_all(loader, sorted(settings), seconds / 2, on_round)
    chosen, reason = choose(measurements, cpus)

    console = results(json_to)
    say(console, f"{target}, batch_size={loader.config.batch_size}", style="bold")
    console.print(_table(measurements, chosen, unit, console.is_terminal))
    say(console, f"{describe_cpus()}. Rates are of the faster round; spread: how far the slower is below.\n", "dim")
    say(console, f"Use {chosen.setting}: {reason}.", style="bold")
    if any(measurement.spread > 0.2 for measurement in measurements):
        say(console, "Note: the rounds differ; a quiet machine and a larger --seconds give a surer answer.")
    if has_cache:
        say(console, "Note: measured without the loader's cache, as in an epoch that fills it; later ones are faster.")
    data = {
        "target": target, "batch_size": loader.config.batch_size, "usable_cpus": cpus, "seconds": seconds,
        "recommendation": {**dataclasses.asdict(chosen.setting), "arguments": str(chosen.setting), "reason": reason},
        "measurements": [dataclasses.asdict(each) for each in measurements],
    }  # fmt: skip
    write_json(console, json_to, "tune", data)
    if plot_path is not None:
        _plot(plot_path, target, unit, measurements, chosen)
        say(console, f"Wrote {plot_path}.")


@contextlib.contextmanager
def _progress(rounds: int, unit: str) -> Iterator[Callable[[Setting, Measurement | None], None]]:
    """Yield what shows a bar on a terminal, and a line for each measurement elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rounds)

        def on_round(setting: Setting, measurement: Measurement | None) -> None:
            bar.update(task, description=str(setting), advance=measurement is not None)
            if measurement is not None and not console.is_terminal:
                say(console, f"{setting}: {readable_number(measurement.samples_per_s)} {unit}/s")

        yield on_round


def _table(measurements: Sequence[Measurement], chosen: Measurement, unit: str, is_terminal: bool) -> Table:
    """One row for each setting; the recommended one is marked."""
    table = plain_table(is_terminal)
    first = measurements[0]
    for heading in ("nodes" if first.setting.address else "workers", "threads", f"{unit}/s", "spread", "MB/s", "CPUs"):
        table.add_column(heading, justify="right")
    table.add_column(f"speed-up over {first.setting.workers}", justify="right")
    table.add_column("")
    for each in measurements:
        table.add_row(
            f"{each.setting.workers}", f"{each.setting.threads}", readable_number(each.samples_per_s),
            f"-{each.spread:.0%}", readable_number(each.bytes_per_s / 1e6), f"{each.cpus:.2f}",
            f"{each.samples_per_s / first.samples_per_s:.2f}", "<- use" if each is chosen else "",
            style="bold green" if each is chosen else None,
        )  # fmt: skip
    return table


def _plot(path: Path, target: str, unit: str, measurements: Sequence[Measurement], chosen: Measurement) -> None:
    """Draw a bar for each setting."""
    from matplotlib.figure import Figure  # takes most of a second to import

    figure = Figure(figsize=(6.4, 1.4 + 0.34 * len(measurements)), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    names = {each: f"{each.setting.workers} × {each.setting.threads}" for each in measurements}
    rates = [each.samples_per_s for each in measurements]
    colors = ["#1a7f4b" if each is chosen else "#8fb3d9" for each in measurements]
    slower = [each.spread * each.samples_per_s for each in measurements]
    bars = axes.barh(list(names.values()), rates, color=colors, xerr=[slower, [0] * len(rates)])
    axes.bar_label(bars, [f" {readable_number(rate)}" for rate in rates])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"{unit} per second (line: the slower round)")
    axes.set_ylabel(f"{'nodes' if chosen.setting.address else 'workers'} × threads")
    axes.set_title(f"{target}: use {names[chosen]}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    with answering_for(path):
        figure.savefig(path)
