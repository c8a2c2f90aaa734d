"""`loaderpool doctor`: what this machine allows, whether a pool works on it, and what to change."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from loaderpool.tools.cli.options import read_cluster, read_json
from loaderpool.tools.cli.report import doctor_data, plain_table
from loaderpool.tools.cli.target import load_target
from loaderpool.tools.cli.terminal import results, say, write_json
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.doctor.cluster_drill import cluster_checks
from loaderpool.tools.doctor.drill import pool_checks
from loaderpool.tools.doctor.limits import read_limits
from loaderpool.tools.doctor.machine_checks import machine_checks
from loaderpool.tools.doctor.payload_checks import cargo_checks
from loaderpool.tools.doctor.versions import version_checks
from loaderpool.trainer.start import without_workers

_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red"}
_DRILL_WORKERS = 2  # more show nothing more, and take longer to start


@click.command(
    epilog="\b\nExamples:\n  loaderpool doctor\n  loaderpool doctor train:make_loader --json doctor.json\n"
    "  loaderpool doctor --ray auto"
)
@click.argument("target", required=False)
@click.option(
    "--json", "json_to", metavar="FILE", callback=read_json, help="Write all checks to this file, - for stdout."
)
@click.option(
    "--ray",
    "address",
    metavar="ADDRESS",
    callback=read_cluster,
    help='Look at the Ray cluster there, "auto" or host:port, too, and kill a host of it on purpose.',
)
def doctor(target: str | None, json_to: Path | str | None, address: str | None) -> None:
    """Look at what this machine allows, start a pool, kill a worker of it on purpose, and say what to change.

    With TARGET (package.module:name, a Loader or a function without arguments that makes one) also pickle and load
    what its workers need, and show what travels. With --ray also ask each node of a cluster, and kill a host of the
    doctor's own there. The exit status is 1 where something fails.
    """
    with without_workers():
        loader = load_target(target) if target is not None else None
    limits = read_limits()
    checks = machine_checks(limits) + version_checks() + pool_checks(_DRILL_WORKERS)
    if loader is not None:
        checks += cargo_checks(loader, limits.memory_free)
    if address is not None:
        checks += cluster_checks(address)
    console = results(json_to)
    console.print(_table(checks, console.is_terminal))
    counts = {status: sum(check.status == status for check in checks) for status in ("fail", "warn", "ok")}
    verdict = f"{counts['ok']} ok, {counts['warn']} to know about (warn), {counts['fail']} failed."
    say(console, verdict, style="bold red" if counts["fail"] else "bold")
    write_json(console, json_to, doctor_data(target, loader, limits.cpus, checks))
    if counts["fail"]:
        raise click.exceptions.Exit(1)


def _table(checks: list[Check], is_terminal: bool) -> Table:
    """A line for each check, and below it, where it is not ok, what to change."""
    table = plain_table(is_terminal, show_header=False)
    table.add_column("status", no_wrap=True)
    table.add_column("check", overflow="fold")
    table.add_column("found", overflow="fold", ratio=1 if is_terminal else None)
    for number, (group, members) in enumerate(itertools.groupby(checks, key=lambda check: check.group)):
        if number:
            table.add_section()
        table.add_row("", Text(group.upper(), style="bold"), "")
        for check in members:
            found = Text(check.found)
            if check.change:
                found.append(f"\n-> {check.change}", style=_STYLES[check.status])
            table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, found)
    return table
