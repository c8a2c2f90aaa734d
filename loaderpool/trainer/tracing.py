"""What happened in the last seconds, from the rings of a training to a trace in Chrome's format.

    rings ─▶ Tracing.add_pool, add_loader ─▶ spans ─▶ Tracing.trace ─▶ trace.json

https://ui.perfetto.dev and chrome://tracing show such files. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in microseconds, counted
from `baseTimeNanoseconds` of the wall clock, as traces of `torch.profiler` have it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loaderpool.errors import brief, readable_s
from loaderpool.memory.board import BOARD_BYTES, Board, Field
from loaderpool.memory.call_times import CALL_TIMES_BYTES
from loaderpool.memory.recorder import (
    CALLS,
    DELIVERIES,
    TICKETS,
    CallKind,
    DeliveryKind,
    ReadBytes,
    RecordKind,
    read_ring,
    worker_rings,
)
from loaderpool.plan.order import item_number
from loaderpool.system.process import why_no_file, write_whole
from loaderpool.trainer.explain.page import PAGE_BYTES

VIEWER = "https://ui.perfetto.dev"
_FORMAT_VERSION = 1  # of what is told beside events; raised when a key changes its meaning or goes away
_MOST_SPANS = 80_000  # some 20 MB; viewers in a browser get slow with more
_COMPRESSED = ".gz"
_WAITING_FROM_NS = 50_000  # a shorter wait is a look at what is there
_LONGEST, _LONG_NS = 3, 10_000_000  # so many of the longest waits are told, if they were so long
_ARROW_NS = 100  # within a span, so that the arrow binds to it and not to its neighbour
_WAYS = {int(each): each.name.lower().replace("_", " ") for each in DeliveryKind}
_CALL_NAMES: dict[int, str] = {CallKind.SETUP: "setup", CallKind.PROBE: "first sample"}
_Row = dict[str, int]  # a record, by its fields' names
_Arena = tuple[int, ...]  # which file it is, as a page tells it; empty: it is none, or cannot be read


class _Track(NamedTuple):
    """A row of spans. A process's tracks are shown in the order of their names."""

    pid: int
    name: str


@dataclasses.dataclass(eq=False)
class _Span:
    """Something that took time."""

    track: _Track
    name: str
    begun_ns: int
    ended_ns: int
    told: dict[str, Any]
    longest: _Span | None = None  # of a ticket: its longest call

    @property
    def ns(self) -> int:
        return max(0, self.ended_ns - self.begun_ns)


class _Flow(NamedTuple):
    """Through which a batch went."""

    call: _Span | None  # the longest one of the ticket
    ticket: _Span
    wait: _Span  # for the batch
    step: _Span


class Trace(NamedTuple):
    """A trace that can be written."""

    text: str  # JSON
    seconds: float  # how far it goes back
    events: int  # how many it has
    notes: tuple[str, ...]  # what it lacks, a sentence each
    waits: tuple[str, ...]  # which batches were waited for longest, and what took so long in them


