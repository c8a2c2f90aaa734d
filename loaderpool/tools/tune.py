"""`loaderpool tune`: measures numbers of workers and of threads, and says which to use."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Generator, Sequence

import click
from rich.table import Column, Table

from loaderpool.config import MAX_THREADS, MAX_WORKERS
from loaderpool.errors import ArgumentError, counted, readable_number
from loaderpool.ray.pool import RayPool
from loaderpool.system import capacity, clock
from loaderpool.tools.commands import SECONDS, numbers, output, results, write_json
from loaderpool.tools.target import load_target
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
            return f"workers=lp.RayPool({self.address!r}, nodes={self.workers})"
        threads = f", threads={self.threads}" if self.threads > 1 else ""
        return f"workers={self.workers}{threads}"

    @contextlib.contextmanager
    def applied(self, loader: Loader) -> Generator[Loader, None, None]:
        """A loader like this one that has the setting; closed at the end, with its pool."""
        with contextlib.ExitStack() as stack:
            workers = stack.enter_context(RayPool(self.address, nodes=self.workers)) if self.address else self.workers
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
    loader: Loader, settings: Sequence[Setting], seconds: float, on_round: Callable[[Measurement, int], None]
) -> list[Measurement]:
    """Measure each setting in two rounds, forth and back, so that a machine that gets busier favors none.

    Settings are ascending. 0 workers come last: a function that ends its process is an error with the sample's name in
    a worker, and ends this process here. Blocks: `seconds` for each setting and round, or for as long as a batch takes.
    """
    order = sorted(settings, key=lambda setting: setting.workers == 0)
    rounds: dict[Setting, list[Measurement]] = {setting: [] for setting in settings}
    for setting in [*order, *reversed(order)]:
        with setting.applied(loader) as measured:
            rounds[setting].append(_measure(measured, setting, seconds))
        on_round(rounds[setting][-1], len(rounds[setting]))
    pairs = [sorted(pair, key=lambda each: each.samples_per_s) for pair in rounds.values()]
    # Whatever else runs on the machine only ever makes a round slower.
    return [dataclasses.replace(best, spread=1 - other.samples_per_s / best.samples_per_s) for other, best in pairs]


def _measure(loader: Loader, setting: Setting, seconds: float) -> Measurement:
    """One window over a loader in its steady state.

    Workers that began together finish together, and a ticket may cover several batches, so batches come in bursts. The
    window begins and ends with the first batch of a burst: a cut elsewhere would be off by up to all of one.
    """
    with contextlib.closing(bursts_of(loader)) as bursts:
        start_s = began_s = next(bursts)
        at_most_s = _SETTLE_S if setting.address else _WARM_UP_S
        while start_s - began_s < at_most_s:
            seen = loader.statistics()
            at_work = sum(worker.samples > 0 for worker in seen.workers)
            if at_work >= max(setting.workers, len(seen.workers)) and seen.batches >= seen.memory.buffers:
                break  # each worker has made a sample, and each slot was used
            start_s = next(bursts)
        before = _counts(loader)
        while (end_s := next(bursts)) - start_s < seconds:
            pass
        after = _counts(loader)
    samples, nbytes, cpus, all_cpus = ((new - old) / (end_s - start_s) for old, new in zip(before, after, strict=True))
    return Measurement(setting, samples, nbytes, cpus, max(0.0, all_cpus - cpus))


def _counts(loader: Loader) -> tuple[float, float, float, float]:
    """Return samples and bytes so far, and the CPU seconds of this process with its workers and of all processes."""
    seen = loader.statistics()
    cpu_s = clock.process_cpu_ns() / 1e9 + sum(worker.cpu_s for worker in seen.workers)
    return seen.samples, seen.bytes, cpu_s, capacity.machine_cpu_s()


def bursts_of(loader: Loader) -> Generator[float, None, None]:
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
            raise ArgumentError("the loader has no batches, so there is nothing to measure")


def default_counts(cpus: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and `cpus`, up to twice `cpus`: work that waits gains from more workers than CPUs."""
    return sorted({0, cpus, 2 * cpus, *(1 << power for power in range((2 * cpus).bit_length()))})


