"""`loaderpool tune --ray`: says what more hosts would bring, measures them, and says how many to use."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from loaderpool.errors import ClusterError
from loaderpool.ray.cluster_view import ClusterNode, ClusterView
from loaderpool.system.readable import counted, readable_number
from loaderpool.tools.cli.report import head_data, plain_table, window_data
from loaderpool.tools.cli.terminal import progress, results, say, write_json
from loaderpool.tools.tuning.cluster_costs import (
    COSTS,
    NETWORKS,
    Forecast,
    SampleCost,
    describe_forecast,
    describe_sample,
    find_limits,
    forecast,
    sample_cost,
)
from loaderpool.tools.tuning.cpus import cpu_budget
from loaderpool.tools.tuning.hosts import (
    HostComparison,
    HostSetting,
    measure_hosts,
    recommend_hosts,
    shares_a_machine,
)
from loaderpool.tools.tuning.measure import measure_settings
from loaderpool.tools.tuning.setting import Setting
from loaderpool.trainer.loader import Loader

_ROUNDS = 2
_IDEAL = "The ideal is what each worker would make with a CPU of its own, as fast as those here."


def tune_hosts(
    target: str, loader: Loader, address: str, hosts: Sequence[int] | None, seconds: float, json_to: Path | str | None
) -> None:
    """Measure the loader on numbers of a cluster's hosts, and print all that is found.

    Args:
        target: what the user calls it.
        loader: closed.
        address: of the cluster.
        hosts: numbers to measure, ascending; None: 1, 2, 4, ... and all that there are.
        seconds: for each.
        json_to: where all of it is written, too.

    Raises:
        ClusterError: there is no such cluster, or it has no node for a host.
        LoaderpoolError: this loader cannot be had from a cluster.
    """
    cpus = cpu_budget()
    with ClusterView(address) as view:
        address, nodes = view.address, view.nodes()
    able = sorted((node for node in nodes if node.workers), key=lambda node: -node.workers)
    if not able:
        raise ClusterError(f"no node of the cluster at {address} has a CPU free for a host")
    here = next((node.raylet_pid for node in nodes if node.is_here), 0)
    settings = [
        HostSetting(_workers_of(able, count), hosts=count, address=address, raylet_pid=here)
        for count in hosts or default_hosts(len(able))
    ]
    measured = [setting for setting in settings if setting.hosts <= len(able)]
    batch_size = loader.config.batch_size
    unit = "samples" if batch_size is not None else "elements"

    with progress(1, 1, unit) as watcher:
        (alone,) = measure_settings(loader, [Setting(1)], seconds / _ROUNDS, rounds=1, watcher=watcher)
    sample = sample_cost(alone.best)
    forecasts = [forecast(sample, setting.hosts, setting.workers) for setting in settings]
    console = results(json_to)
    say(console, f"{target}, batch_size={batch_size}, on the Ray cluster at {address}", style="bold")
    say(console, f"Measured here with one worker: {describe_sample(sample)}. What that would bring on the cluster:")
    console.print(forecast_table(forecasts, unit, console.is_terminal))
    say(console, f"{describe_forecast(forecasts[-1])}.")
    for limit in find_limits(forecasts, cpus.usable):
        say(console, f"{limit[0].upper()}{limit[1:]}.")
    if len(measured) < len(settings):
        say(console, f"Note: {counted(len(able), 'node')} can have a host now, so more are not measured.")
    if not measured:
        write_json(console, json_to, _data(target, batch_size, seconds, address, sample, forecasts, (), None))
        return

    with progress(len(measured) * _ROUNDS, _ROUNDS, unit) as watcher:
        comparisons = measure_hosts(loader, measured, sample, seconds, rounds=_ROUNDS, watcher=watcher)
    chosen, reason = recommend_hosts(comparisons)
    say(console, "\nMeasured on the cluster:")
    console.print(hosts_table(comparisons, chosen, unit, console.is_terminal))
    say(console, f"{cpus}.", style="dim")
    say(console, f"CPUs here: of this process, the dispatcher and the raylet. {_IDEAL}", style="dim")
    say(console, "Rates are of the faster round; the spread says how far the slower one is behind.\n", style="dim")
    say(console, f"Use {chosen.measurement.setting.arguments}: {reason}.", style="bold")
    if shares_a_machine([node.address for node in able]):
        say(console, "Note: several nodes have one address, so they share a machine and its CPUs: less than the ideal.")
    write_json(console, json_to, _data(target, batch_size, seconds, address, sample, forecasts, comparisons, chosen))


def default_hosts(nodes: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all nodes."""
    doubled = itertools.takewhile(lambda count: count < nodes, (1 << power for power in itertools.count()))
    return (*doubled, nodes)


