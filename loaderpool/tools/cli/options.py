"""Checked values of command line options; a wrong one is a usage error before anything is measured.

Functions rather than `click.ParamType`s: that class is generic in new releases of click and is not in old ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import click

from loaderpool.errors import ArgumentError
from loaderpool.settings.groups import MAX_THREADS, MAX_WORKERS

# What an output option has for "-": no `Path`, for a file may be called so, as `./-`.
STDOUT = "-"
SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.001, 1.0


def read_seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """A positive, finite number of seconds."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{value!r} is not a positive number of seconds.", context, parameter)
    return seconds


def whole_number(least: int, most: int | None = None) -> click.IntRange:
    """A whole number within bounds. Its errors call it so, and not an "integer range"."""
    kind = click.IntRange(least, most)
    kind.name = "whole number"
    return kind


def read_counts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Numbers of workers to compare, as 0,1,2,4: ascending, each once."""
    counts = _read_numbers(context, parameter, value, "workers such as 0,1,2,4", MAX_WORKERS)
    # Numbers of threads are something to compare, too, but 0 workers have none.
    if counts is not None and len(counts) < 2 and (counts == (0,) or not context.params.get("threads")):
        raise click.BadParameter(
            f"{value!r} leaves nothing to compare: give two numbers or more, such as 0,4.", context, parameter
        )
    return counts


def read_threads(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Numbers of threads for each worker to compare, as 1,4,16: ascending, each once."""
    threads = _read_numbers(context, parameter, value, "threads such as 1,4,16", MAX_THREADS)
    if threads is not None and threads[0] == 0:
        raise click.BadParameter("a worker has at least 1 thread: leave out the 0.", context, parameter)
    return threads


def _read_numbers(
    context: click.Context, parameter: click.Parameter, value: str | None, what: str, largest: int
) -> tuple[int, ...] | None:
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of numbers of {what}.", context, parameter)
    numbers = tuple(sorted({int(part) for part in parts}))
    if numbers[-1] > largest:
        raise click.BadParameter(
            f"{numbers[-1]} is more than the largest number of {what.split()[0]}, {largest}.", context, parameter
        )
    return numbers


def read_hosts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Numbers of a cluster's hosts to compare, as 1,2,4: ascending, each once."""
    hosts = _read_numbers(context, parameter, value, "hosts such as 1,2,4", MAX_WORKERS)
    if hosts is not None and hosts[0] == 0:
        raise click.BadParameter("a cluster has at least 1 host: leave out the 0.", context, parameter)
    return hosts


def read_cluster(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The address of a Ray cluster, as a `RayPool` takes it; whether there is one is not looked at."""
    if value is not None:
        from loaderpool.ray.pool import RayPool  # which commands that need no cluster shall not wait for

        try:
            RayPool(value)
        except ArgumentError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return value


def read_json(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | str | None:
    """A file to be written when all is done, or STDOUT."""
    return STDOUT if value == STDOUT else read_output(context, parameter, value)


def read_plot(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """A picture to be written, where matplotlib is installed."""
    path = read_output(context, parameter, value)
    if path is None:
        return None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"{value!r} is no picture: end it in .png, .svg or .pdf.", context, parameter)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter(
            "a plot needs matplotlib; install it by: pip install 'loaderpool[cli]'", context, parameter
        )
    return path


def read_interval(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Seconds from one look of a profile to the next: a thousandth at least, or looking is all that is done."""
    seconds = read_seconds(context, parameter, value)
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise click.BadParameter(
            f"{value!r} is not within {SHORTEST_INTERVAL_S:g} and {LONGEST_INTERVAL_S:g} seconds.", context, parameter
        )
    return seconds


def read_html(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """A page to be written, where pyinstrument is installed."""
    path = read_output(context, parameter, value)
    if path is not None and importlib.util.find_spec("pyinstrument") is None:
        raise click.BadParameter(
            "the page needs pyinstrument; install it by: pip install 'loaderpool[cli]'", context, parameter
        )
    return path


def read_output(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """A file to be written when all is done: a folder that is not there shall not cost the measurements."""
    if value is None:
        return None
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{value!r} is a directory.", context, parameter)
    if not path.parent.is_dir():
        raise click.BadParameter(f"the directory {str(path.parent)!r} does not exist.", context, parameter)
    return path


@contextlib.contextmanager
def answering_for(path: Path) -> Iterator[None]:
    """A block that writes an output; where it cannot be written, that is said on one line."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror or error}.") from None
