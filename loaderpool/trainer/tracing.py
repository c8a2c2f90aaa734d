"""Conversion of the rings of a training to a trace of the last seconds, in Chrome's format.

    rings ─▶ Tracing.add_pool, add_loader ─▶ spans ─▶ Tracing.trace ─▶ trace.json

https://ui.perfetto.dev and chrome://tracing show such files. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in
microseconds since `baseTimeNanoseconds` of the wall clock, as in traces of `torch.profiler`.
"""

from __future__ import annotations

import enum
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loaderpool.errors import readable_s
from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import (
    CALLS,
    DELIVERIES,
    TICKETS,
    CallKind,
    DeliveryKind,
    ReadBytes,
    Record,
    RecordKind,
    read_ring,
    worker_rings,
)
from loaderpool.plan.item_names import item_number
from loaderpool.trainer.explain.page import PAGE_BYTES

VIEWER = "https://ui.perfetto.dev"
_WAITING_FROM_NS = 50_000  # a shorter wait is only a check for a batch that is ready
# The number of longest waits that are named, and the shortest such wait.
_LONGEST, _LONG_NS = 3, 10_000_000
_WAYS = {int(each): each.name.lower().replace("_", " ") for each in DeliveryKind}
_CALL_NAMES: dict[int, str] = {CallKind.SETUP: "setup", CallKind.PROBE: "first sample"}


class SpanKind(enum.Enum):
    """Kind of activity of a span."""

    TASK = enum.auto()  # a worker's ticket, a call in it, or a call in progress
    WAIT = enum.auto()  # the training waits for a batch
    MAKE = enum.auto()  # the training makes a batch itself
    STEP = enum.auto()
    EPOCH = enum.auto()


class Span(NamedTuple):
    """An activity with a start and an end, on a track of a process."""

    kind: SpanKind
    pid: int
    track: str
    name: str
    begun_ns: int
    ended_ns: int
    told: dict[str, Any]


class _Call(NamedTuple):
    """A call for an item, in a task that makes batches."""

    run: tuple[int, int, int]  # numbers of the loader, of its run and of the epoch
    batches: range
    span: Span


class _Wait(NamedTuple):
    """A wait of the training for a batch."""

    run: tuple[int, int, int]
    batch: int
    begun_ns: int
    ended_ns: int


class Trace(NamedTuple):
    """A trace in its written form, with a summary."""

    text: str  # JSON
    seconds: float  # length of the traced time
    events: int  # the number of events
    waits: tuple[str, ...]  # the longest waits, each with its longest call
    notes: tuple[str, ...]  # gaps of the trace, one sentence each