def _workers_of(able: Sequence[ClusterNode], hosts: int) -> int:
    """Of so many hosts; those that have no node yet would be as the smallest that there is."""
    return sum(node.workers for node in able[:hosts]) + able[-1].workers * max(0, hosts - len(able))


def forecast_table(forecasts: Sequence[Forecast], unit: str, is_terminal: bool) -> Table:
    """One row for each number of hosts: what it would bring, and what that would take."""
    table = plain_table(is_terminal)
    for heading in ("hosts", "workers", f"{unit}/s", "MB/s", "CPUs here", *(f"of {gbit} Gbit/s" for gbit in NETWORKS)):
        table.add_column(heading, justify="right")
    for each in forecasts:
        table.add_row(
            str(each.hosts),
            str(each.workers),
            readable_number(each.samples_per_s),
            readable_number(each.bytes_per_s / 1e6),
            f"{each.trainer_cpus:.2f}",
            *(f"{each.share_of(gbit):.0%}" for gbit in NETWORKS),
        )
    return table


def hosts_table(comparisons: Sequence[HostComparison], chosen: HostComparison, unit: str, is_terminal: bool) -> Table:
    """One row for each number of hosts that was measured; the recommended one is marked."""
    table = plain_table(is_terminal)
    for heading in ("hosts", "workers", f"{unit}/s", "spread", "MB/s", "CPUs here", "of the ideal"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for each in comparisons:
        measurement = each.measurement
        table.add_row(
            str(each.hosts),
            str(each.workers),
            readable_number(measurement.samples_per_s),
            f"-{measurement.spread:.0%}" if len(measurement.windows) > 1 else "one round",
            readable_number(measurement.best.bytes_per_s / 1e6),
            f"{each.trainer_cpus:.2f}",
            f"{each.share_of_ideal:.0%}",
            "<- use" if each is chosen else "",
            style="bold green" if each is chosen else None,
        )
    return table


def _data(
    target: str,
    batch_size: int | None,
    seconds: float,
    address: str,
    sample: SampleCost,
    forecasts: Sequence[Forecast],
    comparisons: Sequence[HostComparison],
    chosen: HostComparison | None,
) -> dict[str, Any]:
    """All that was found, for a JSON file."""
    return {
        **head_data("tune", target, batch_size, cpu_budget()),
        "seconds": seconds,
        "ray": address,
        "sample": dataclasses.asdict(sample),
        "costs": [dataclasses.asdict(cost) for cost in COSTS],
        "forecasts": [
            {**dataclasses.asdict(each), "network_shares": {str(gbit): each.share_of(gbit) for gbit in NETWORKS}}
            for each in forecasts
        ],
        "recommendation": None if chosen is None else {"hosts": chosen.hosts},
        "measurements": [
            {
                "hosts": each.hosts,
                "workers": each.workers,
                "samples_per_s": each.measurement.samples_per_s,
                "bytes_per_s": each.measurement.best.bytes_per_s,
                "spread": each.measurement.spread,
                "trainer_cpus": each.trainer_cpus,
                "ideal_per_s": each.ideal_per_s,
                "share_of_ideal": each.share_of_ideal,
                "windows": [window_data(window) for window in each.measurement.windows],
            }
            for each in comparisons
        ],
    }
