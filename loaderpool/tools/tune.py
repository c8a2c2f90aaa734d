"""`loaderpool tune`: measures numbers of workers and threads, and recommends one setting."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import click
from rich.table import Column, Table

import loaderpool
from loaderpool.config import MAX_THREADS, MAX_WORKERS
from loaderpool.errors import ArgumentError, counted, readable_number
from loaderpool.system import capacity, clock
from loaderpool.tools.commands import SECONDS, numbers, output, results
from loaderpool.tools.target import find_target, wrong_target
from loaderpool.trainer.loader import Loader
from loaderpool.trainer.loader_core import without_workers

# Seconds before the measurement. The first calls import modules and open files, and the first
# batches fault the slots' pages in. Smaller: some of that is measured. Larger: only the measurement
# takes longer.
_WARM_UP_S = 1.0
_TOLERANCE = 0.05  # rates that differ by less than this share count as equal
_FULL = 0.9  # share of the CPUs from which all of them count as in use
_BUSY = 0.25  # share of the CPUs from which other programs are mentioned
_MOST_SPREAD = 0.2  # spread of two rounds above which another run may recommend another setting


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """A combination to measure. The smaller of two settings takes less memory."""

    workers: int  # processes; 0: the main process alone
    threads: int = 1  # threads of each worker

    def __str__(self) -> str:
        """Return the setting as arguments of a loader's call."""
        return f"workers={self.workers}{f', threads={self.threads}' if self.threads > 1 else ''}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Results of a loader with one setting, in the faster of its rounds."""

    setting: Setting
    samples_per_s: float
    bytes_per_s: float
    cpus: float  # CPUs used by this process and its workers
    other_cpus: float  # CPUs used by other processes of this machine
    spread: float = 0.0  # share by which the slower round is below the faster


def measure_all(
    make: Callable[[], Loader],
    settings: Sequence[Setting],
    seconds: float,
    on_round: Callable[[Measurement, int], None],
) -> list[Measurement]:
    """Measure each setting in two rounds, forward and backward.

    So a machine that gets busier favors no setting. Each measurement calls `make`, and replaces
    the settings of the loader that `make` returns. `settings` are ascending. Settings with 0
    workers come last. If the function kills its process, workers report an error with the sample's
    name first. Without workers, this process dies. Blocks: `seconds` for each setting and round,
    or longer if a batch takes longer.
    """
    order = sorted(settings, key=lambda setting: setting.workers == 0)
    rounds: dict[Setting, list[Measurement]] = {setting: [] for setting in settings}
    for setting in [*order, *reversed(order)]:
        with make().replace(workers=setting.workers, threads=setting.threads) as measured:
            rounds[setting].append(_measure(measured, setting, seconds))
        on_round(rounds[setting][-1], len(rounds[setting]))
    pairs = [sorted(pair, key=lambda each: each.samples_per_s) for pair in rounds.values()]
    # The better round counts, because other programs on the machine can only slow a round down.
    return [
        dataclasses.replace(best, spread=1 - other.samples_per_s / best.samples_per_s)
        for other, best in pairs
    ]


def _measure(loader: Loader, setting: Setting, seconds: float) -> Measurement:
    """Measure one window over a loader in its steady state.

    Batches come in bursts, because workers that started together finish together, and a ticket may
    cover several batches. The window begins and ends with the first batch of a burst. Otherwise the
    count could be off by up to a burst.
    """
    loader._core.observer.tries_fewer = False  # all workers are measured, so no trial may use fewer
    with contextlib.closing(bursts_of(loader)) as bursts:
        start_s = began_s = next(bursts)
        while start_s - began_s < _WARM_UP_S:
            start_s = next(bursts)
        before = _counts(loader)
        while (end_s := next(bursts)) - start_s < seconds:
            pass
        after = _counts(loader)
    samples, nbytes, cpus, all_cpus = (
        (new - old) / (end_s - start_s) for old, new in zip(before, after, strict=True)
    )
    return Measurement(setting, samples, nbytes, cpus, max(0.0, all_cpus - cpus))


def _counts(loader: Loader) -> tuple[float, float, float, float]:
    """Return samples, bytes, and CPU seconds so far.

    The CPU seconds are those of this process with its workers, and those of all processes.
    """
    seen = loader.statistics()
    cpu_s = clock.process_cpu_ns() / 1e9 + sum(worker.cpu_s for worker in seen.workers)
    return seen.samples, seen.bytes, cpu_s, capacity.machine_cpu_s()


