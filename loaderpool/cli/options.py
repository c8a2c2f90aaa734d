"""Checked values of command line options; a wrong one is a usage error before anything is measured."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import click

from loaderpool.config import MAX_WORKERS

__all__ = ["Counts", "OutputFile", "PlotFile", "Seconds"]


class Seconds(click.ParamType):
    """A positive, finite number of seconds."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a positive number of seconds.", param, ctx)
        return seconds


class Counts(click.ParamType):
    """Numbers of workers to compare, as 0,1,2,4: ascending, each once."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of numbers of workers such as 0,1,2,4.", param, ctx)
        counts = tuple(sorted({int(part) for part in parts}))
        if counts[-1] > MAX_WORKERS:
            self.fail(f"{counts[-1]} is more than the largest number of workers, {MAX_WORKERS}.", param, ctx)
        if len(counts) < 2:
            self.fail(f"{value!r} leaves nothing to compare: give two numbers or more, such as 0,4.", param, ctx)
        return counts


class OutputFile(click.ParamType):
    """A file to be written when all is done; its folder is there already, for that is known at the start."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.is_dir():
            self.fail(f"{str(path)!r} is a directory.", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"the directory {str(path.parent)!r} does not exist.", param, ctx)
        return path


class PlotFile(OutputFile):
    """A picture to be written, where matplotlib is installed."""

    name = "file.png"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            self.fail(f"{str(path)!r} is no picture: end it in .png, .svg or .pdf.", param, ctx)
        if importlib.util.find_spec("matplotlib") is None:
            self.fail("a plot needs matplotlib: pip install 'loaderpool[cli]'", param, ctx)
        return path
