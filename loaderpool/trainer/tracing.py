"""What happened in the last seconds, from the rings of a training to a trace in Chrome's format.

    rings ─▶ read_pool, read_loader ─▶ Recording ─▶ _Spans ─▶ chrome_trace ─▶ trace.json

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
    MARKS,
    TICKETS,
    CallKind,
    DeliveryKind,
    MarkKind,
    ReadBytes,
    RecorderMemory,
    RingContent,
    Status,
    read_ring,
)
from loaderpool.plan.order import item_number
from loaderpool.system import clock
from loaderpool.system.process import why_no_file, write_whole
from loaderpool.trainer.explain.page import PAGE_BYTES

VIEWER = "https://ui.perfetto.dev"
_FORMAT_VERSION = 1  # of what is told beside events; raised when a key changes its meaning or goes away
# Viewers in a browser get slow with more. What stands before the events has the rest.
_MOST_BYTES, _SHARE_OF_EVENTS = 20 << 20, 0.95
_COMPRESSED = ".gz"
# The two clocks are read so often, and the reading counts that took least.
_READINGS = 16
# Lengths are cut to microseconds, so that what ends in truth before something begins may seem to overlap it, or not to.
_CUT_NS = 1_000
# A shorter telling of a batch is in its ticket's numbers, and in no span; a shorter wait is a look at what is there.
_PUBLISHING_FROM_US = _WAITING_FROM_US = 50
# Spans of a way from a ticket on: its slot, the wait, the step.
_WITHOUT_CALL = 4
# So many of the longest waits are told, if they were so long.
_LONGEST, _LONG_NS = 3, 10_000_000
_STATUSES = {int(each): each.name.lower() for each in Status}
_WAYS = {int(each): each.name.lower().replace("_", " ") for each in DeliveryKind}
_json = json.JSONEncoder(separators=(",", ":")).encode
_CALL_NAMES: dict[int, str] = {CallKind.SETUP: "setup", CallKind.PROBE: "first sample"}
_Row = dict[str, int]  # a record, by its fields' names


# -- what is read


class PoolRecords(NamedTuple):
    """Of one pool."""

    tickets: Sequence[RingContent]  # that are over, of each cell
    calls: Sequence[RingContent]  # that took a millisecond or longer, of each cell
    running: Sequence[tuple[int, int, int, int]]  # a worker, its item, of how many that is the first, and since when
    trainer: RingContent  # its marks
    supervisor: RingContent  # its marks
    unrecorded: int  # workers that have no rings, as the arena is small


class LoaderRecords(NamedTuple):
    """Of one loader in the trainer."""

    number: int | None  # in its pool; None: batches are made in the trainer
    pool: int | None  # which of the recording's pools; None: it has none, or that could not be read
    calls_of: str  # "sample" or "batch": what a call makes
    has_nodes: bool  # other machines make its batches
    deliveries: RingContent
    asked_ns: int  # since when a batch is waited for; 0: none is


class Recording(NamedTuple):
    """Of one training."""

    pid: int  # the trainer's
    command: str  # its command line, or another name for it
    loaders: Sequence[LoaderRecords]  # those that have delivered a batch
    pools: Sequence[PoolRecords]  # that they have their workers of
    now_ns: int  # when this was read, by the monotonic clock
    wall_ns: int  # the same moment by the clock that other programs' files know


def read_clocks() -> tuple[int, int]:
    """Return one moment by the monotonic and by the wall clock, to about a microsecond."""
    readings = []
    for _ in range(_READINGS):
        before_ns, wall_ns, after_ns = clock.monotonic_ns(), clock.wall_ns(), clock.monotonic_ns()
        readings.append((after_ns - before_ns, (before_ns + after_ns) // 2, wall_ns))
    return min(readings)[1:]


def read_loader(told: Mapping[str, Any], pool: int | None, read: ReadBytes) -> LoaderRecords:
    """Return what a loader has recorded, of which its page tells this; `read` reads the page's file."""
    has_nodes = any(not each["pid"] for each in told["workers"])
    asked_ns = 0 if told["asked_s"] is None else int(1e9 * (told["looked_s"] - told["asked_s"]))
    deliveries = read_ring(read, PAGE_BYTES, DELIVERIES)
    return LoaderRecords(told["loader"], pool, told["calls_of"], has_nodes, deliveries, asked_ns)


