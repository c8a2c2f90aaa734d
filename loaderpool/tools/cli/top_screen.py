"""What `loaderpool top` shows: a training as lines of text that fit a terminal.

Lines are laid out here, not in tables of rich: four times a second these would take more time than all the rest.
Styles are those that stand out on a light and on a dark ground, and nothing is told by colour alone.
"""

from __future__ import annotations

import collections
import datetime
import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from loaderpool.plan.generator_positions import numbered
from loaderpool.system.readable import counted, readable_number, readable_s, readable_size
from loaderpool.tools.watching.snapshot import LoaderSnapshot, WorkerSnapshot, WorkerState
from loaderpool.tools.watching.trainings import TrainingSnapshot
from loaderpool.trainer.explain.explanation import labelled

_MARKS = "▁▂▃▄▅▆▇█"
# More workers than this, or than there are lines, are told in a few lines together.
_MOST_ROWS = 16
# Of many workers those that have been at an item longest, and of the items those that took longest.
_SHOWN_LONGEST = 4
_SHOWN_SLOWEST = 3
_LABEL = 9  # characters, of the rows "now", "waited" and so on
# From these shares of waiting on: training suffers; it is worth a look.
_MUCH, _SOME = 0.2, 0.05

_Line = Text


def draw(training: TrainingSnapshot, width: int, height: int | None, at_length: bool = False) -> Text:
    """Return the screen.

    Args:
        training: as it is now.
        width: of the terminal, in characters.
        height: in lines; None: there is no end of them.
        at_length: with all that is known of why training waits, and all slowest items.
    """
    blocks = [list(_loader(each, training.loaders, width, at_length)) for each in training.loaders]
    with_workers = with_own_workers(training.loaders)
    used = 2 + sum(len(block) + 1 for block in blocks)
    # Of the room for workers two lines are taken by what stands above them.
    room = _MOST_ROWS if height is None else (height - used) // max(1, len(with_workers)) - 2
    lines = [Text.assemble((training.command or "?", "bold"), f"  (pid {training.pid})")]
    if not blocks:
        lines += [Text(), Text("No loader delivers batches now; the process goes on.")]
    for loader, block in zip(training.loaders, blocks, strict=True):
        lines += [Text(), *block]
        if any(loader is each for each in with_workers):
            lines += [Text(), *_workers(loader.workers, width, room)]
    if height is not None and len(lines) > height:
        hidden = len(lines) - height + 1
        lines[height - 1 :] = [Text(f"… {counted(hidden, 'line')} more, for which the terminal is not high enough")]
    for line in lines:
        if not line.plain.isprintable():  # from a page that was made to have a terminal obey it
            line.plain = "".join(each if each.isprintable() else "?" for each in line.plain)
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines)


def with_own_workers(loaders: Sequence[LoaderSnapshot]) -> list[LoaderSnapshot]:
    """Return those below which workers stand: of several that share a pool the last one."""
    by_pool = {each.pool or number: each for number, each in enumerate(loaders)}
    return [each for each in by_pool.values() if each.workers]


def _loader(loader: LoaderSnapshot, loaders: Sequence[LoaderSnapshot], width: int, at_length: bool) -> Iterator[_Line]:
    explanation = loader.explanation
    place = f"[{loaders.index(loader) + 1} of {len(loaders)}] " if len(loaders) > 1 else ""
    share = explanation.wait_share
    colour = "red" if share >= _MUCH else "magenta" if share >= _SOME else "green"
    yield from (Text(line, style=f"bold {colour}") for line in textwrap.wrap(place + explanation.headline, width))
    for label, text in labelled(explanation):
        if at_length or label != "Expect":
            yield from _wrapped(label.lower(), text, width)
    yield _row("now", _now(loader))
    if loader.wait_shares:
        marks = "".join(_mark(each) for each in loader.wait_shares)
        yield _row("waited", f"{marks} {loader.wait_shares[-1]:.0%} of the last seconds")
    if loader.steps_per_s and loader.samples_per_s is not None and loader.bytes_per_s is not None:
        yield _row(
            "rate",
            f"{readable_number(loader.steps_per_s)} steps/s, {readable_number(loader.samples_per_s)} samples/s, "
            f"{readable_size(loader.bytes_per_s)}/s",
        )
    if loader.call_s:
        times = ", ".join(f"{name} {readable_s(seconds)}" for name, seconds in loader.call_s.items())
        yield _row("calls", f"{times}, of one {loader.calls_of} each")
    if loader.slots:
        yield _row("slots", f"{loader.slots_lent} of {loader.slots} are lent to the training")
    for decision in loader.decisions if at_length else loader.decisions[-1:]:
        at = datetime.datetime.fromtimestamp(decision.time_s).strftime("%H:%M:%S")
        change = f"{decision.workers_before} → {decision.workers} workers"
        yield from _wrapped("auto", f"at {at} {change}: {decision.reason}", width)
    shown = loader.slowest if at_length else loader.slowest[:_SHOWN_SLOWEST]
    if shown:
        items = ", ".join(f"{each.name} ({readable_s(each.seconds)}, epoch {each.epoch})" for each in shown)
        yield from _wrapped("slowest", f"items {items}", width)