class Tracing:
    """What the rings of a training tell. Pools are added first, then loaders.

    Args:
        pid: the trainer's.
        command: its command line, or another name for it.
        loaders: what the page of each of its loaders tells.
        now_ns: when this is read, by the monotonic clock.
        wall_ns: the same moment by the clock that other programs' files know.
    """

    def __init__(self, pid: int, command: str, loaders: Sequence[Mapping[str, Any]], now_ns: int, wall_ns: int) -> None:
        self._pid, self._loaders, self._now_ns, self._wall_ns = pid, loaders, now_ns, wall_ns
        self._processes: dict[int, str] = {pid: f"training: {command}"}  # names by pid
        self._spans: list[_Span] = []  # in no order
        self._ways: list[_Flow] = []
        # Tickets, by the arena of their pool, and by run, epoch and batch; of each pool that was read.
        self._made: dict[_Arena, dict[tuple[int, int, int], list[_Span]]] = {}
        self._since_ns: dict[str, int] = {}  # of full rings, by what they have: from when on they have all of it
        self._unrecorded = 0  # workers that have no rings, as the arena is small

    def add_pool(self, arena: _Arena, read: ReadBytes, arena_bytes: int) -> None:
        """Take in what an arena's rings hold, and what its workers are at; some milliseconds for each worker."""
        board = Board(read(0, BOARD_BYTES))
        rings = worker_rings(BOARD_BYTES + CALL_TIMES_BYTES, arena_bytes)[: board.cells]
        self._unrecorded += board.cells - len(rings)
        calls_at = TICKETS.ring_bytes
        tickets = [row for at in rings for row in self._read(read, at, TICKETS, "tasks of some workers")]
        calls = [row for at in rings for row in self._read(read, at + calls_at, CALLS, "calls of some workers")]
        numbers = {
            **{row["pid"]: row["worker"] for row in tickets},
            **{pid: each for each, pid, _ in board.workers() if pid},
        }
        self._processes.update((pid, f"worker {numbers[pid]}") for pid in sorted(numbers, key=numbers.__getitem__))
        calls_of = {each["loader"]: each["calls_of"] for each in self._loaders if arena_of(each) == arena}
        made = self._made.setdefault(arena, {})
        by_number: dict[tuple[int, int], _Span] = {}
        for row in tickets:
            rows = [row["row_start"], row["row_stop"]]
            told = {"rows": rows, **{name: row[name] for name in ("epoch", "ticket", "loader", "attempt")}}
            name = _batches(row) + " (failed)" * bool(row["has_failed"])
            ticket = self._add(self._tasks_of(row["pid"]), name, row["began_ns"], row["ended_ns"], **told)
            by_number[row["pid"], row["ticket"]] = ticket
            if not row["has_failed"]:
                made.setdefault((row["run"], row["epoch"], row["batch"]), []).append(ticket)
        for row in calls:
            self._add_call(row, by_number.get((row["pid"], row["ticket"])), calls_of)
        for _, pid, cell in board.workers():
            if index := board.read(cell, Field.INDEX):
                items = max(1, board.read(cell, Field.BLOCK))
                name = f"{'item' if items == 1 else f'{items} items from'} {item_number(index - 1)} (still running)"
                begun_ns = board.read(cell, Field.STARTED_NS)
                self._add(self._tasks_of(pid), name, begun_ns, self._now_ns, index=index - 1)

    def add_loader(self, told: Mapping[str, Any], read: ReadBytes) -> None:
        """Take in what a loader has handed over, of which its page tells this; `read` reads the page's file."""
        of = "" if len(self._loaders) == 1 else f" of loader {told['loader'] or 'without workers'}"
        epochs, steps = _Track(self._pid, f"epochs{of}"), _Track(self._pid, f"steps{of}")
        asked_ns = 0 if told["asked_s"] is None else int(1e9 * (told["looked_s"] - told["asked_s"]))
        rows = self._read(read, PAGE_BYTES, DELIVERIES, "deliveries of some loaders")
        rows.sort(key=lambda row: row["ended_ns"])
        begin: _Row | None = None
        for row, following in zip(rows, [*rows[1:], None], strict=False):
            begin, is_last = begin or row, following is not None and bool(following["begins_pass"])
            until_ns = following["began_ns"] if following else asked_ns or self._now_ns
            self._add_delivery(steps, row, until_ns, is_last, self._made.get(arena_of(told), {}))
            if following is None or is_last:
                self._add(epochs, f"epoch {begin['epoch']}", begin["began_ns"], row["ended_ns"])
                begin = None
        if asked_ns:
            self._add(steps, "wait for data (still waiting)", asked_ns, self._now_ns)

    def _read(self, read: ReadBytes, at: int, kind: RecordKind, what: str) -> list[_Row]:
        found, names = read_ring(read, at, kind), kind.dtype.names or ()
        self._since_ns[what] = max(found.since_ns, self._since_ns.get(what, 0))
        return [dict(zip(names, record, strict=True)) for record in found.records.tolist()]

    def _add(self, track: _Track, name: str, begun_ns: int, ended_ns: int, **told: Any) -> _Span:
        self._spans.append(_Span(track, name, begun_ns, ended_ns, told))
        return self._spans[-1]

    def _tasks_of(self, pid: int) -> _Track:
        self._processes.setdefault(pid, "worker")  # which is gone, and had no ticket
        return _Track(pid, "tasks")

    def _add_call(self, row: _Row, ticket: _Span | None, calls_of: Mapping[int | None, str]) -> None:
        is_of_batch = ticket is not None and calls_of.get(ticket.told["loader"]) == "batch"
        what = "call from item" if is_of_batch else "sample"
        name = _CALL_NAMES.get(row["kind"], f"{what} {item_number(row['index'])}")
        told = {} if row["kind"] in _CALL_NAMES else {"index": row["index"], "ticket": row["ticket"]}
        span = self._add(self._tasks_of(row["pid"]), name, row["began_ns"], row["ended_ns"], **told)
        if told and ticket is not None and (ticket.longest is None or span.ns > ticket.longest.ns):
            ticket.longest = span

    def _add_delivery(
        self, track: _Track, row: _Row, until_ns: int, is_last: bool, made: Mapping[tuple[int, int, int], list[_Span]]
    ) -> None:
        told, handed_over_ns = {name: row[name] for name in ("epoch", "batch", "count")}, row["ended_ns"]
        what = "wait for" if row["waited_ns"] >= _WAITING_FROM_NS else "take"
        if row["way"] == DeliveryKind.MADE_HERE:
            what = "make"
        waited = {**told, "wait_us": row["waited_ns"] // 1000}
        wait = self._add(track, f"{what} {_batches(row)}", row["began_ns"], handed_over_ns, **waited)
        step_or_steps = "step" if row["count"] == 1 else "steps"
        name = f"{step_or_steps}: {_batches(row)}{' (last of the epoch)' * is_last}"
        way = _WAYS.get(row["way"], "?")
        step = self._add(track, name, handed_over_ns, max(handed_over_ns, until_ns), **told, way=way)
        for ticket in made.get((row["run"], row["epoch"], row["batch"]), ()):
            ticket.told["consumed_by"] = step.name
            self._ways.append(_Flow(ticket.longest, ticket, wait, step))

    def trace(self, seconds: float | None, most_spans: int = _MOST_SPANS) -> Trace:
        """Return the trace of the last so many seconds (None: of all that is known), or the latest spans of it."""
        now_ns = self._now_ns
        wanted_ns = 0 if seconds is None else now_ns - int(seconds * 1e9)
        notes = list(self._notes(wanted_ns))
        known_ns = since_ns = max(wanted_ns, min((each.begun_ns for each in self._spans), default=now_ns))
        ends_ns = sorted(each.ended_ns for each in self._spans if each.ended_ns >= since_ns)
        if len(ends_ns) > most_spans:
            since_ns = ends_ns[-most_spans]
            held_s, known_s = (now_ns - since_ns) / 1e9, (now_ns - known_ns) / 1e9
            notes.append(f"the trace covers {held_s:.1f} s, not {known_s:.1f} s: it has the last {most_spans:,} spans")
        spans = [each for each in self._spans if each.ended_ns >= since_ns]
        ways = [way for way in self._ways if (way.call or way.ticket).ended_ns >= since_ns]
        _put_on_lanes(spans)
        numbers = {track: number for number, track in enumerate(sorted({span.track for span in spans}), start=1)}
        events = [*_names(self._processes, numbers), *_events(spans, ways, numbers, since_ns)]
        about = {
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._wall_ns - (now_ns - since_ns),
            "loaderpool": {
                "format": _FORMAT_VERSION,
                "pid": self._pid,
                "seconds": round((now_ns - since_ns) / 1e9, 3),
                "clock": "CLOCK_MONOTONIC, converted to CLOCK_REALTIME with the offset at the time of writing",
                "notes": notes,
            },
            "traceEvents": events,
        }
        text = json.dumps(about, separators=(",", ":"))
        return Trace(text, (now_ns - since_ns) / 1e9, len(events), tuple(notes), tuple(_longest_waits(ways)))

    def _notes(self, since_ns: int) -> Iterator[str]:
        """Yield what the trace cannot have."""
        for what, latest_ns in self._since_ns.items():
            if latest_ns > since_ns:
                held_s = (self._now_ns - latest_ns) / 1e9
                yield f"{what} cover only the last {held_s:.1f} s, because their record buffer was full"
        for told in self._loaders:
            if told["loader"] is None:
                yield "workers=0: batches are loaded in the main process, where single calls are not recorded"
            elif arena_of(told) not in self._made or not all(each["pid"] for each in told["workers"]):
                yield (
                    f"the workers of loader {told['loader']} could not be read: those on other nodes are not recorded. "
                    "If workers are spawned, only Loader.trace() in the training script can read their records"
                )
        if self._unrecorded:
            yield f"{self._unrecorded} workers are not recorded, because the shared memory for records is full"


def arena_of(told: Mapping[str, Any]) -> _Arena:
    """Return which arena a loader's pool has, as its page tells."""
    return tuple(told["arena"] or ())


def _batches(record: _Row) -> str:
    first, count = record["batch"], record["count"]
    return f"batch {first}" if count == 1 else f"batches {first} to {first + count - 1}"


def _put_on_lanes(spans: list[_Span]) -> None:
    """Sort spans by their beginnings, those that partly overlap on numbered tracks: viewers nest what they show."""
    lanes: dict[_Track, list[list[_Span]]] = {}  # of each what is open
    spans.sort(key=lambda each: (each.begun_ns, -each.ended_ns))
    for span in spans:
        of_track = lanes.setdefault(span.track, [])
        place = next((place for place, is_open in enumerate(of_track) if _fits(span, is_open)), len(of_track))
        if place == len(of_track):
            of_track.append([])
        of_track[place].append(span)
        if place:
            span.track = span.track._replace(name=f"{span.track.name} ({place + 1})")


def _fits(span: _Span, is_open: list[_Span]) -> bool:
    """Whether a span lies after or within the last of those that are open at its beginning; others are closed."""
    while is_open and is_open[-1].ended_ns <= span.begun_ns:
        is_open.pop()
    return not is_open or span.ended_ns <= is_open[-1].ended_ns


def check_trace_path(path: Path) -> str:
    """Return why no trace can be written there, as an answer to "path is ..."; "": it can be."""
    if problem := why_no_file(path, "trace.json"):
        return problem
    if not path.name.endswith((".json", f".json{_COMPRESSED}")):
        return f"{brief(str(path))} must end in .json or .json.gz"
    return ""


def write_trace(path: Path, text: str) -> None:
    """Write a trace; where that fails, with `OSError`, what stood there before still does."""
    data = text.encode()
    write_whole(path, gzip.compress(data, 6) if path.name.endswith(_COMPRESSED) else data)


def _longest_waits(ways: Sequence[_Flow]) -> Iterator[str]:
    """Yield the longest waits for a batch of which all is known, the longest first."""
    by_wait = {id(way.wait): way for way in ways if way.wait.ns >= _LONG_NS}
    for call, _, wait, _ in sorted(by_wait.values(), key=lambda way: -way.wait.ns)[:_LONGEST]:
        what = f"; {call.name} took {readable_s(call.ns / 1e9)}" if call else ""
        yield f"{readable_s(wait.ns / 1e9)} for batch {wait.told['batch']} of epoch {wait.told['epoch']}{what}"


def _names(processes: dict[int, str], numbers: dict[_Track, int]) -> Iterator[dict[str, Any]]:
    for place, (pid, name) in enumerate(processes.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}
    for track, number in numbers.items():
        on = {"ph": "M", "pid": track.pid, "tid": number}
        yield {**on, "name": "thread_name", "args": {"name": track.name}}
        yield {**on, "name": "thread_sort_index", "args": {"sort_index": number}}


def _events(
    spans: Sequence[_Span], ways: Sequence[_Flow], numbers: dict[_Track, int], base_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield what took time, and arrows between; of what began before the base only the rest."""

    def event(span: _Span, kind: str, name: str, at_ns: int, **more: Any) -> dict[str, Any]:
        where = {"pid": span.track.pid, "tid": numbers[span.track]}
        return {**where, "ph": kind, "name": name, "cat": "loaderpool", "ts": (at_ns - base_ns) / 1000, **more}

    for span in spans:
        begun_ns = max(span.begun_ns, base_ns)
        yield event(span, "X", span.name, begun_ns, dur=max(0, span.ended_ns - begun_ns) / 1000, args=span.told)
    for number, way in enumerate(ways):
        at_ns = base_ns
        for span in filter(None, way):
            # Each ends within its span and after the one before: of a ticket after its calls, of which none reaches
            # to its end; of others where they begin.
            inside_ns = span.begun_ns + min(_ARROW_NS, span.ns // 2)
            at_ns = max(at_ns, span.ended_ns - _ARROW_NS if span is way.ticket else inside_ns)
            kind = "f" if span is way.step else "s" if span is (way.call or way.ticket) else "t"
            yield event(span, kind, "batch", at_ns, id=number, **({} if kind == "s" else {"bp": "e"}))