def choose(measurements: Sequence[Measurement], cpus: int) -> tuple[Measurement, str]:
    """Return the smallest setting whose rate is within 5 % of the best one, and why. They are measured ascending."""
    best = max(measurements, key=lambda each: each.samples_per_s)
    chosen = next(each for each in measurements if each.samples_per_s >= (1 - _TOLERANCE) * best.samples_per_s)
    first, last = measurements[0], measurements[-1]
    gain = f"{chosen.samples_per_s / first.samples_per_s:.2f} times the rate of {first.setting}"
    end = f"{gain}, and " * (chosen is not first) + f"no setting is more than {_TOLERANCE:.0%} faster"
    if len(measurements) == 1:
        reason = "it is the only setting that was measured"
    elif chosen is last:
        more = "--threads" if first.setting.threads < last.setting.threads else "--workers"
        reason = f"it is the largest setting and the fastest ({gain}); try larger numbers with {more}"
    elif not best.setting.address and best.cpus + best.other_cpus >= _FULL * cpus:
        others = f", {best.other_cpus:.1f} of them by other programs" if best.other_cpus > _MUCH else ""
        reason = f"{end}, because all CPUs are in use ({counted(cpus, 'CPU')}{others})"
    elif chosen is first and not chosen.setting.workers:
        reason = f"{end}: transferring batches costs as much, or what workers share is the limit"
    else:
        reason = f"{end}, with {best.cpus:.1f} of {counted(cpus, 'CPU')} in use: workers share a disk, network or lock"
    return chosen, reason


def count_nodes(address: str, loader: Loader) -> int:
    """Return how many nodes of a Ray cluster take part in this loader's work, some seconds after the first batch."""
    with RayPool(address) as pool, loader.replace(workers=pool) as running:
        with contextlib.closing(bursts_of(running)) as times:
            until_s = next(times) + _SETTLE_S / 2
            while next(times) < until_s:
                pass
        return sum(node.state == "running" for node in running.statistics().nodes)


def ray_address(value: str) -> str:
    """Read an address of a cluster: what cannot be one is refused before anything runs."""
    try:
        RayPool(value).close()
    except ArgumentError as error:
        raise click.BadParameter(f"{error}.") from None
    return value


