"""What came of the rounds: a table for people, the same in Markdown, and the line that says how to repeat it."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from .cluster_killer import Strike
from .cluster_storm import ClusterResult
from .holdings import Growth
from .killer import Counts
from .rounds import Result
from .trainers import Death

__all__ = [
    "cluster_summary", "print_cluster_results", "print_gaps", "print_growth", "print_results", "print_trainer_deaths",
    "summary",
]  # fmt: skip

_HEADINGS = (
    "shape", "ordered", "workers", "passes", "resumed", "batches", "kills", "stopped", "restarts",
    "supervisor restarts", "readers killed", "mismatches", "seconds",
)  # fmt: skip
_DEATH_HEADINGS = ("the trainer dies by", "workers are", "trainers", "their processes", "slowest end, ms", "left")
_CLUSTER_HEADINGS = ("shape", "ordered", "passes", "resumed", "batches", "kills", "mismatches", "seconds")
_GAP_HEADINGS = ("what was ended, and how", "meanwhile", "times", "median gap, s", "longest gap, s")
_GROWTH_HEADINGS = ("held by all processes", "before", "after", "may be")


def print_results(console: Console, results: list[Result], as_markdown: bool) -> None:
    """One row for each shape, ordered and not."""
    rows = _rows(results)
    _print(console, _HEADINGS, rows, left=1, as_markdown=as_markdown)


def print_cluster_results(console: Console, results: list[ClusterResult], as_markdown: bool) -> None:
    """One row for each shape, ordered and not."""
    by_kind: dict[tuple[str, bool], list[ClusterResult]] = collections.defaultdict(list)
    for result in results:
        by_kind[result.round.shape.name, result.round.is_ordered].append(result)
    kinds = [(name, "yes" if is_ordered else "no", found) for (name, is_ordered), found in sorted(by_kind.items())]
    rows = [[name, ordered, *_of_cluster(found)] for name, ordered, found in [*kinds, ("all", "", results)]]
    _print(console, _CLUSTER_HEADINGS, rows, left=1, as_markdown=as_markdown)


def _of_cluster(found: list[ClusterResult]) -> list[str]:
    numbers = [
        sum(each.passes for each in found),
        sum(each.saves for each in found),
        sum(each.batches + each.companion_batches for each in found),
        sum(len(each.strikes) + each.faults for each in found),
        sum(len(each.mismatches) for each in found),
    ]
    return [*(f"{number:,}" for number in numbers), f"{sum(each.seconds for each in found):.1f}"]


def print_gaps(console: Console, strikes: Mapping[str, Sequence[Strike]], as_markdown: bool) -> None:
    """One row for each kind of kill, by what else went on: how long a consumer has waited for a batch after it."""
    rows = []
    for meanwhile, found in strikes.items():
        by_kind: dict[str, list[float]] = collections.defaultdict(list)
        for strike in found:
            by_kind[strike.kind].append(strike.gap_s)
        for kind, gaps in sorted(by_kind.items()):
            rows.append([kind, meanwhile, f"{len(gaps):,}", f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}"])
    _print(console, _GAP_HEADINGS, rows, left=2, as_markdown=as_markdown)


def cluster_summary(results: list[ClusterResult]) -> str:
    """All of it in a sentence."""
    kills, faults = sum(len(each.strikes) for each in results), sum(each.faults for each in results)
    return (
        f"{kills:,} kills, and {faults:,} segmentation faults of the function; "
        f"{sum(each.resizes for each in results):,} times another number of hosts, "
        f"{sum(each.saves for each in results):,} times another loader at a saved place; "
        f"{sum(each.batches + each.companion_batches for each in results):,} batches compared, "
        f"{sum(len(each.mismatches) for each in results):,} mismatches; nothing was left on any node "
        f"{max((each.emptied_s for each in results), default=0):.2f} s after the pool's end"
    )


def print_growth(console: Console, found: list[Growth], as_markdown: bool) -> None:
    """One row for each kind of holding."""
    rows = [
        [
            each.what.replace("_", " "),
            f"{each.before:,}",
            f"{each.after:,}",
            "not judged" if each.at_most is None else f"{each.at_most:,}",
        ]
        for each in found
    ]
    _print(console, _GROWTH_HEADINGS, rows, left=1, as_markdown=as_markdown)


def print_trainer_deaths(console: Console, deaths: list[Death], as_markdown: bool) -> None:
    """One row for each way to die."""
    by_kind: dict[tuple[str, str], list[Death]] = collections.defaultdict(list)
    for death in deaths:
        by_kind[death.way, death.workers_are].append(death)
    rows = [
        [way, are, f"{len(found)}", _processes(found), _slowest_ms(found), f"{_left(found)}"]
        for (way, are), found in sorted(by_kind.items())
    ]
    rows.append(["all", "", f"{len(deaths)}", _processes(deaths), _slowest_ms(deaths), f"{_left(deaths)}"])
    _print(console, _DEATH_HEADINGS, rows, left=2, as_markdown=as_markdown)


def _processes(deaths: list[Death]) -> str:
    return f"{sum(each.processes for each in deaths)}"


def _slowest_ms(deaths: list[Death]) -> str:
    return f"{max(each.seconds for each in deaths) * 1e3:.0f}"


def _left(deaths: list[Death]) -> int:
    return sum(len(each.left) for each in deaths)


def summary(results: list[Result]) -> str:
    """All of it in a sentence."""
    counts = Counts()
    for each in results:
        counts.add(each.counts)
    faults = sum(each.faults for each in results)
    return (
        f"{counts.kills + faults:,} workers killed ({faults:,} of them by a segmentation fault of the function), "
        f"{counts.supervisor_kills:,} supervisors killed, {counts.reader_kills:,} readers killed (of which "
        f"{sum(each.losses for each in results):,} passes were told), {counts.stops:,} workers stopped for good and "
        f"{counts.brief_stops:,} processes for a moment, {sum(each.resizes for each in results):,} times another "
        f"number of workers, {sum(each.saves for each in results):,} times another loader at a saved place; "
        f"{sum(each.batches + each.companion_batches for each in results):,} batches compared "
        f"({sum(each.companion_batches for each in results):,} of a loader on the same pool), "
        f"{sum(len(each.mismatches) for each in results):,} mismatches"
    )


def _rows(results: Iterable[Result]) -> list[list[str]]:
    by_kind: dict[tuple[str, bool], list[Result]] = collections.defaultdict(list)
    for result in results:
        by_kind[result.round.shape.name, result.round.is_ordered].append(result)
    rows, columns = [], [0] * (len(_HEADINGS) - 4)
    seconds = 0.0
    for (name, is_ordered), found in sorted(by_kind.items()):
        numbers = [
            sum(each.passes for each in found),
            sum(each.saves for each in found),
            sum(each.batches for each in found),
            sum(each.counts.kills + each.faults for each in found),
            sum(each.counts.stops for each in found),
            sum(each.restarts for each in found),
            sum(each.supervisor_restarts for each in found),
            sum(each.counts.reader_kills for each in found),
            sum(len(each.mismatches) for each in found),
        ]
        took = sum(each.seconds for each in found)
        columns = [total + number for total, number in zip(columns, numbers, strict=True)]
        seconds += took
        workers = ", ".join(map(str, sorted({each.round.workers for each in found})))
        rows.append([name, "yes" if is_ordered else "no", workers, *(f"{n:,}" for n in numbers), f"{took:.1f}"])
    rows.append(["all", "", "", *(f"{number:,}" for number in columns), f"{seconds:.1f}"])
    return rows


def _print(console: Console, headings: tuple[str, ...], rows: list[list[str]], *, left: int, as_markdown: bool) -> None:
    if as_markdown:
        marks = ["---"] * left + ["---:"] * (len(headings) - left)
        print(f"| {' | '.join(headings)} |\n|{'|'.join(marks)}|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
        print()
        return
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=console.is_terminal)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