class _Waits:
    """Waits of the training, and the calls that may explain them."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.waits: list[_Wait] = []

    def longest(self, since_ns: int) -> Iterator[str]:
        """Yield a text for each of the longest waits, the longest first."""
        waits = [each for each in self.waits if each.ended_ns >= since_ns]
        for wait in sorted(waits, key=lambda each: each.begun_ns - each.ended_ns)[:_LONGEST]:
            # Runs of two pools may have the same number. So use only calls that ended during the
            # wait.
            during = [
                each.span
                for each in self.calls
                if each.run == wait.run
                and wait.batch in each.batches
                and wait.begun_ns < each.span.ended_ns <= wait.ended_ns
            ]
            text = f"{_took(wait)} for batch {wait.batch} of epoch {wait.run[2]}"
            if during:
                longest = max(during, key=lambda span: span.ended_ns - span.begun_ns)
                text += f"; {longest.name} took {_took(longest)} in it"
            yield text


class _Gaps:
    """Reasons for which a trace is incomplete, each named once."""

    def __init__(self) -> None:
        self._reasons: dict[str, None] = {}
        # By kind of record: time from which a full ring is complete.
        self._complete_from_ns: dict[str, int] = {}

    def add(self, reason: str) -> None:
        """Add a reason that holds for the whole trace."""
        self._reasons[reason] = None

    def add_overwritten(self, what: str, from_ns: int) -> None:
        """Note that records before a time were overwritten."""
        self._complete_from_ns[what] = max(from_ns, self._complete_from_ns.get(what, 0))

    def texts(self, since_ns: int, now_ns: int) -> tuple[str, ...]:
        """Return a sentence for each gap of a trace between two times."""
        overwritten = (
            f"{what} cover only the last {(now_ns - from_ns) / 1e9:.1f} s: "
            "older ones were overwritten"
            for what, from_ns in self._complete_from_ns.items()
            if from_ns > since_ns
        )
        return (*self._reasons, *overwritten)


class Tracing:
    """The recorded activities of a training: those of its pools and of its loaders.

    Args:
        pid: Process of the training.
        command: Its command line, or another name for it.
        has_one: True if the training has one loader.
        now_ns: Time of reading, by the monotonic clock.
        wall_ns: The same time by the wall clock, which files of other programs use.
    """

    def __init__(self, pid: int, command: str, has_one: bool, now_ns: int, wall_ns: int) -> None:
        self._pid, self._has_one, self.now_ns, self._wall_ns = pid, has_one, now_ns, wall_ns
        self._processes: dict[int, str] = {pid: f"training: {command}"}  # names by pid
        self._spans: list[Span] = []  # spans, unsorted
        self.tickets: list[Record] = []  # records of the workers
        self.deliveries: list[Record] = []  # records of the loaders
        # Worker numbers by pid, including workers that have ended.
        self.workers: dict[int, int] = {}
        # Start of the ticket in progress (0: none), by pid of living workers.
        self.running: dict[int, int] = {}
        self._waits = _Waits()
        self._gaps = _Gaps()

    def add_pool(self, read: ReadBytes, arena_bytes: int) -> None:
        """Add the records of an arena, and the present activity of its workers.

        Takes some milliseconds for each worker.
        """
        board = Board(read(0, BOARD_BYTES))
        rings = worker_rings(BOARD_BYTES + CALL_TIMES_BYTES, arena_bytes)[: board.cells]
        tickets = [row for at in rings for row in self._read(read, at, TICKETS, "tasks")]
        calls = [
            row for at in rings for row in self._read(read, at + TICKETS.ring_bytes, CALLS, "calls")
        ]
        self.tickets += tickets
        numbers = {
            **{row["pid"]: row["worker"] for row in tickets},
            **{pid: each for each, pid, _ in board.workers() if pid},
        }
        self.workers.update(numbers)
        self._processes.update(
            (pid, f"worker {numbers[pid]}") for pid in sorted(numbers, key=numbers.__getitem__)
        )
        for row in tickets:
            rows = [row["row_start"], row["row_stop"]]
            told = {
                "rows": rows,
                **{name: row[name] for name in ("epoch", "ticket", "loader", "attempt")},
            }
            name = _batches(row) + " (failed)" * bool(row["has_failed"])
            self._add(
                SpanKind.TASK, row["pid"], "tasks", name, row["began_ns"], row["ended_ns"], **told
            )
        of_task = {(row["pid"], row["ticket"]): row for row in tickets}
        for row in calls:
            is_named = row["kind"] in _CALL_NAMES
            name = _CALL_NAMES[row["kind"]] if is_named else f"item {item_number(row['index'])}"
            told = {} if is_named else {"index": row["index"], "ticket": row["ticket"]}
            span = self._add(
                SpanKind.TASK, row["pid"], "tasks", name, row["began_ns"], row["ended_ns"], **told
            )
            task = of_task.get((row["pid"], row["ticket"]))
            if task is not None and not is_named:
                self._waits.calls.append(
                    _Call(_run_of(task["loader"], task), _range_of(task), span)
                )
        first_calls: dict[tuple[int, int], int] = {}  # by pid and ticket: start of the first call
        for row in calls:
            first_calls.setdefault((row["pid"], row["ticket"]), row["began_ns"])
        for _, pid, cell in board.workers():
            if pid and cell >= len(rings):
                self._gaps.add(
                    "some workers are not recorded: the memory for their records is used up"
                )
            ticket, started_ns = board.read(cell, Field.TICKET), board.read(cell, Field.STARTED_NS)
            begins = [first_calls[pid, ticket]] if ticket and (pid, ticket) in first_calls else []
            if index := board.read(cell, Field.INDEX):
                items = max(1, board.read(cell, Field.BLOCK))
                name = (
                    f"{'item' if items == 1 else f'{items} items from'} "
                    f"{item_number(index - 1)} (still running)"
                )
                self._add(
                    SpanKind.TASK, pid, "tasks", name, started_ns, self.now_ns, index=index - 1
                )
                begins.append(started_ns)
            self.running[pid] = min(begins, default=0)

    def add_loader(self, told: Mapping[str, Any], read: ReadBytes) -> None:
        """Add the deliveries of a loader.

        `told` is the content of its page. `read` reads the page's file.
        """
        of = "" if self._has_one else f" of loader {told['loader'] or 'without workers'}"
        asked_ns = 0 if told["asked_s"] is None else int(1e9 * (told["looked_s"] - told["asked_s"]))
        rows = sorted(
            self._read(read, PAGE_BYTES, DELIVERIES, "batches of the training"),
            key=lambda row: row["ended_ns"],
        )
        self.deliveries += rows
        number = told["loader"]
        if number is None:
            self._gaps.add(
                "workers=0: the main process makes the batches, and single calls are not recorded"
            )
        elif rows and all(row["loader"] != number for row in self.tickets):
            self._gaps.add(
                f"the tasks{of} could not be read: workers on other nodes are not recorded, and "
                "spawned ones only by Loader.trace(), except on Linux"
            )
        begin: Record | None = None
        for row, following in zip(rows, [*rows[1:], None], strict=False):
            begin, is_last = begin or row, following is not None and bool(following["begins_pass"])
            until_ns = following["began_ns"] if following else asked_ns or self.now_ns
            self._add_delivery(f"steps{of}", row, until_ns, is_last)
            if row["waited_ns"] >= _LONG_NS and number is not None:
                self._waits.waits.append(
                    _Wait(_run_of(number, row), row["batch"], row["began_ns"], row["ended_ns"])
                )
            if following is None or is_last:
                name = f"epoch {begin['epoch']}"
                self._add(
                    SpanKind.EPOCH,
                    self._pid,
                    f"epochs{of}",
                    name,
                    begin["began_ns"],
                    row["ended_ns"],
                )
                begin = None
        if asked_ns:
            name = "wait for data (still waiting)"
            self._add(SpanKind.WAIT, self._pid, f"steps{of}", name, asked_ns, self.now_ns)

    def _read(self, read: ReadBytes, at: int, kind: RecordKind, what: str) -> list[Record]:
        rows = read_ring(read, at, kind)
        if rows and rows[0]["number"] > 1:
            self._gaps.add_overwritten(what, rows[0]["ended_ns"])
        return rows

    def _add(
        self,
        kind: SpanKind,
        pid: int,
        track: str,
        name: str,
        begun_ns: int,
        ended_ns: int,
        **told: object,
    ) -> Span:
        self._processes.setdefault(pid, "worker")  # a worker that has ended and had no ticket
        self._spans.append(Span(kind, pid, track, name, begun_ns, ended_ns, told))
        return self._spans[-1]

    def _add_delivery(self, track: str, row: Record, until_ns: int, is_last: bool) -> None:
        told, handed_over_ns = (
            {name: row[name] for name in ("epoch", "batch", "count")},
            row["ended_ns"],
        )
        what, kind = "wait for" if row["waited_ns"] >= _WAITING_FROM_NS else "take", SpanKind.WAIT
        if row["way"] == DeliveryKind.MADE_HERE:
            what, kind = "make", SpanKind.MAKE
        waited = {**told, "wait_us": row["waited_ns"] // 1000}
        self._add(
            kind,
            self._pid,
            track,
            f"{what} {_batches(row)}",
            row["began_ns"],
            handed_over_ns,
            **waited,
        )
        step_or_steps = "step" if row["count"] == 1 else "steps"
        name = f"{step_or_steps}: {_batches(row)}{' (last of the epoch)' * is_last}"
        way = _WAYS.get(row["way"], "?")
        until_ns = max(handed_over_ns, until_ns)
        self._add(SpanKind.STEP, self._pid, track, name, handed_over_ns, until_ns, **told, way=way)

    def spans(self, *kinds: SpanKind) -> list[Span]:
        """Return all spans of some kinds, in no order."""
        return [each for each in self._spans if each.kind in kinds]

    def trace(self, seconds: float | None) -> Trace:
        """Return the trace of the last `seconds`, or of all records if `seconds` is None."""
        now_ns = self.now_ns
        since_ns = 0 if seconds is None else now_ns - int(seconds * 1e9)
        waits, notes = (
            tuple(self._waits.longest(since_ns)),
            self._gaps.texts(since_ns, now_ns),
        )
        spans = [each for each in self._spans if each.ended_ns >= since_ns]
        spans.sort(key=lambda each: (each.begun_ns, -each.ended_ns))
        since_ns = max(since_ns, spans[0].begun_ns if spans else now_ns)
        placed = list(_on_tracks(spans))
        numbers = {
            each: number
            for number, each in enumerate(sorted({track for track, _ in placed}), start=1)
        }
        events: list[dict[str, Any]] = [
            *({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
              for pid, name in self._processes.items()),
            *({"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": name}}
              for (pid, name), number in numbers.items()),
            *(_event(span, numbers[track], since_ns) for track, span in placed),
        ]  # fmt: skip
        about = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._wall_ns - (now_ns - since_ns),
            "loaderpool": {
                "pid": self._pid,
                "seconds": round((now_ns - since_ns) / 1e9, 3),
                "notes": notes,
            },
            "traceEvents": events,
        }
        text = json.dumps(about, separators=(",", ":"))
        return Trace(text, (now_ns - since_ns) / 1e9, len(events), waits, notes)


def _run_of(loader: int, record: Record) -> tuple[int, int, int]:
    return loader, record["run"], record["epoch"]


def _range_of(record: Record) -> range:
    return range(record["batch"], record["batch"] + record["count"])


def _took(timed: Span | _Wait) -> str:
    return readable_s((timed.ended_ns - timed.begun_ns) / 1e9)


def _batches(record: Record) -> str:
    first, count = record["batch"], record["count"]
    return f"batch {first}" if count == 1 else f"batches {first} to {first + count - 1}"


def _on_tracks(spans: Iterable[Span]) -> Iterator[tuple[tuple[int, str], Span]]:
    """Yield spans, each with its process and track. They must be sorted by their start.

    Spans that overlap partly get different numbered tracks, because viewers nest spans.
    """
    # Open spans of each numbered track, by process and track.
    lanes: dict[tuple[int, str], list[list[Span]]] = {}
    for span in spans:
        of_track = lanes.setdefault((span.pid, span.track), [])
        place = next(
            (place for place, is_open in enumerate(of_track) if _fits(span, is_open)), len(of_track)
        )
        if place == len(of_track):
            of_track.append([])
        of_track[place].append(span)
        yield (span.pid, f"{span.track} ({place + 1})" if place else span.track), span


def _fits(span: Span, is_open: list[Span]) -> bool:
    """Return True if a span is after or within the last open span.

    Spans that have ended before its start are removed from `is_open`.
    """
    while is_open and is_open[-1].ended_ns <= span.begun_ns:
        is_open.pop()
    return not is_open or span.ended_ns <= is_open[-1].ended_ns


def _event(span: Span, track: int, since_ns: int) -> dict[str, Any]:
    """Return the event for a span. If it began before the trace, return only the rest."""
    begun_ns = max(span.begun_ns, since_ns)
    took_us = max(0, span.ended_ns - begun_ns) / 1000
    where = {
        "ph": "X",
        "pid": span.pid,
        "tid": track,
        "ts": (begun_ns - since_ns) / 1000,
        "dur": took_us,
    }
    return {**where, "name": span.name, "cat": "loaderpool", "args": span.told}


def write_trace(path: Path, text: str) -> None:
    """Write a trace, compressed if the name ends in .gz.

    Raises:
        OSError: The file cannot be written.
    """
    data = text.encode()
    path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