def describe_cpus() -> str:
    """How many CPUs can be used, and the three counts of which that is the smallest."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "none"
    return (
        f"{counted(capacity.usable_cpu_count(), 'usable CPU')} (os.cpu_count() {os.cpu_count() or 1}, affinity mask "
        f"{affinity}, cgroup quota {capacity.cgroup_cpu_quota() or 'none'})"
    )


@click.command(epilog="Example:  loaderpool tune train:make_loader --workers 1,2 --threads 1,4,16")
@click.argument("target")
@click.option("--seconds", metavar="N", type=SECONDS, default=3, help="Seconds to measure each setting.")
@click.option(
    "--workers", "counts", metavar="N,N,...", callback=numbers("workers", 0, MAX_WORKERS),
    help="Numbers of workers to measure (with --ray: of nodes).  [default: 0, 1, 2, 4, ... up to twice the CPUs; "
    "nodes: 1, 2, 4, ... all]",
)  # fmt: skip
@click.option(
    "--threads", metavar="N,N,...", callback=numbers("threads", 1, MAX_THREADS),
    help="Numbers of threads per worker to measure.  [default: as TARGET]",
)  # fmt: skip
@click.option("--json", "json_to", metavar="FILE", callback=output(), help="Write rates as JSON to FILE; -: stdout.")
@click.option("--plot", "plot_path", metavar="FILE", callback=output(".png", ".svg", ".pdf"), help="Plot the rates.")
@click.option("--ray", "address", metavar="ADDRESS", type=ray_address, help='Measure a cluster: "auto" or host:port.')
def tune(
    target: str,
    seconds: float,
    counts: tuple[int, ...] | None,
    threads: tuple[int, ...] | None,
    json_to: str | None,
    plot_path: str | None,
    address: str | None,
) -> None:
    """Measure numbers of workers and threads, and recommend one.

    TARGET is package.module:name: a Loader, or a function without arguments that returns one. Each setting is measured
    in two rounds, with its own loader. Nothing is trained: the rates are what the loader delivers to a training step
    that takes no time. A cache is disabled, so that each setting does the same work.
    """
    if address is not None and threads is not None:
        raise click.UsageError("--threads cannot be used with --ray")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib. Run: pip install 'loaderpool[cli]'")
    cpus = capacity.usable_cpu_count()
    loader = load_target(target)
    loader.close()  # its own workers would idle beside the measured ones, in memory that those want
    if (stream := loader._core.stream) is not None and stream.is_one_shot:
        cure = "Use a source whose __iter__ starts from the beginning each time"
        raise click.ClickException(f"{target} reads a {stream.kind}, which can be read only once. {cure}.")
    if threads is not None:
        with Setting(0, max(threads)).applied(loader):  # a loader that can have none says so now
            pass
    if has_cache := loader._core.arguments["cache"] is not None:
        loader = loader.replace(cache=None, workers=0)
    each = threads or (loader.config.threads,)
    if address is not None:
        nodes = count_nodes(address, loader)
        settings = {Setting(count, each[0], address) for count in counts or default_counts(nodes) if 0 < count <= nodes}
        if not settings:
            raise click.ClickException(f"the cluster has {counted(nodes, 'node')} with free CPUs")
    else:
        counts = counts or tuple(default_counts(cpus))
        settings = {Setting(count, number if count else 1) for count in counts for number in each}

    def say(done: Measurement, number: int) -> None:
        click.echo(f"round {number} of 2, {done.setting}: {readable_number(done.samples_per_s)} samples/s", err=True)

    measurements = measure_all(loader, sorted(settings), seconds / 2, say)
    chosen, reason = choose(measurements, cpus)

    console = results(json_to)
    console.print(f"{target}, batch_size={loader.config.batch_size}", style="bold")
    console.print(_table(measurements, chosen))
    console.print(f"{describe_cpus()}. Rates: the faster round. Spread: how much slower the other was.\n", style="dim")
    console.print(f"Use {chosen.setting}: {reason}.", style="bold")
    if any(measurement.spread > 0.2 for measurement in measurements):
        console.print("Note: the rounds differ. For a more reliable result, stop other programs or increase --seconds.")
    if has_cache:
        console.print("Note: measured without the loader's cache, as in the first epoch. Later epochs are faster.")
    data = {
        "target": target, "batch_size": loader.config.batch_size, "usable_cpus": cpus, "seconds": seconds,
        "recommendation": {**dataclasses.asdict(chosen.setting), "arguments": str(chosen.setting), "reason": reason},
        "measurements": [dataclasses.asdict(each) for each in measurements],
    }  # fmt: skip
    write_json(json_to, "tune", data)
    if plot_path is not None:
        _plot(plot_path, target, measurements, chosen)


def _table(measurements: Sequence[Measurement], chosen: Measurement) -> Table:
    """One row for each setting; the recommended one is marked."""
    first = measurements[0].setting
    numbered = "nodes" if first.address else "workers"
    headings = (numbered, "threads", "samples/s", "spread", "MB/s", "CPUs", f"speed-up over {first.workers}")
    table = Table(*(Column(each, justify="right") for each in headings), "", box=None, pad_edge=False)
    for each in measurements:
        table.add_row(
            f"{each.setting.workers}", f"{each.setting.threads}", readable_number(each.samples_per_s),
            f"{each.spread:.0%}", readable_number(each.bytes_per_s / 1e6), f"{each.cpus:.2f}",
            f"{each.samples_per_s / measurements[0].samples_per_s:.2f}", "<- use" if each is chosen else "",
            style="bold green" if each is chosen else None,
        )  # fmt: skip
    return table


def _plot(path: str, target: str, measurements: Sequence[Measurement], chosen: Measurement) -> None:
    """Draw a bar for each setting."""
    from matplotlib.figure import Figure  # takes most of a second to import

    figure = Figure(figsize=(6.4, 1.4 + 0.34 * len(measurements)), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    rates = [each.samples_per_s for each in measurements]
    colors = ["#1a7f4b" if each is chosen else "#8fb3d9" for each in measurements]
    bars = axes.barh([str(each.setting) for each in measurements], rates, color=colors)
    axes.bar_label(bars, list(map(readable_number, rates)), padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="samples per second", title=f"{target}: use {chosen.setting}")
    figure.savefig(path)
