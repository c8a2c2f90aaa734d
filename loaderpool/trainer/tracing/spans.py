"""What records mean: spans of time on tracks, and what led from one to the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from loaderpool.memory.recorder import CallKind, DeliveryKind, MarkKind, RingContent, Status
from loaderpool.plan.base import item_number
from loaderpool.trainer.tracing.recording import LoaderRecords, PoolRecords, Recording

# Lengths are cut to microseconds, so that what ends in truth before something begins may seem to overlap it, or not to.
_CUT_NS = 1_000
# Telling of a batch that takes less is in its ticket's numbers, and in no span.
_PUBLISHING_FROM_US = 50
# A wait below this is the time in which a batch that is there is looked up.
_WAITING_FROM_US = 50
_MADE = (Status.FINISHED, Status.OVERSIZE)
_STATUS_NAMES = {int(status): status.name.lower() for status in Status}
_DELIVERY_NAMES = {int(kind): kind.name.lower().replace("_", " ") for kind in DeliveryKind}
_CALL_NAMES: dict[int, str] = {CallKind.SETUP: "setup", CallKind.PROBE: "first sample"}
_Row = dict[str, int]  # a record, by its fields' names


class Track(NamedTuple):
    """A row of spans. A process's tracks are shown in their order."""

    pid: int
    rank: int  # from _EPOCHS on
    name: str


_EPOCHS, _STEPS, _TASKS, _RESIZES, _BUFFERS = range(5)


@dataclasses.dataclass(eq=False)
class Span:
    """Something that took time."""

    track: Track
    name: str
    begun_ns: int
    ended_ns: int
    told: dict[str, Any]
    longest: Span | None = None  # of a ticket: its longest call

    @property
    def ns(self) -> int:
        """How long it took."""
        return max(0, self.ended_ns - self.begun_ns)


