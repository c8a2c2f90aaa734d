"""`loaderpool top`: finds running trainings under /proc and shows the state that each publishes.

Nothing is called in the training. Its memory files can be opened by its user and by root. They are
read, not mapped: if a file has been truncated, a read ends early, but access to a mapping would end
this process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

import loaderpool
from loaderpool.errors import readable_bytes, readable_number, readable_s, shortened
from loaderpool.plan.item_names import numbered
from loaderpool.system import capacity, clock, machine
from loaderpool.tools.commands import WholeNumber, results
from loaderpool.trainer.explain.page import FORMAT, NAME, PAGE_BYTES, read_page

_LOOK_S = 0.5
_MARKS = "▁▂▃▄▅▆▇█"
# Rows of workers; if there are more workers, those that have been at an item longest.
_MOST_ROWS = 16
_MUCH, _SOME = 0.2, 0.05  # shares of waiting from which a headline is red, or magenta
# Seconds without a write; a page is written every two seconds while batches are requested.
_QUIET_S = 3.0


def memory_files(pid: int, name: str) -> list[str]:
    """Return the paths of the memory files of this name that a process has open.

    Raises:
        OSError: The process belongs to another user, or has ended.
    """
    folder, found = f"/proc/{pid}/fd", []
    for descriptor in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            if os.readlink(f"{folder}/{descriptor}") == f"/memfd:loaderpool-{name} (deleted)":
                found.append(f"{folder}/{descriptor}")
    return found


def read_at(path: str, at: int, nbytes: int) -> bytes:
    """Return bytes of a memory file, from offset `at` on."""
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), nbytes, at)


def read_pages(pid: int) -> dict[str, dict[str, Any]]:
    """Return the content of each page of a process, by its path, in the order of creation.

    The pages that a fork has inherited are not its own, and are left out.
    """
    found = {}
    for path in memory_files(pid, NAME):
        with contextlib.suppress(FileNotFoundError):
            # The first read may return a half-written page.
            told = read_page(read_at(path, 0, PAGE_BYTES)) or read_page(
                read_at(path, 0, PAGE_BYTES)
            )
            if told is not None and told["pid"] == pid:
                found[path] = told
    return dict(sorted(found.items(), key=lambda each: int(each[1]["loaders"][0]["number"])))


def _of_process(pid: int) -> dict[str, Any]:
    """Return the content of all pages of a process as one; empty if it has none."""
    pages = list(read_pages(pid).values())
    if not pages:
        return {}
    loaders = [loader for page in pages for loader in page["loaders"]]
    process = shortened(printable(pages[-1].get("process", "")))
    return {
        **max(pages, key=lambda each: float(each["now_s"])),
        "process": process,
        "loaders": loaders,
    }


def read_training(pid: int) -> dict[str, Any]:
    """Return the published state of a training.

    Raises:
        click.ClickException: There is none, or it cannot be read.
    """
    try:
        told, problem = _of_process(pid), "has no loader that has delivered a first batch"
    except OSError as error:
        told, problem = {}, f"cannot be read: {error.strerror}"
    if not machine.start_time(pid):
        told, problem = {}, "does not exist"
    elif told and told["format"] != FORMAT:
        told, problem = {}, "runs another version of loaderpool"
    if not told:
        raise click.ClickException(f"process {pid} {problem}.")
    return told


def find_training(pid: int | None) -> dict[str, Any]:
    """Return the published state of a training, by default of the only one.

    Raises:
        click.ClickException: There is none, or there are several, which the error lists.
    """
    if pid is not None:
        return read_training(pid)
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if told := _of_process(int(path.name)):
                found[told["pid"]] = told["process"]
    if not found:
        raise click.ClickException(
            "no running training was found: no process of this user, on this Linux machine, has "
            "a loader that has delivered a first batch."
        )
    if len(found) > 1:
        listed = "".join(f"\n  {each:>7}  {process}" for each, process in sorted(found.items()))
        raise click.UsageError(f"several trainings are running. Pass the PID of one:{listed}")
    return read_training(found.popitem()[0])


def printable(text: str) -> str:
    """Return a text without control characters of terminals."""
    return "".join(each if each.isprintable() else "?" for each in text)


@click.command(epilog="Ctrl-C quits.")
@click.argument("pid", required=False, type=WholeNumber(1))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and exit.")
def top(pid: int | None, as_json: bool) -> None:
    """Show why a running training waits, and what each worker is doing.

    PID is the process of the training. It is optional if only one training is running. The training
    needs no option and is not interrupted: it writes its state to memory every two seconds, and top
    reads it.
    """
    training = find_training(pid)
    console = results()
    if as_json:
        print(json.dumps({"command": "top", "loaderpool": loaderpool.__version__, **training}))
    elif not console.is_interactive:
        console.print(_draw(training))
    else:
        try:
            with (
                contextlib.suppress(KeyboardInterrupt),
                Live(console=console, screen=True, auto_refresh=False) as live,
            ):
                while True:
                    live.update(_draw(training), refresh=True)
                    time.sleep(_LOOK_S)
                    training = read_training(training["pid"])
        except click.ClickException as error:
            console.print(_draw(training))  # the last screen stays visible
            click.echo(f"The training has ended: {error.message}", err=True)


def _draw(training: Mapping[str, Any]) -> Group:
    """Return the screen.

    Color never carries information alone. The colors are readable on light and dark backgrounds.
    """
    parts: list[Text | Table] = [
        Text.assemble((training["process"] or "?", "bold"), f"  (pid {training['pid']})")
    ]
    loaders = training["loaders"]
    for number, loader in enumerate(loaders, 1):
        explanation = loader["explanation"] or {
            "headline": "the first steps are running",
            "wait_share": 0.0,
        }
        share, place = (
            explanation["wait_share"],
            f"[{number} of {len(loaders)}] " if len(loaders) > 1 else "",
        )
        color = "red" if share >= _MUCH else "magenta" if share >= _SOME else "green"
        table = Table.grid(padding=(0, 1))
        for label, text in _rows(loader, explanation):
            table.add_row(Text(label, style="dim"), Text(printable(text)))
        parts += [
            Text(),
            Text(place + printable(explanation["headline"]), style=f"bold {color}"),
            table,
        ]
    # Workers of each pool, by its arena, because several loaders may share a pool.
    pools = {str(each["arena"]): each["workers"] for each in loaders}
    parts += [part for workers in pools.values() if workers for part in (Text(), _workers(workers))]
    advice = (
        "To see the line that each process is running: "
        f"py-spy dump --subprocesses --pid {training['pid']}"
    )
    return Group(*parts, Text(), Text(advice, style="dim"))


def _rows(loader: Mapping[str, Any], explanation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from (
        (label, explanation[label])
        for label in ("why", "change", "expect")
        if explanation.get(label)
    )
    yield "now", _now(loader)
    if shares := loader["wait_shares"]:
        marks = "".join(_MARKS[min(len(_MARKS) - 1, int(each * len(_MARKS)))] for each in shares)
        yield "waited", f"{marks} {shares[-1]:.0%} of the last seconds"
    if loader["steps_per_s"]:
        steps, samples = (
            readable_number(loader["steps_per_s"]),
            readable_number(loader["samples_per_s"]),
        )
        yield (
            "rate",
            f"{steps} steps/s, {samples} samples/s, {readable_bytes(loader['bytes_per_s'])}/s",
        )
    if loader.get("call_s"):
        times = ", ".join(
            f"{name} {readable_s(seconds)}" for name, seconds in loader["call_s"].items()
        )
        yield "calls", f"{times} for each {loader['calls_of']}"
    if loader["buffers"]:
        size = readable_bytes(loader["buffer_bytes"])
        used, ready = loader["buffers_in_use"], loader["buffers_ready"]
        yield (
            "memory",
            f"{loader['buffers']} batch buffers of {size}: {used} used by training, {ready} ready",
        )
    if decision := loader["decision"]:
        at = datetime.datetime.fromtimestamp(decision["time_s"]).strftime("%H:%M:%S")
        change = f"{decision['workers_before']} → {decision['workers']} workers"
        yield "auto", f"at {at} {change}: {decision['reason']}"
    if slowest := explanation.get("slowest"):
        items = (
            f"{numbered(each['index'], each['generator'])} "
            f"({readable_s(each['seconds'])}, epoch {each['epoch']})"
            for each in slowest[:3]
        )
        yield "slowest", f"items {', '.join(items)}"


def _now(loader: Mapping[str, Any]) -> str:
    since_s = max(0.0, clock.monotonic_ns() / 1e9 - loader["looked_s"])
    if loader["asked_s"] is not None:
        return f"training has waited {readable_s(loader['asked_s'] + since_s)} for a batch"
    if since_s < _QUIET_S:
        return "training takes batches"
    itself = "" if loader["buffers"] else ", or loads the next batch itself"
    return f"training has not asked for a batch for {readable_s(since_s)}: it runs its step{itself}"


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    shown = sorted(workers, key=lambda each: -(each["item_s"] or 0.0))[:_MOST_ROWS]
    rows = [cells_of(each) for each in sorted(shown, key=lambda each: int(each["number"]))]
    *names, last = rows[0]
    columns = [Column(name, justify="right") for name in names]
    table = Table(*columns, last, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*row.values())
    if len(workers) > len(rows):
        table.add_row("…", *[""] * (len(columns) - 1), f"and {len(workers) - len(rows)} more")
    return table


def cells_of(worker: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a worker's row in the table, by column."""
    busy, cpus = (
        "-" if worker[name] is None else f"{worker[name]:.0%}" for name in ("busy_share", "cpus")
    )
    own = capacity.private_bytes(worker["pid"]) if worker["pid"] else 0
    return {
        "worker": f"{worker['number']}",
        "pid": f"{worker['pid'] or '-'}",
        "busy": busy,
        "CPU": cpus,
        "memory": readable_bytes(own) if own else "-",
        "now": _state(worker),
    }


def _state(worker: Mapping[str, Any]) -> str:
    if worker["state"] != "item":
        return str(worker["state"])
    item = f"item {numbered(worker['index'], worker['generator'])}"
    if worker["items"] > 1:
        item = f"a block of up to {worker['items']} items from {worker['index']}"
    return f"{item} for {readable_s(worker['item_s'])}"
