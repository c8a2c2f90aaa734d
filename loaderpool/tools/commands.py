"""The commands by name, validation of their options, and their output streams.

Results go to stdout, progress to stderr. Output that is not to a terminal is plain text.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import loaderpool
from loaderpool.errors import brief
from loaderpool.hints import nearest


class WholeNumber(click.IntRange):
    """Range of integers that has a plain name in help texts and errors."""

    name = "whole number"


class _Seconds(click.FloatRange):
    """Range of seconds that excludes NaN."""

    name = "number"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, parameter, context)
        if math.isnan(seconds):
            self.fail("nan is no number of seconds.", parameter, context)
        return seconds


SECONDS = _Seconds(0, 86_400, min_open=True)


def numbers(least: int, most: int) -> Callable[..., tuple[int, ...]]:
    """Return a click callback that parses an option such as 1,2,4.

    The callback returns whole numbers within bounds, ascending, without duplicates.
    """
    kind: Any = WholeNumber(least, most)

    def read(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> tuple[int, ...]:
        parts = value.split(",") if value is not None else ()
        try:
            return tuple(sorted({kind.convert(part, parameter, context) for part in parts}))
        except click.BadParameter as error:
            raise click.BadParameter(
                f"{error.message} Write numbers with commas between them, such as 1,2,4.",
                context,
                parameter,
            ) from None

    return read


def output(*endings: str) -> Callable[..., str | None]:
    """Return a click callback that validates an output path before measuring."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            if Path(value).is_dir():
                example = f"{context.info_name}{endings[0]}"
                raise click.BadParameter(
                    f"{brief(value)} is a folder: name a file, such as {example}."
                )
            if not Path(value).parent.is_dir():
                folder = brief(str(Path(value).parent))
                raise click.BadParameter(f"the folder {folder} does not exist.")
            if not value.endswith(endings):
                raise click.BadParameter(f"{brief(value)} must end in {', '.join(endings)}.")
        return value

    return read


def results() -> Console:
    """Return the console for results, on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 1 << 16  # no wrapping at 80 columns in files and pipes
    return console


_NAMES = ("doctor", "profile", "replay", "top", "trace", "tune")  # each is in a module of its own
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_EPILOG = """\b
Examples:
  loaderpool tune train:make_loader --workers 0,4,8,16
  loaderpool replay train:loader --index 1234 --epoch 2 --pdb
  loaderpool trace --last 10 -o trace.json
"""


class _Commands(click.Group):
    """Group of commands that imports a command only when it is named.

    So `top` does not wait for the imports of the others.
    """

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_NAMES)

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(context, arguments)
        except click.UsageError as error:
            near = nearest(arguments[0], _NAMES)
            advice = f"Did you mean {near!r}?" if near else f"Write one of {', '.join(_NAMES)}."
            raise click.UsageError(f"{error.message} {advice}", context) from None

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _NAMES:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{name}"), name)
        return command


@click.group(cls=_Commands, epilog=_EPILOG, context_settings=_SETTINGS)
@click.version_option(
    loaderpool.__version__, prog_name="loaderpool", message="%(prog)s %(version)s"
)
def cli() -> None:
    """Benchmark, tune and diagnose loaders.

    TARGET is package.module:name: a loaderpool.Loader, or a function without arguments that returns
    one. Modules are imported as with `python -m`: the current directory comes first.
    """
