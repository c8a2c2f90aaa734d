"""The commands by name, checked values of their options, and where their output goes.

Results go to stdout, progress to stderr; plain text wherever that is no terminal. Where `--json -` asks for stdout,
stdout has the JSON and nothing else, and the results for people go to stderr, too.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import loaderpool
from loaderpool.errors import ArgumentError, brief
from loaderpool.system.process import why_no_file

STDOUT = "-"


class _Seconds(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:  # NaN is within all bounds
            self.fail(f"{value!r} is not a valid float range.", param, ctx)
        return seconds


SECONDS = _Seconds(0, 86_400, min_open=True)


def numbers(what: str, least: int, most: int) -> Callable[..., tuple[int, ...] | None]:
    """Return the reader of an option such as 1,2,4: whole numbers within bounds, ascending, each once."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            found = sorted({int(part) for part in value.split(",")})
        except ValueError:
            raise click.BadParameter(f"{brief(value)} is not a list of numbers of {what}, such as 1,2,4.") from None
        if not least <= found[0] <= found[-1] <= most:
            raise click.BadParameter(f"numbers of {what} are {least} to {most}, got {brief(value)}.")
        return tuple(found)

    return read


def read_cluster(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The address of a Ray cluster, as a `RayPool` takes it; whether there is one is not looked at."""
    if value is not None:
        from loaderpool.ray.pool import RayPool  # which commands that need no cluster shall not wait for

        try:
            RayPool(value)
        except ArgumentError as error:
            raise click.BadParameter(str(error)) from None
    return value


def output(*endings: str) -> Callable[..., Path | None]:
    """Return the reader of a file to be written when all is done: a wrong one shall not cost the measurements."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        if problem := why_no_file(Path(value), f"{context.command.name}{endings[0]}"):
            raise click.BadParameter(f"{problem}.")
        if not value.endswith(endings):
            raise click.BadParameter(f"{brief(value)} must end in {', '.join(endings)}.")
        return Path(value)

    return read


def read_json(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A file to be written when all is done, or STDOUT. It is no `Path`: a file may be called `./-`."""
    if value != STDOUT:
        output("")(context, parameter, value)
    return value


@contextlib.contextmanager
def answering_for(path: Path | str) -> Iterator[None]:
    """A block that writes an output; where it cannot be written, that is said on one line."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}.") from None


# A file has no width; a table that is cut or wrapped at 80 columns would be of no use there.
_PLAIN_WIDTH = 200
_FORMAT_VERSION = 1  # of the JSON files; raised when a key changes its meaning or goes away


def results(json_to: str | None = None) -> Console:
    """The console for people: stdout, or stderr where the JSON has stdout."""
    console = Console(stderr=json_to == STDOUT, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def write_json(console: Console, json_to: str | None, command: str, data: dict[str, Any]) -> None:
    """Write the data where `--json` says, if it does."""
    if json_to is None:
        return
    head = {"format": _FORMAT_VERSION, "command": command, "loaderpool": loaderpool.__version__}
    with answering_for(json_to), click.open_file(json_to, "w", "utf-8") as file:
        file.write(json.dumps({**head, **data}, indent=2) + "\n")
    if json_to != STDOUT:
        say(console, f"Wrote {json_to}.")


def say(console: Console, text: str, style: str = "") -> None:
    """Print a paragraph: wrapped on a terminal, in one line elsewhere."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def plain_table(is_terminal: bool, *, show_header: bool = True) -> Table:
    """An empty table: ruled on a terminal, columns of plain text elsewhere."""
    return Table(box=box.SIMPLE_HEAD if is_terminal else None, show_header=show_header, pad_edge=is_terminal)


_NAMES = ("doctor", "profile", "replay", "top", "trace", "tune")  # each of a module of its own
_EPILOG = """\b
Examples:
  loaderpool tune train:make_loader
  loaderpool tune train:make_loader --workers 0,4,8,16 --plot rates.png
  loaderpool profile train:make_loader -o profile.svg
  loaderpool replay train:loader --index 1234 --epoch 2 --pdb
  loaderpool doctor
  loaderpool top
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


@click.group(
    cls=_Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(loaderpool.__version__, prog_name="loaderpool", message="%(prog)s %(version)s")
def cli() -> None:
    """Measure loaders, find out how many workers they should have, and what is wrong where something is.

    TARGET is package.module:name, a loaderpool.Loader or a function without arguments that makes one. Modules are
    found as `python -m` finds them: the current directory comes first.
    """