def bursts_of(loader: Loader) -> Generator[float, None, None]:
    """Yield the times at which the first batch of each burst arrived. Repeats passes forever.

    Only the first batch of a burst is waited for.
    """
    first_s = latest_s = 0.0
    taken = 0
    while True:
        before = taken
        for _ in loader:  # as in training, a batch is released when the next one is requested
            now_s = clock.monotonic_s()
            first_s = first_s or now_s  # the time before the first batch is no gap
            taken += 1
            # Half of the mean gap. The gaps within a burst are close to 0. The gap before a burst
            # is the mean times the size of the burst. In an even stream all gaps are close to the
            # mean.
            is_first = now_s - latest_s >= 0.5 * (now_s - first_s) / taken
            latest_s = now_s
            if is_first:
                yield now_s
        if taken == before:
            raise ArgumentError("the loader has no batches, so there is nothing to measure")
        stream = loader._core.stream
        if stream is not None and stream.is_one_shot:
            raise ArgumentError(
                f"source is a {stream.kind}, which ended after {taken} batches, before the "
                "measurement did. Set a smaller --seconds"
            )


def default_counts(cpus: int) -> list[int]:
    """Return 0, 1, 2, 4, ... and `cpus`, up to twice `cpus`.

    Work that waits gains from more workers than CPUs.
    """
    return sorted({0, cpus, 2 * cpus, *(1 << power for power in range((2 * cpus).bit_length()))})


def choose(measurements: Sequence[Measurement], cpus: int) -> tuple[Measurement, str]:
    """Return the smallest setting with a rate within 5 % of the best, and the reason.

    `measurements` are ascending by setting.
    """
    best = max(measurements, key=lambda each: each.samples_per_s)
    chosen = next(
        each for each in measurements if each.samples_per_s >= (1 - _TOLERANCE) * best.samples_per_s
    )
    first, last = measurements[0], measurements[-1]
    has_others = best.other_cpus >= _BUSY * cpus
    gain = f"{chosen.samples_per_s / first.samples_per_s:.2f} times the rate of {first.setting}"
    end = (
        f"it has {gain}, and " * (chosen is not first)
        + f"no setting is more than {_TOLERANCE:.0%} faster"
    )
    if len(measurements) == 1:
        reason = "it is the only setting that was measured"
    elif chosen is last:
        more = "--threads" if first.setting.threads < last.setting.threads else "--workers"
        reason = (
            f"it is the largest setting and the fastest ({gain}); try larger numbers with {more}"
        )
    elif best.cpus + best.other_cpus >= _FULL * cpus:
        others = f", {best.other_cpus:.1f} by other programs" * has_others
        reason = f"{end}, because all CPUs are in use ({counted(cpus, 'CPU')}{others})"
    elif has_others:
        reason = (
            f"{end}, while other programs use {best.other_cpus:.1f} of {counted(cpus, 'CPU')}. "
            "Stop them and measure again"
        )
    elif chosen is first and not chosen.setting.workers:
        reason = f"{end}: transferring batches costs as much, or what workers share is the limit"
    else:
        reason = (
            f"{end}, with {best.cpus:.1f} of {counted(cpus, 'CPU')} in use: "
            "workers share a disk, network or lock"
        )
    return chosen, reason


def is_clear(measurements: Sequence[Measurement], chosen: Measurement) -> bool:
    """Return True if another run will probably choose the same setting.

    The spread of the two rounds decides.
    """
    best = max(measurements, key=lambda each: each.samples_per_s)
    if max(best.spread, chosen.spread) <= _MOST_SPREAD:
        return True
    smaller = measurements[: measurements.index(chosen)]
    enough = (1 - _TOLERANCE) * best.samples_per_s * (1 - best.spread)
    return chosen is best and bool(smaller) and all(each.samples_per_s < enough for each in smaller)


