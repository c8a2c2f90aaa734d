"""`loaderpool profile`: which lines of a loader's functions take the time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loaderpool.settings.groups import MAX_WORKERS
from loaderpool.system import clock
from loaderpool.system.readable import counted, readable_number, readable_s
from loaderpool.tools.cli.options import (
    answering_for,
    read_html,
    read_interval,
    read_json,
    read_output,
    read_seconds,
    whole_number,
)
from loaderpool.tools.cli.report import head_data, plain_table
from loaderpool.tools.cli.target import load_target
from loaderpool.tools.cli.terminal import progress, results, say, write_json
from loaderpool.tools.profiling.exports import html, line_text, speedscope
from loaderpool.tools.profiling.profile import Profile, SpentTime
from loaderpool.tools.profiling.run import ProfileRun, run_profile
from loaderpool.tools.tuning import CpuBudget, Setting, cpu_budget

_FEW_LOOKS = 100  # below, a share may be wrong by more than ten points
_MUCH_IDLE = 0.05  # a share that is worth a line
_WHOLE = 1 << 30
_LEAST = 8  # letters of a name that are shown on the narrowest terminal
_BETWEEN = 3  # letters between two columns, and at the edges


@click.command(
    epilog="\b\nExamples:\n"
    "  loaderpool profile train:make_loader\n"
    "  loaderpool profile train:make_loader --seconds 30 --html profile.html\n"
    "  loaderpool profile train:make_loader --workers 1 --speedscope profile.json"
)
@click.argument("target")
@click.option(
    "--seconds", metavar="N", callback=read_seconds, default="10", show_default=True, help="How long it is looked."
)
@click.option(
    "--workers",
    metavar="N",
    type=whole_number(0, MAX_WORKERS),
    help="How many workers there shall be.  [default: as many as TARGET has]",
)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    callback=read_interval,
    default="0.01",
    show_default=True,
    help="From one look at each worker to the next, on average.",
)
@click.option(
    "--top", "rows", metavar="N", type=whole_number(1), default=12, show_default=True, help="Rows of each table."
)
@click.option(
    "--html", "html_path", metavar="FILE", callback=read_html, help="Write a page for the browser, with all stacks."
)
@click.option(
    "--speedscope",
    "speedscope_path",
    metavar="FILE",
    callback=read_output,
    help="Write a file for https://www.speedscope.app, with all stacks.",
)
@click.option(
    "--json", "json_to", metavar="FILE", callback=read_json, help="Write both tables to this file, - for stdout."
)
def profile(
    target: str,
    seconds: float,
    workers: int | None,
    interval_s: float,
    rows: int,
    html_path: Path | None,
    speedscope_path: Path | None,
    json_to: Path | str | None,
) -> None:
    """Look which lines of TARGET's function take the time, and whether they compute or wait.

    TARGET is package.module:name, a Loader or a function without arguments that makes one. It runs with its own
    workers and threads; a cache is left out, so that there is work to see. Nothing is trained: a batch is let go as
    soon as it is there. In each worker a thread looks now and then what the others are at; nothing is put around the
    function, and samples are the same to the bit.
    """
    loader = load_target(target)
    loader.close()  # its own workers would compete with those that are looked at
    began_s = clock.wall_s()
    unit = "samples" if loader.config.batch_size is not None else "elements"
    with progress(1, 1, unit) as watcher:
        watcher.begin(Setting(loader.workers if workers is None else workers), 1)
        run = run_profile(loader, seconds, interval_s, workers, watcher.advance)

    console = results(json_to)
    count = "in this process" if run.workers == 0 else counted(run.workers, "worker")
    say(console, f"{target}, batch_size={loader.config.batch_size}, {count}", style="bold")
    if run.profile.looks:
        _show(console, run, rows, unit)
    if html_path is not None:
        with answering_for(html_path):
            html_path.write_text(html(run.profile, target, began_s), "utf-8")
        say(console, f"Wrote {html_path}.")
    if speedscope_path is not None:
        with answering_for(speedscope_path):
            speedscope_path.write_text(json.dumps(speedscope(run.profile, target)), "utf-8")
        say(console, f"Wrote {speedscope_path}: open it on https://www.speedscope.app, which sends it nowhere.")
    write_json(console, json_to, profile_data(target, loader.config.batch_size, cpu_budget(), seconds, interval_s, run))
    if run.error is not None:
        raise run.error
    if not run.profile.looks:
        raise click.ClickException(
            f"nothing was seen in {readable_s(seconds)}: a call in C held the interpreter's lock (GIL) for all of it, "
            "or workers had nothing to do. Give more --seconds"
        )


def _show(console: Console, run: ProfileRun, rows: int, unit: str) -> None:
    profile = run.profile
    width = console.width if console.is_terminal else None
    if profile.lines:
        console.print(lines_table(profile, rows, width))
    console.print(functions_table(profile, rows, width))
    say(
        console,
        f"{counted(profile.looks, 'look')} in {profile.window_s:.1f} s; looking took {profile.looking_share:.1%} of a "
        f"CPU in each process. {readable_number(run.samples_per_s)} {unit}/s. loaderpool itself: "
        f"{profile.share(profile.own_s):.0%}.",
        style="dim",
    )
    say(console, "self: without the Python functions that it calls. " + _LEGEND[profile.knows_cpu], style="dim")
    for note in _notes(run):
        say(console, f"Note: {note}.")


_LEGEND = {
    True: "computing: with a CPU, or waiting for one; waiting: for data, a server, a lock.",
    False: "Whether it computes or waits cannot be told on this system.",
}


def _notes(run: ProfileRun) -> Iterator[str]:
    profile = run.profile
    if run.error is not None:
        yield f"it ended after {readable_s(profile.window_s)}, with the error below; this is what was before"
    elif not run.is_whole:
        yield "no batch was finished in this time; this is of the first calls, with what they import and open"
    if profile.looks < _FEW_LOOKS:
        yield "these are few looks: shares may be wrong by ten points and more; give more --seconds"
    all_s = profile.busy_s + profile.idle_s
    if profile.idle_s > _MUCH_IDLE * all_s:
        yield f"workers had nothing to do for another {profile.idle_s / all_s:.0%} of their time, which is in no share"
    yield from run.changes
    for error in profile.errors:
        yield f"a worker was looked at no longer when this happened: {error}"


def lines_table(profile: Profile, rows: int, width: int | None) -> Table:
    """The lines of the user's own code, by their share of the time.

    Args:
        profile: what was found.
        rows: of it, at most.
        width: of the terminal; None: there is none, and nothing is cut.
    """
    names = [(f"{_short(each.file)}:{each.line}", line_text(each.file, each.line)) for each in profile.lines[:rows]]
    names.append(("loaderpool", "its own work: order, random streams, rows of batches"))
    return _table(profile, "line", [*profile.lines[:rows], profile.own], names, width)


def functions_table(profile: Profile, rows: int, width: int | None) -> Table:
    """Functions, those of libraries, too, by the time of their own. Arguments are as for `lines_table`."""
    shown = profile.functions[:rows]
    names = [(each.function, f"{_short(each.file)}:{each.line}" * bool(each.file)) for each in shown]
    return _table(profile, "function", [*shown, profile.own], [*names, ("loaderpool", "")], width)


def _table(
    profile: Profile, what: str, shown: Sequence[SpentTime], names: Sequence[tuple[str, str]], width: int | None
) -> Table:
    table = plain_table(width is not None)
    headings = ("total", "self", *["computing", "waiting"] * profile.knows_cpu)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(what, no_wrap=True)
    table.add_column("", no_wrap=True)
    first = second = _WHOLE
    if width is not None:  # the numbers stand; of the rest the beginning of a path and the end of a line are cut
        room = max(2 * _LEAST, width - sum(map(len, headings)) - _BETWEEN * (len(headings) + 2))
        first = min(max(len(name) for name, _ in names), room // 2)
        second = room - first
    for spent, (name, detail) in zip(shown, names, strict=True):
        parts = [spent.total_s, spent.self_s, *[spent.computing_s, spent.waiting_s] * profile.knows_cpu]
        shares = (f"{profile.share(seconds):.0%}" for seconds in parts)
        is_path = what == "line"
        table.add_row(*shares, _cut(name, first, of_path=is_path), _cut(detail, second, of_path=not is_path))
    return table


def _cut(text: str, width: int, *, of_path: bool) -> Text:
    """A text as long as there is room for; of a path its end."""
    if len(text) > width:
        text = f"…{text[1 - width :]}" if of_path else f"{text[: width - 1]}…"
    return Text(text)


def _short(file: str) -> str:
    """A path as one reads it: from the current folder, or from where packages are installed."""
    path = PurePath(file)
    for name in ("site-packages", "dist-packages"):
        if name in path.parts:
            return str(PurePath(*path.parts[path.parts.index(name) + 1 :]))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name


def profile_data(
    target: str, batch_size: int | None, cpus: CpuBudget, seconds: float, interval_s: float, run: ProfileRun
) -> dict[str, Any]:
    """All that `profile` found, for a JSON file."""
    profile = run.profile
    return {
        **head_data("profile", target, batch_size, cpus),
        "seconds": seconds,
        "interval_s": interval_s,
        "workers": run.workers,
        "elapsed_s": profile.window_s,
        "looks": profile.looks,
        "looking_share": profile.looking_share,
        "samples_per_s": run.samples_per_s,
        "busy_s": profile.busy_s,
        "idle_s": profile.idle_s,
        "loaderpool_s": profile.own_s,
        "knows_cpu": profile.knows_cpu,
        "notes": list(_notes(run)),
        "error": None if run.error is None else str(run.error),
        "lines": [{**_spent_data(each), "text": line_text(each.file, each.line)} for each in profile.lines],
        "functions": [_spent_data(each) for each in profile.functions],
    }


def _spent_data(spent: SpentTime) -> dict[str, Any]:
    return {**dataclasses.asdict(spent), "waiting_s": spent.waiting_s}