class Spans:
    """All that a recording tells.

    Attributes:
        processes: names by pid.
        spans: what took time, in no order.
        ways: each the spans through which something went: a call, its ticket, its slot, the wait for it, its step.
        moments: what happened: where, what, when.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.processes: dict[int, str] = {recording.pid: f"training: {recording.command}"}
        self.spans: list[Span] = []
        self.ways: list[list[Span]] = []
        self.moments: list[tuple[Track, str, int]] = []
        self._made: dict[tuple[int, int, int, int], list[Span]] = {}  # tickets, by pool, run, epoch and batch
        self._released: dict[tuple[int, int, int], int] = {}  # when, by pool, slot, and the ticket whose work it held
        for place, pool in enumerate(recording.pools):
            self._tell_marks(place, pool)
            self._tell_workers(place, pool)
        for loader in recording.loaders:
            self._tell_loader(loader)

    def _add(self, track: Track, name: str, begun_ns: int, ended_ns: int, **told: Any) -> Span:
        self.spans.append(Span(track, name, begun_ns, ended_ns, told))
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
                self.moments.append((Track(pid, _TASKS, "tasks"), f"worker {mark['number']} {what}", mark["at_ns"]))
        for mark in _rows(pool.trainer):
            if mark["kind"] == MarkKind.WANTED:
                track = Track(self._recording.pid, _RESIZES, "resizes")
                self.moments.append((track, f"{mark['number']} workers", mark["at_ns"]))
            elif mark["kind"] == MarkKind.RELEASED:
                self._released[place, mark["number"], mark["value"]] = mark["at_ns"]

    def _tell_workers(self, place: int, pool: PoolRecords) -> None:
        calls_of = {each.number: each.calls_of for each in self._recording.loaders if each.pool == place}
        for worker in pool.workers.values():
            tickets: dict[tuple[int, int], Span] = {}
            for record in _rows(worker.tickets):
                tickets[record["pid"], record["ticket"]] = self._tell_ticket(place, record)
            for record in _rows(worker.calls):
                self._tell_call(record, tickets.get((record["pid"], record["ticket"])), calls_of)
            if worker.running is not None:
                item, items, since_ns = worker.running
                name = f"{'item' if items == 1 else f'{items} items from'} {item_number(item)} (still running)"
                self._add(self._tasks_of(worker.pid), name, since_ns, self._recording.now_ns, index=item)

    def _tasks_of(self, pid: int) -> Track:
        self.processes.setdefault(pid, "worker")  # whose start is not known any more
        return Track(pid, _TASKS, "tasks")

    def _tell_ticket(self, place: int, record: _Row) -> Span:
        track, begun_ns = self._tasks_of(record["pid"]), record["began_ns"]
        if record["waited_us"]:
            self._add(track, "wait for a task", begun_ns - record["waited_us"] * 1000, begun_ns)
        made_ns = begun_ns + record["made_us"] * 1000 + _CUT_NS  # so that its calls end before it, and a flow goes on
        is_made, status = record["status"] in _MADE, _STATUS_NAMES.get(record["status"], "?")
        span = self._add(
            track,
            _batches(record) + ("" if is_made else f" ({status})"),
            begun_ns,
            made_ns,
            epoch=record["epoch"],
            rows=[record["row_start"], record["row_stop"]],
            slot=record["slot"],
            ticket=record["ticket"],
            loader=record["loader"],
            attempt=record["attempt"],
            publish_us=record["published_us"],
            status=status,
        )
        if record["published_us"] >= _PUBLISHING_FROM_US:
            self._add(track, "publish", made_ns, made_ns + record["published_us"] * 1000)
        if is_made:
            self._made.setdefault((place, record["run"], record["epoch"], record["batch"]), []).append(span)
        return span

    def _tell_call(self, record: _Row, ticket: Span | None, calls_of: dict[int | None, str]) -> None:
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
        steps = Track(recording.pid, _STEPS, "steps" if is_alone else f"steps of loader {name}")
        epochs = Track(recording.pid, _EPOCHS, "epochs" if is_alone else f"epochs {loader.number}")
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

    def _tell_delivery(self, track: Track, record: _Row, until_ns: int, is_last: bool, pool: int | None) -> None:
        asked_ns, handed_over_ns, is_one = record["asked_ns"], record["handed_over_ns"], record["count"] == 1
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
        name = f"{'step' if is_one else 'steps'}: {_batches(record)}{' (last of the epoch)' * is_last}"
        way = _DELIVERY_NAMES.get(record["way"], "?")
        step = self._add(track, name, handed_over_ns, max(handed_over_ns, until_ns), **told, way=way)
        if is_made_here or pool is None:
            return
        slot = self._tell_slot(record, pool)
        for ticket in self._made.get((pool, record["run"], record["epoch"], record["batch"]), ()):
            ticket.told["consumed_by"] = step.name
            call = [] if ticket.longest is None else [ticket.longest]
            self.ways.append([*call, ticket, slot, asking, step])

    def _tell_slot(self, record: _Row, pool: int) -> Span:
        """Tell of the time from a batch's arrival to its slot's release; returns its first part."""
        handed_over_ns, slot = record["handed_over_ns"], record["slot"]
        of_pool = "" if len(self._recording.pools) == 1 else f" of pool {pool + 1}"
        track = Track(self._recording.pid, _BUFFERS + slot, f"buffer {slot}{of_pool}")
        arrived_ns = min(record["arrived_ns"] or handed_over_ns, handed_over_ns - 4 * _CUT_NS)  # so that it is seen
        ready = self._add(track, f"{_batches(record)} ready", arrived_ns, handed_over_ns, epoch=record["epoch"])
        if record["way"] == DeliveryKind.LENT:
            until_ns = self._released.get((pool, slot, record["ticket"]), self._recording.now_ns)
            until_ns = max(until_ns, handed_over_ns)
            self._add(track, f"{_batches(record)} in use", handed_over_ns, until_ns, epoch=record["epoch"])
        else:
            ready.ended_ns = handed_over_ns - 2 * _CUT_NS  # it is free before a copy is handed over
        return ready


def _rows(ring: RingContent) -> Iterator[_Row]:
    names = ring.records.dtype.names or ()
    for record in ring.records.tolist():
        yield dict(zip(names, record, strict=True))


def _batches(record: _Row) -> str:
    first, count = record["batch"], record["count"]
    return f"batch {first}" if count == 1 else f"batches {first} to {first + count - 1}"


def put_on_lanes(spans: list[Span]) -> None:
    """Sort spans by their beginnings, those that partly overlap on tracks of their own: viewers nest what they show.

    They are given their track's name with a number after it.
    """
    lanes: dict[Track, list[list[Span]]] = {}  # of each what is open
    spans.sort(key=lambda each: (each.begun_ns, -each.ended_ns))
    for span in spans:
        of_track = lanes.setdefault(span.track, [])
        place = next((place for place, is_open in enumerate(of_track) if _fits(span, is_open)), len(of_track))
        if place == len(of_track):
            of_track.append([])
        of_track[place].append(span)
        if place:
            span.track = span.track._replace(name=f"{span.track.name} ({place + 1})")


def _fits(span: Span, is_open: list[Span]) -> bool:
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