def read_pool(read: ReadBytes, arena_bytes: int, has_nodes: bool) -> PoolRecords:
    """Return what an arena's rings hold, and what its workers are at. Takes some milliseconds for each worker.

    Cells of nodes tell nothing: their workers record where they are.
    """
    places = RecorderMemory(BOARD_BYTES + CALL_TIMES_BYTES, arena_bytes)
    board = Board(read(0, BOARD_BYTES))
    pids = {} if has_nodes else board.pids()
    tickets, calls, running = [], [], []
    for cell, pid in pids.items():
        if (at := places.worker_at(cell)) is None:
            continue
        if index := board.read(cell, Field.INDEX):
            items = max(1, board.read(cell, Field.BLOCK))
            running.append((pid, index - 1, items, board.read(cell, Field.STARTED_NS)))
        tickets.append(read_ring(read, at, TICKETS))
        calls.append(read_ring(read, at + TICKETS.ring_bytes, CALLS))
    trainer, supervisor = (read_ring(read, at, MARKS) for at in (places.trainer_at, places.supervisor_at))
    return PoolRecords(tickets, calls, running, trainer, supervisor, len(pids) - len(tickets))


def _rows(*rings: RingContent) -> Iterator[_Row]:
    for ring in rings:
        names = ring.records.dtype.names or ()
        for record in ring.records.tolist():
            yield dict(zip(names, record, strict=True))


# -- what it means


class _Track(NamedTuple):
    """A row of spans. A process's tracks are shown in their order."""

    pid: int
    rank: int  # from _EPOCHS on
    name: str


_EPOCHS, _STEPS, _TASKS, _RESIZES, _BUFFERS = range(5)


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


