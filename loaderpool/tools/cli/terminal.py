"""Where output goes: results to stdout, progress to stderr; plain text wherever that is no terminal.

Where `--json -` asks for stdout, stdout has the JSON and nothing else, and the results for people go to stderr, too.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from loaderpool.system.readable import readable_number
from loaderpool.tools.cli.options import STDOUT, answering_for
from loaderpool.tools.tuning import Setting, Watcher, Window

# A file has no width; a table that is cut or wrapped at 80 columns would be of no use there.
_PLAIN_WIDTH = 200
# The bar is drawn by a thread of the process that is measured: more often, and a cheap function gets slower by it.
_DRAWS_PER_S = 4


def results(json_to: Path | str | None) -> Console:
    """The console for people: stdout, or stderr where the JSON has stdout."""
    stderr = json_to == STDOUT
    console = Console(stderr=stderr, highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, markup=False, width=_PLAIN_WIDTH)


def write_json(console: Console, json_to: Path | str | None, data: dict[str, Any]) -> None:
    """Write the data where `--json` says, if it does."""
    if json_to is None:
        return
    text = json.dumps(data, indent=2) + "\n"
    if isinstance(json_to, Path):
        with answering_for(json_to):
            json_to.write_text(text, "utf-8")
        say(console, f"Wrote {json_to}.")
    else:
        sys.stdout.write(text)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a paragraph: wrapped on a terminal, in one line elsewhere."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


@contextlib.contextmanager
def progress(windows: int, rounds: int, unit: str) -> Iterator[Watcher]:
    """A watcher that shows a bar on a terminal, and a line for each window elsewhere.

    Args:
        windows: how many there will be, skipped ones counted.
        rounds: how many rounds these make.
        unit: what a row is called, in the plural.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield _Lines(console, rounds, unit)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=_DRAWS_PER_S) as bar:
        yield _Bar(bar, bar.add_task("starting", total=windows), rounds, unit)


def _label(setting: Setting, round_number: int, rounds: int) -> str:
    return setting.label if rounds == 1 else f"{setting.label}, round {round_number} of {rounds}"


class _Lines(Watcher):
    """A line when a window is over."""

    def __init__(self, console: Console, rounds: int, unit: str) -> None:
        self._console, self._rounds, self._unit = console, rounds, unit
        self._label = ""

    def begin(self, setting: Setting, round_number: int) -> None:
        self._label = _label(setting, round_number, self._rounds)

    def end(self, window: Window) -> None:
        say(self._console, f"{self._label}: {readable_number(window.samples_per_s)} {self._unit}/s")


class _Bar(Watcher):
    """A bar over all windows."""

    def __init__(self, bar: Progress, task: TaskID, rounds: int, unit: str) -> None:
        self._bar, self._task, self._rounds, self._unit = bar, task, rounds, unit
        self._done = 0
        self._latest = ""

    def begin(self, setting: Setting, round_number: int) -> None:
        self._bar.update(self._task, description=self._latest + _label(setting, round_number, self._rounds))

    def advance(self, fraction: float) -> None:
        self._bar.update(self._task, completed=self._done + fraction)

    def end(self, window: Window) -> None:
        self._latest = f"(latest: {readable_number(window.samples_per_s)} {self._unit}/s) "
        self._step()

    def skip(self, setting: Setting, round_number: int) -> None:
        self._step()

    def _step(self) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)
