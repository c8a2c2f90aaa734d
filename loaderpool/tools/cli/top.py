"""`loaderpool top`: looks at a running training from another terminal."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

import loaderpool
from loaderpool.system import clock
from loaderpool.tools.cli.keys import Keys, read_keys
from loaderpool.tools.cli.only_training import only_training
from loaderpool.tools.cli.options import read_seconds, whole_number
from loaderpool.tools.cli.stacks_screen import draw_stacks
from loaderpool.tools.cli.top_screen import draw, with_own_workers
from loaderpool.tools.watching.trainings import (
    TrainingEnded,
    TrainingSnapshot,
    UnwatchableError,
    WatchedTraining,
)
from loaderpool.tools.watching.worker_stacks import ask_stacks, places
from loaderpool.trainer.tracing.chrome import VIEWER, chrome_trace
from loaderpool.trainer.tracing.files import write_trace

_FORMAT_VERSION = 1  # of the JSON objects; raised when a key changes its meaning or goes away
_WIDTH_WITHOUT_TERMINAL = 200
_TRACED_S = 30.0
_FOR_EVER_S = 3600.0


@click.command(
    epilog="\b\nExamples:\n  loaderpool top\n  loaderpool top 12345\n  loaderpool top 12345 --json --every 10\n\n"
    "Keys: e explains at length, s asks the workers which lines of code they are at, t writes a trace of the last "
    "30 seconds into this directory, q quits."
)
@click.argument("pid", required=False, type=whole_number(1))
@click.option("--once", is_flag=True, help="Print it once, and end; so it is, too, where stdout is no terminal.")
@click.option("--stacks", is_flag=True, help="Print which lines of code the workers are at, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@click.option(
    "--every",
    "every_s",
    metavar="SECONDS",
    callback=read_seconds,
    default="0.25",
    show_default=True,
    help="How long from one look to the next.",
)
def top(pid: int | None, once: bool, stacks: bool, as_json: bool, every_s: float) -> None:
    """Look at a running training: why it waits, and what each worker is at.

    PID is the training's process; where there is only one training that may be looked at, it need not be given. The
    training needs no flag for it, and is not touched: what it shares with its workers is read, as its user may.
    Only for stacks threads of workers get a signal, SIGRTMAX - 3, at which each writes where it is.
    """
    if stacks and as_json:
        raise click.UsageError("--stacks are for people: leave out --json.")
    console = Console(highlight=False, markup=False)
    try:
        watched = WatchedTraining(only_training() if pid is None else pid)
        training = watched.read()
        if as_json:
            _print_objects(watched, training, None if once else every_s)
        elif stacks:
            console.print(_draw_stacks(training, _width(console), None), soft_wrap=True)
        elif once or not console.is_interactive:
            _print_once(training, console)
        else:
            _show(watched, training, every_s, console)
    except UnwatchableError as error:
        raise click.ClickException(f"{error}.") from None
    except TrainingEnded as error:
        raise click.ClickException(f"{error}.") from None


def _print_objects(watched: WatchedTraining, training: TrainingSnapshot, every_s: float | None) -> None:
    """Print one object, or one after the other until the training ends."""
    try:
        while True:
            print(json.dumps(_object(training)), flush=True)
            if every_s is None:
                return
            Keys(None).wait(every_s)
            training = watched.read()
    except TrainingEnded as error:
        click.echo(f"The training has ended: {error}.", err=True)


def _object(training: TrainingSnapshot) -> dict[str, object]:
    return {
        "format": _FORMAT_VERSION,
        "command": "top",
        "loaderpool": loaderpool.__version__,
        "pid": training.pid,
        "process": training.command,
        "loaders": [each.to_dict() for each in training.loaders],
    }


def _print_once(training: TrainingSnapshot, console: Console) -> None:
    console.print(draw(training, _width(console), None), soft_wrap=True)


def _width(console: Console) -> int:
    return console.width if console.is_terminal else _WIDTH_WITHOUT_TERMINAL


def _draw_stacks(training: TrainingSnapshot, width: int, height: int | None) -> Text:
    """Ask the workers, and return the screen."""
    pids = [worker.pid for each in with_own_workers(training.loaders) for worker in each.workers if worker.pid]
    stacks = ask_stacks(pids)
    return draw_stacks(places(stacks), len(pids) - len(stacks), width, height)


def _show(watched: WatchedTraining, training: TrainingSnapshot, every_s: float, console: Console) -> None:
    """Show it until `q` is pressed or the training ends, of which the last screen stays."""
    at_length, said = False, ""
    try:
        with read_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_with_keys(training, console, at_length, said), refresh=True)
                key = keys.wait(every_s)
                if key == "s":
                    live.update(_stacks_with_keys(training, console), refresh=True)
                    while not (key := keys.wait(_FOR_EVER_S)):
                        pass
                if key == "q":
                    return
                if key == "e":
                    at_length = not at_length
                if key == "t":
                    said = _write_trace(watched, training.pid)
                training = watched.read()
    except TrainingEnded as error:
        console.print(draw(training, console.width, None, at_length))
        console.print(Text(f"The training has ended: {error}.", style="bold"))


def _write_trace(watched: WatchedTraining, pid: int) -> str:
    """Write what happened lately, and return what there is to say of that."""
    path = Path(f"trace-{pid}-{datetime.datetime.fromtimestamp(clock.wall_s()):%H%M%S}.json.gz")
    try:
        found = chrome_trace(watched.recording(), _TRACED_S)
        write_trace(path, found.text)
    except UnwatchableError as error:
        return f"no trace: {error}"
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return f"{path} has the last {found.seconds:.0f} s, for {VIEWER}"


def _with_keys(training: TrainingSnapshot, console: Console, at_length: bool, said: str) -> Text:
    keys = said or f"q quits, e explains {'in short' if at_length else 'at length'}, s shows stacks, t writes a trace"
    width, height = console.size
    return _above(draw(training, width, height - 2, at_length), keys, width)


def _stacks_with_keys(training: TrainingSnapshot, console: Console) -> Text:
    width, height = console.size
    return _above(_draw_stacks(training, width, height - 2), "as it was just now; any key goes back, q quits", width)


def _above(screen: Text, keys: str, width: int) -> Text:
    line = Text(f"\n\n{keys}", style="dim")
    line.truncate(width + 2, overflow="ellipsis")
    return screen.append(line)