class _Spans:
    """All that a recording tells."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.processes: dict[int, str] = {recording.pid: f"training: {recording.command}"}  # names by pid
        self.spans: list[_Span] = []  # in no order
        # Through which something went: a call, its ticket, its slot, the wait for it, its step.
        self.ways: list[list[_Span]] = []
        self.moments: list[tuple[_Track, str, int]] = []  # where, what, when
        self._made: dict[tuple[int, int, int, int], list[_Span]] = {}  # tickets, by pool, run, epoch and batch
        self._released: dict[tuple[int, int, int], int] = {}  # when, by pool, slot, and the ticket whose work it held
        for place, pool in enumerate(recording.pools):
            self._tell_marks(place, pool)
            self._tell_workers(place, pool)
        for loader in recording.loaders:
            self._tell_loader(loader)

    def _add(self, track: _Track, name: str, begun_ns: int, ended_ns: int, **told: Any) -> _Span:
        self.spans.append(_Span(track, name, begun_ns, ended_ns, told))
        return self.spans[-1]

    # -- workers

    def _tell_marks(self, place: int, pool: PoolRecords) -> None:
        for mark in _rows(pool.supervisor):
            kind, pid = mark["kind"], mark["value"]
            if kind == MarkKind.SUPERVISOR:
                self.processes.setdefault(pid, "supervisor")
            elif kind in (MarkKind.STARTED, MarkKind.ENDED):
                self.processes[pid] = f"worker {mark['number']}"
                what = "starts" if kind == MarkKind.STARTED else "has ended"
                self.moments.append((_Track(pid, _TASKS, "tasks"), f"worker {mark['number']} {what}", mark["at_ns"]))
        for mark in _rows(pool.trainer):
            if mark["kind"] == MarkKind.WANTED:
                track = _Track(self._recording.pid, _RESIZES, "resizes")
                self.moments.append((track, f"{mark['number']} workers", mark["at_ns"]))
            elif mark["kind"] == MarkKind.RELEASED:
                self._released[place, mark["number"], mark["value"]] = mark["at_ns"]

    def _tell_workers(self, place: int, pool: PoolRecords) -> None:
        calls_of = {each.number: each.calls_of for each in self._recording.loaders if each.pool == place}
        tickets: dict[tuple[int, int], _Span] = {}
        for record in _rows(*pool.tickets):
            tickets[record["pid"], record["ticket"]] = self._tell_ticket(place, record)
        for record in _rows(*pool.calls):
            self._tell_call(record, tickets.get((record["pid"], record["ticket"])), calls_of)
        for pid, item, items, since_ns in pool.running:
            name = f"{'item' if items == 1 else f'{items} items from'} {item_number(item)} (still running)"
            self._add(self._tasks_of(pid), name, since_ns, self._recording.now_ns, index=item)

    def _tasks_of(self, pid: int) -> _Track:
        self.processes.setdefault(pid, "worker")  # whose start is not known any more
        return _Track(pid, _TASKS, "tasks")

    def _tell_ticket(self, place: int, record: _Row) -> _Span:
        track, begun_ns = self._tasks_of(record["pid"]), record["began_ns"]
        if record["waited_us"]:
            self._add(track, "wait for a task", begun_ns - record["waited_us"] * 1000, begun_ns)
        made_ns = begun_ns + record["made_us"] * 1000 + _CUT_NS  # so that its calls end before it, and a flow goes on
        is_made, status = record["status"] in (Status.FINISHED, Status.OVERSIZE), _STATUSES.get(record["status"], "?")
        told = {name: record[name] for name in ("slot", "ticket", "loader", "attempt")}
        rows = [record["row_start"], record["row_stop"]]
        about = {"epoch": record["epoch"], "rows": rows, **told, "publish_us": record["published_us"], "status": status}
        name = _batches(record) + ("" if is_made else f" ({status})")
        span = self._add(track, name, begun_ns, made_ns, **about)
        if record["published_us"] >= _PUBLISHING_FROM_US:
            self._add(track, "publish", made_ns, made_ns + record["published_us"] * 1000)
        if is_made:
            self._made.setdefault((place, record["run"], record["epoch"], record["batch"]), []).append(span)
        return span

    def _tell_call(self, record: _Row, ticket: _Span | None, calls_of: dict[int | None, str]) -> None:
        begun_ns, kind, track = record["began_ns"], record["kind"], self._tasks_of(record["pid"])
        ended_ns = begun_ns + record["us"] * 1000
        if kind != CallKind.CALL:
            self._add(track, _CALL_NAMES.get(kind, "call made alone"), begun_ns, ended_ns)
            return
        what = "sample"
        if ticket is not None:
            ended_ns = min(ended_ns, max(begun_ns, ticket.ended_ns - _CUT_NS // 2))
            what = "sample" if calls_of.get(ticket.told["loader"], "sample") == "sample" else "call from item"
        name = f"{what} {item_number(record['index'])}"
        span = self._add(track, name, begun_ns, ended_ns, index=record["index"], ticket=record["ticket"])
        if ticket is not None and (ticket.longest is None or span.ns > ticket.longest.ns):
            ticket.longest = span

    # -- the trainer

    def _tell_loader(self, loader: LoaderRecords) -> None:
        recording = self._recording
        is_alone, name = len(recording.loaders) == 1, loader.number or "without workers"
        steps = _Track(recording.pid, _STEPS, "steps" if is_alone else f"steps of loader {name}")
        epochs = _Track(recording.pid, _EPOCHS, "epochs" if is_alone else f"epochs {loader.number}")
        records = sorted(_rows(loader.deliveries), key=lambda each: each["handed_over_ns"])
        begin: _Row | None = None
        for record, following in zip(records, [*records[1:], None], strict=False):
            begin, is_last = begin or record, following is not None and bool(following["begins_pass"])
            until_ns = following["asked_ns"] if following else loader.asked_ns or recording.now_ns
            self._tell_delivery(steps, record, until_ns, is_last, loader.pool)
            if following is None or is_last:
                self._add(epochs, f"epoch {begin['epoch']}", begin["asked_ns"], record["handed_over_ns"])
                begin = None
        if loader.asked_ns:
            self._add(steps, "wait for data (still waiting)", loader.asked_ns, recording.now_ns)

    def _tell_delivery(self, track: _Track, record: _Row, until_ns: int, is_last: bool, pool: int | None) -> None:
        asked_ns, handed_over_ns = record["asked_ns"], record["handed_over_ns"]
        told = {name: record[name] for name in ("epoch", "batch", "count")}
        is_made_here = record["way"] == DeliveryKind.MADE_HERE
        if is_made_here:
            what, took = "make", "made_us"
        else:
            what, took = "wait for" if record["waited_us"] >= _WAITING_FROM_US else "take", "wait_us"
        asking_told = {**told, took: record["waited_us"]}
        asking = self._add(track, f"{what} {_batches(record)}", asked_ns, handed_over_ns, **asking_told)
        if record["copied_us"]:
            self._add(track, "copy out", handed_over_ns - record["copied_us"] * 1000, handed_over_ns)
        step_or_steps = "step" if record["count"] == 1 else "steps"
        name = f"{step_or_steps}: {_batches(record)}{' (last of the epoch)' * is_last}"
        way = {"way": _WAYS.get(record["way"], "?")}
        step = self._add(track, name, handed_over_ns, max(handed_over_ns, until_ns), **told, **way)
        if is_made_here or pool is None:
            return
        # From a batch's arrival on to its slot's release.
        slot = record["slot"]
        of_pool = "" if len(self._recording.pools) == 1 else f" of pool {pool + 1}"
        buffer = _Track(self._recording.pid, _BUFFERS + slot, f"buffer {slot}{of_pool}")
        arrived_ns = min(record["arrived_ns"] or handed_over_ns, handed_over_ns - 4 * _CUT_NS)  # so that it is seen
        ready = self._add(buffer, f"{_batches(record)} ready", arrived_ns, handed_over_ns, epoch=record["epoch"])
        if record["way"] == DeliveryKind.LENT:
            until_ns = self._released.get((pool, slot, record["ticket"]), self._recording.now_ns)
            in_use = f"{_batches(record)} in use"
            self._add(buffer, in_use, handed_over_ns, max(until_ns, handed_over_ns), epoch=record["epoch"])
        else:
            ready.ended_ns = handed_over_ns - 2 * _CUT_NS  # it is free before a copy is handed over
        for ticket in self._made.get((pool, record["run"], record["epoch"], record["batch"]), ()):
            ticket.told["consumed_by"] = step.name
            call = [] if ticket.longest is None else [ticket.longest]
            self.ways.append([*call, ticket, ready, asking, step])


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
    while is_open:
        last = is_open[-1]
        if last.ended_ns > span.begun_ns and span.ended_ns > last.ended_ns:
            if last.ended_ns - span.begun_ns > 2 * _CUT_NS:
                return False
            last.ended_ns = span.begun_ns
        if last.ended_ns > span.begun_ns:
            return True
        is_open.pop()
    return True


# -- how it is written


class Trace(NamedTuple):
    """A trace that can be written."""

    text: str  # JSON
    seconds: float  # how far it goes back
    events: int  # how many it has
    notes: tuple[str, ...]  # what it lacks, a sentence each
    waits: tuple[str, ...]  # which batches were waited for longest, and what took so long in them


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


def chrome_trace(recording: Recording, seconds: float | None, most_bytes: int = _MOST_BYTES) -> Trace:
    """Return the trace of the last so many seconds (None: of all that is known), or of fewer where that is too much."""
    found, now_ns = _Spans(recording), recording.now_ns
    _put_on_lanes(found.spans)
    wanted_ns = 0 if seconds is None else now_ns - int(seconds * 1e9)
    notes = list(_notes(recording, wanted_ns))
    base_ns = since_ns = max(wanted_ns, found.spans[0].begun_ns if found.spans else now_ns)
    tracks = sorted({*(span.track for span in found.spans), *(track for track, *_ in found.moments)})
    numbers = {track: number for number, track in enumerate(tracks, start=1)}
    head = [_json(event) for event in _names(found.processes, numbers)]
    timed = [(at_ns, [_json(each) for each in events]) for at_ns, events in _events(found, numbers, base_ns)]
    room = int(most_bytes * _SHARE_OF_EVENTS) - sum(len(text) + 2 for text in head)
    left_out_ns = 0  # what is over until then
    for at_ns, texts in sorted(timed, key=lambda each: -each[0]):
        room -= sum(len(text) + 2 for text in texts)
        if room < 0:
            left_out_ns = since_ns = at_ns
            break
    events = head + [text for at_ns, texts in timed if at_ns > left_out_ns for text in texts]
    held_s = (now_ns - since_ns) / 1e9
    if since_ns > base_ns:
        notes.append(
            f"the trace covers {held_s:.1f} s, not {(now_ns - base_ns) / 1e9:.1f} s: older events were left out to "
            f"keep the file below {most_bytes >> 20} MiB"
        )
    about = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": recording.wall_ns - (now_ns - base_ns),
        "loaderpool": {
            "format": _FORMAT_VERSION,
            "pid": recording.pid,
            "seconds": round(held_s, 3),
            "clock": "CLOCK_MONOTONIC, converted to CLOCK_REALTIME with the offset at the time of writing",
            "notes": notes,
        },
    }
    text = f'{json.dumps(about)[:-1]}, "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    return Trace(text, held_s, len(events), tuple(notes), tuple(_longest_waits(found, since_ns)))


def _longest_waits(found: _Spans, since_ns: int) -> Iterator[str]:
    """Yield the longest waits for a batch of which all is known, the longest first."""
    ways = {id(way[-2]): way for way in found.ways if way[0].ended_ns >= since_ns and way[-2].ns >= _LONG_NS}
    for way in sorted(ways.values(), key=lambda each: -each[-2].ns)[:_LONGEST]:
        call, wait = way[0], way[-2]
        what = f"; {call.name} took {readable_s(call.ns / 1e9)}" if len(way) > _WITHOUT_CALL else ""
        yield f"{readable_s(wait.ns / 1e9)} for batch {wait.told['batch']} of epoch {wait.told['epoch']}{what}"


def _names(processes: dict[int, str], numbers: dict[_Track, int]) -> Iterator[dict[str, Any]]:
    for place, (pid, name) in enumerate(processes.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}
    for track, number in numbers.items():
        on = {"ph": "M", "pid": track.pid, "tid": number}
        yield {**on, "name": "thread_name", "args": {"name": track.name}}
        yield {**on, "name": "thread_sort_index", "args": {"sort_index": number}}


def _events(found: _Spans, numbers: dict[_Track, int], base_ns: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield events that belong together, with the time at which the first of them is over; none is over before base."""

    def event(track: _Track, kind: str, name: str, at_ns: int, **more: Any) -> dict[str, Any]:
        at_us = (max(at_ns, base_ns) - base_ns) / 1000  # no time is below 0
        where = {"pid": track.pid, "tid": numbers[track]}
        return {**where, "ph": kind, "name": name, "cat": "loaderpool", "ts": at_us, **more}

    for span in found.spans:
        if span.ended_ns >= base_ns:
            took_us = (span.ended_ns - max(span.begun_ns, base_ns)) / 1000
            yield span.ended_ns, [event(span.track, "X", span.name, span.begun_ns, dur=took_us, args=span.told)]
    for track, name, at_ns in found.moments:
        if at_ns >= base_ns:
            yield at_ns, [event(track, "i", name, at_ns, s="t")]
    for number, way in enumerate(found.ways):
        if (first_ns := min(span.ended_ns for span in way)) >= base_ns:
            arrows, at_ns = [], base_ns
            for place, span in enumerate(way):
                # Each ends within its span and after the one before: of a ticket after its calls, of which none reaches
                # to its end; of others where they begin.
                is_ticket = place + _WITHOUT_CALL == len(way)
                at_ns = max(at_ns, span.ended_ns - 100 if is_ticket else span.begun_ns + min(100, span.ns // 2))
                kind = "s" if not place else "f" if span is way[-1] else "t"
                arrows.append(event(span.track, kind, "batch", at_ns, id=number, **({"bp": "e"} if place else {})))
            yield first_ns, arrows


def _notes(recording: Recording, since_ns: int) -> Iterator[str]:
    """Yield what the trace cannot have."""
    for what, rings in (
        ("tasks of some workers", [ring for pool in recording.pools for ring in pool.tickets]),
        ("calls of some workers", [ring for pool in recording.pools for ring in pool.calls]),
        ("releases of batch buffers", [pool.trainer for pool in recording.pools]),
        ("deliveries of some loaders", [loader.deliveries for loader in recording.loaders]),
    ):
        latest_ns = max((ring.since_ns for ring in rings), default=0)
        if latest_ns > since_ns:
            held_s = (recording.now_ns - latest_ns) / 1e9
            yield f"{what} cover only the last {held_s:.1f} s, because their record buffer was full"
    if any(loader.has_nodes for loader in recording.loaders):
        yield "workers on other nodes are not recorded: the trace has only the delivery of their batches"
    for loader in recording.loaders:
        if loader.number is None:
            yield "workers=0: batches are loaded in the main process, where single calls are not recorded"
        elif loader.pool is None and not loader.has_nodes:
            yield (
                f"the workers of loader {loader.number} could not be read: if workers are spawned, only "
                "Loader.trace() in the training script can read their records"
            )
    unrecorded = sum(pool.unrecorded for pool in recording.pools)
    if unrecorded:
        yield f"{unrecorded} workers are not recorded, because the shared memory for records is full"