def _now(loader: LoaderSnapshot) -> Text:
    if loader.asked_s is not None:
        waits = Text.assemble("the training waits for a batch for ", (readable_s(loader.asked_s), "bold"))
        return waits if loader.number is not None else waits.append(", which is made in its own process")
    if loader.handed_over_s is None:
        return Text("-")
    return Text(f"the training has had the latest batch for {readable_s(loader.handed_over_s)}")


def _row(label: str, text: str | Text) -> _Line:
    return Text.assemble((label.ljust(_LABEL), "dim"), text)


def _wrapped(label: str, text: str, width: int) -> Iterator[_Line]:
    parts = textwrap.wrap(text, max(20, width - _LABEL))
    for number, part in enumerate(parts):
        yield _row("" if number else label, part)


def _mark(share: float) -> str:
    return _MARKS[min(len(_MARKS) - 1, int(share * len(_MARKS)))]


# -- workers


def _workers(workers: Sequence[WorkerSnapshot], width: int, room: int) -> list[_Line]:
    if len(workers) > min(_MOST_ROWS, max(2, room)):
        return list(_together(workers, width))
    return list(_one_by_one(workers))


def _one_by_one(workers: Sequence[WorkerSnapshot]) -> Iterator[_Line]:
    rows = [("worker", "pid", "busy", "CPU")]
    rows += [
        (f"{each.number}", f"{each.pid or '-'}", _percent(each.busy_share), _percent(each.cpus)) for each in workers
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        if number:
            yield Text.assemble(f"{cells}  ", _state(workers[number - 1]))
        else:
            yield Text(f"{cells}  now", style="dim")


def _together(workers: Sequence[WorkerSnapshot], width: int) -> Iterator[_Line]:
    """Yield a summary, a mark for each worker, and those that have been at an item longest."""
    counts = collections.Counter(each.state for each in workers)
    states = ", ".join(f"{count} {_AT[state]}" for state in WorkerState if (count := counts[state]))
    yield _row("workers", Text.assemble((f"{len(workers)}", "bold"), f": {states}"))
    shares = [each.busy_share for each in workers if each.busy_share is not None]
    if shares:
        cpus = sum(each.cpus for each in workers if each.cpus is not None)
        mean = sum(shares) / len(shares)
        yield _row(
            "busy", f"{mean:.0%} ({min(shares):.0%} to {max(shares):.0%}), {counted(round(cpus, 1), 'CPU')} used"
        )
        marks = "".join("?" if each.busy_share is None else _mark(each.busy_share) for each in workers)
        yield from _wrapped("each", marks, width)
    longest = sorted((each for each in workers if each.item_s is not None), key=lambda each: -(each.item_s or 0.0))
    for number, each in enumerate(longest[:_SHOWN_LONGEST]):
        where = f"worker {each.number} (pid {each.pid}): "
        yield _row("" if number else "longest", Text.assemble(where, _state(each)))


_AT = {
    WorkerState.STARTING: "starting",
    WorkerState.SETUP: "in setup",
    WorkerState.ITEM: "at items",
    WorkerState.GENERATOR: "at generators' items",
    WorkerState.IDLE: "idle",
    WorkerState.HOST: "on other machines",
}


def _state(worker: WorkerSnapshot) -> Text:
    if worker.item_s is None:
        return Text(worker.state.value)
    assert worker.index is not None  # it is at an item
    item = f"item {numbered(worker.index, worker.generator)}"
    if worker.items > 1:
        item = f"a block of at most {worker.items} items from {worker.index} on"
    return Text.assemble(f"{item} for ", (readable_s(worker.item_s), "bold"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