def describe_cpus() -> str:
    """Return a text with the number of usable CPUs.

    The text also has the three counts of which this number is the smallest.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "none"
    return (
        f"{counted(capacity.usable_cpu_count(), 'usable CPU')} (os.cpu_count() "
        f"{os.cpu_count() or 1}, affinity mask {affinity}, cgroup quota "
        f"{capacity.cgroup_cpu_quota() or 'none'})"
    )


@click.command(epilog="Example:  loaderpool tune train:make_loader --workers 1,2 --threads 1,4,16")
@click.argument("target")
@click.option(
    "--seconds", metavar="N", type=SECONDS, default=3, help="Seconds to measure each setting."
)
@click.option(
    "--workers", "counts", metavar="N,N,...", callback=numbers(0, MAX_WORKERS),
    help="Numbers of workers to measure.  [default: 0, 1, 2, 4, ... up to twice the CPUs]",
)  # fmt: skip
@click.option(
    "--threads", metavar="N,N,...", callback=numbers(1, MAX_THREADS),
    help="Numbers of threads per worker to measure.  [default: as TARGET]",
)  # fmt: skip
@click.option(
    "--json", "json_to", metavar="FILE", callback=output(".json"), help="Write the rates as JSON."
)
def tune(
    target: str,
    seconds: float,
    counts: tuple[int, ...],
    threads: tuple[int, ...],
    json_to: str | None,
) -> None:
    """Measure numbers of workers and threads, and recommend one.

    TARGET is package.module:name: a Loader, or a function without arguments that returns one. Each
    setting is measured in two rounds, with its own loader. Nothing is trained: the rates are what
    the loader delivers to a training step that takes no time. A cache is disabled, so that each
    setting does the same work.
    """
    cpus = capacity.usable_cpu_count()
    make, is_function = find_target(target)
    with without_workers():  # its workers would use memory that the measured loader needs
        loader = make()
    stream = loader._core.stream
    is_one_shot = stream is not None and stream.is_one_shot
    if stream is not None and is_one_shot and not is_function:
        raise wrong_target(
            target,
            f"reads a {stream.kind}, which can be read only once. Name a function that returns the "
            "loader: it is called for each setting",
        )
    loader.close()
    if has_cache := loader._core.arguments["cache"] is not None:
        loader = loader.replace(cache=None, workers=0)
    threads = threads or (loader.config.threads,)
    settings = {
        Setting(count, each if count else 1)
        for count in counts or default_counts(cpus)
        for each in threads
    }

    def fresh() -> Loader:
        """Return the loader, or a new one if the source can be read only once."""
        if not is_one_shot:
            return loader
        with without_workers():
            return make()

    def say(done: Measurement, number: int) -> None:
        click.echo(
            f"round {number} of 2, {done.setting}: {readable_number(done.samples_per_s)} samples/s",
            err=True,
        )

    measurements = measure_all(fresh, sorted(settings), seconds / 2, say)
    chosen, reason = choose(measurements, cpus)

    console = results()
    console.print(f"{target}, batch_size={loader.config.batch_size}", style="bold")
    console.print(_table(measurements, chosen))
    console.print(
        f"{describe_cpus()}. Rates: the faster round. Spread: how much slower the other was.\n",
        style="dim",
    )
    is_reliable = is_clear(measurements, chosen)
    if is_reliable:
        console.print(f"Use {chosen.setting}: {reason}.", style="bold")
    else:
        differ = f"the rounds differ by up to {max(each.spread for each in measurements):.0%}"
        advice = "Stop other programs or increase --seconds, and measure again."
        console.print(
            f"Use {chosen.setting} as a first guess only, because {differ}. {advice}", style="bold"
        )
        console.print(f"By these rates {reason}.")
    if has_cache:
        console.print(
            "Note: measured without the loader's cache, as in the first epoch. Later epochs are "
            "faster."
        )
    if json_to is not None:
        data = {
            "format": 2,  # incremented when a key changes its meaning or is removed
            "command": "tune", "loaderpool": loaderpool.__version__, "target": target,
            "batch_size": loader.config.batch_size, "usable_cpus": cpus, "seconds": seconds,
            "recommendation": {
                **vars(chosen.setting), "arguments": str(chosen.setting), "reason": reason,
                "is_reliable": is_reliable,
            },
            "measurements": [dataclasses.asdict(each) for each in measurements],
        }  # fmt: skip
        Path(json_to).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _table(measurements: Sequence[Measurement], chosen: Measurement) -> Table:
    """Return a table with one row per setting. The recommended one is marked."""
    speed_up = f"speed-up over {measurements[0].setting.workers}"
    headings = ("workers", "threads", "samples/s", "spread", "MB/s", "CPUs", speed_up)
    table = Table(
        *(Column(each, justify="right") for each in headings), "", box=None, pad_edge=False
    )
    for each in measurements:
        table.add_row(
            f"{each.setting.workers}", f"{each.setting.threads}",
            readable_number(each.samples_per_s), f"{each.spread:.0%}",
            readable_number(each.bytes_per_s / 1e6), f"{each.cpus:.2f}",
            f"{each.samples_per_s / measurements[0].samples_per_s:.2f}",
            "<- use" if each is chosen else "",
            style="bold green" if each is chosen else None,
        )  # fmt: skip
    return table
