"""The commands by name, checked values of their options, and where their output goes.

Results go to stdout, progress to stderr; plain text wherever that is no terminal. Where `--json -` asks for stdout,
stdout has the JSON and nothing else: the results for people, and what the user's code prints, go to stderr, too.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import loaderpool
from loaderpool.errors import brief
from loaderpool.system.process import why_no_file

STDOUT = "-"


class _Finite(click.FloatRange):
    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        found: float = super().convert(value, parameter, context)  # is within the range, or is NaN
        return found if math.isfinite(found) else self.fail(f"{value} is not a number.", parameter, context)


SECONDS = _Finite(0, 86_400, min_open=True)


def numbers(what: str, least: int, most: int) -> Callable[..., tuple[int, ...] | None]:
    """Return the reader of an option such as 1,2,4: whole numbers within bounds, ascending, each once."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        try:
            found = sorted({int(part) for part in value.split(",")}) if value is not None else []
        except ValueError:
            found = [-1]
        if found and not least <= found[0] <= found[-1] <= most:
            example = f"integers from {least} to {most}, such as 1,2,4"
            raise click.BadParameter(f"numbers of {what} must be {example}; got {brief(value)}.")
        return tuple(found) or None

    return read


def output(*endings: str) -> Callable[..., str | None]:
    """Return the reader of a file to be written when all is done: a wrong one shall not cost the measurements.

    Without endings the file may have any, or be STDOUT.
    """

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value == STDOUT and not endings:
            context.obj = os.dup(1)
            os.dup2(2, 1)  # for good, and for workers: what the user's code prints, also at exit, is no JSON
        elif value is not None:
            if problem := why_no_file(Path(value), f"{context.command.name}{''.join(endings[:1])}"):
                raise click.BadParameter(f"{problem}.")
            if endings and not value.endswith(endings):
                raise click.BadParameter(f"{brief(value)} must end in {', '.join(endings)}.")
        return value

    return read


def results(json_to: str | None = None) -> Console:
    """The console for people: stdout, or stderr where the JSON has stdout."""
    console = Console(stderr=json_to == STDOUT, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 1 << 16  # a file has no width; what is cut or wrapped at 80 columns would be of no use there
    return console


def write_json(json_to: str | None, command: str, data: dict[str, Any]) -> None:
    """Write the data where `--json` says, if it does."""
    # The format's number is raised when a key changes its meaning or goes away.
    head = {"format": 1, "command": command, "loaderpool": loaderpool.__version__}
    if json_to is not None:
        try:
            with open(click.get_current_context().obj if json_to == STDOUT else json_to, "w", encoding="utf-8") as file:
                file.write(json.dumps({**head, **data}, indent=2) + "\n")
        except OSError as error:  # of a full disk: it names no file
            raise OSError(error.errno, error.strerror, json_to) from None


_NAMES = ("doctor", "profile", "replay", "top", "trace", "tune")  # each of a module of its own
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_EPILOG = """\b
Examples:
  loaderpool tune train:make_loader --workers 0,4,8,16
  loaderpool replay train:loader --index 1234 --epoch 2 --pdb
  loaderpool trace --last 10 -o trace.json
"""


class _Commands(click.Group):
    """Imports a command when it is named: `top` shall not wait for what the others need."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_NAMES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _NAMES:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{name}"), name)
        return command


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=_SETTINGS)
@click.version_option(loaderpool.__version__, prog_name="loaderpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Benchmark, tune and diagnose loaders.

    TARGET is package.module:name: a loaderpool.Loader, or a function without arguments that returns one. Modules are
    imported as with `python -m`: the current directory comes first.
    """
