"""What records mean: spans of time on tracks, and what led from one to the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from loaderpool.memory.recorder import CallKind, DeliveryKind, MarkKind, RingContent
from loaderpool.plan.generator_positions import item_number
from loaderpool.trainer.tracing.recording import LoaderRecords, PoolRecords, Recording
from loaderpool.transport.messages import Status

_NEVER_NS = 1 << 63


class Life(NamedTuple):
    """One worker."""

    number: int
    pid: int
    ended_ns: int  # or later than all


class CellWorkers:
    """The workers of a pool, as its supervisors have told of them.

    Args:
        pool: its records.
    """

    def __init__(self, pool: PoolRecords) -> None:
        self._by_cell: dict[int, list[Life]] = {}
        names = pool.supervisor.records.dtype.names or ()
        for values in pool.supervisor.records.tolist():
            mark = dict(zip(names, values, strict=True))
            kind, at_ns = mark["kind"], mark["at_ns"]
            if kind == MarkKind.SUPERVISOR:  # with the one before it all of its workers have ended
                for lives in self._by_cell.values():
                    self._end(lives, at_ns)
            elif kind in (MarkKind.STARTED, MarkKind.ENDED):
                lives = self._by_cell.setdefault(mark["cell"], [])
                self._end(lives, at_ns)
                if kind == MarkKind.STARTED:
                    lives.append(Life(mark["number"], mark["value"], _NEVER_NS))
                elif not lives:  # its beginning is not known any more
                    lives.append(Life(mark["number"], mark["value"], at_ns))
        for cell, worker in pool.workers.items():
            lives = self._by_cell.setdefault(cell, [])
            if not lives:
                lives.append(Life(cell, worker.pid, _NEVER_NS))

    @staticmethod
    def _end(lives: list[Life], at_ns: int) -> None:
        if lives and lives[-1].ended_ns == _NEVER_NS:
            lives[-1] = lives[-1]._replace(ended_ns=at_ns)

    def __iter__(self) -> Iterator[Life]:
        for lives in self._by_cell.values():
            yield from lives

    def of(self, cell: int) -> list[Life]:
        """Return those that had this cell, one after the other."""
        return self._by_cell.get(cell, [])

    def at(self, cell: int, at_ns: int) -> Life:
        """Return the one that had this cell then. A worker may do something before its start is noted."""
        lives = self._by_cell[cell]
        return next((life for life in lives if at_ns < life.ended_ns), lives[-1])


# Lengths are cut to microseconds, so that what ends in truth before something begins may seem to overlap it, or not to.
_CUT_NS = 1_000
# Telling of a batch that takes less is in its ticket's numbers, and in no span.
_PUBLISHING_FROM_US = 50
# A wait below this is the time in which a batch that is there is looked up.
_WAITING_FROM_US = 50
_MADE = (Status.FINISHED, Status.OVERSIZE)
_STATUS_NAMES = {int(status): status.name.lower() for status in Status}
_DELIVERY_NAMES = {int(kind): kind.name.lower().replace("_", " ") for kind in DeliveryKind}
_CALL_NAMES: dict[int, str] = {CallKind.SETUP: "setup", CallKind.PROBE: "first sample", CallKind.EARLY: "early call"}


class Track(NamedTuple):
    """A row of spans."""

    pid: int
    name: str


@dataclasses.dataclass(eq=False)
class Span:
    """Something that took time."""

    track: Track
    name: str
    begun_ns: int
    ended_ns: int
    told: dict[str, Any] = dataclasses.field(default_factory=dict)


class Moment(NamedTuple):
    """Something that happened."""

    track: Track
    name: str
    at_ns: int


@dataclasses.dataclass
class Spans:
    """All that is known, in no order.

    Attributes:
        processes: names by pid.
        spans: what took time.
        ways: each the spans through which something went: a call, its ticket, its slot, the wait for it, its step.
        moments: what happened.
    """

    processes: dict[int, str] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    ways: list[list[Span]] = dataclasses.field(default_factory=list)
    moments: list[Moment] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _TicketSpan:
    """A ticket that is over, and the longest of its calls."""

    span: Span
    slot: int
    published_ns: int
    longest: Span | None = None


_Key = tuple[int, int, int, int]  # pool, run, epoch, batch


class _SpanMaker:
    """Finds the spans of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self.found = recording, Spans()
        self._made: dict[_Key, list[_TicketSpan]] = {}
        self._calls_of = {
            (each.pool, each.number): each.calls_of for each in recording.loaders if each.number is not None
        }

    def tell(self) -> Spans:
        recording, found = self._recording, self.found
        found.processes[recording.pid] = f"training: {recording.command}"
        for place, pool in enumerate(recording.pools):
            self._tell_workers(place, pool)
        released = [_releases(pool) for pool in recording.pools]
        for loader in recording.loaders:
            self._tell_loader(loader, released)
        return found

    # ---- workers ----

    def _tell_workers(self, place: int, pool: PoolRecords) -> None:
        now_ns = self._recording.now_ns
        lives = CellWorkers(pool)
        for life in lives:
            self.found.processes[life.pid] = f"worker {life.number}"
        for mark in _rows(pool.supervisor):
            kind, pid = mark["kind"], mark["value"]
            if kind == MarkKind.SUPERVISOR:
                self.found.processes.setdefault(pid, "supervisor")
            elif kind in (MarkKind.STARTED, MarkKind.ENDED):
                what = "starts" if kind == MarkKind.STARTED else "has ended"
                self._note(Track(pid, "tasks"), f"worker {mark['number']} {what}", mark["at_ns"])
        for mark in _rows(pool.trainer):
            if mark["kind"] == MarkKind.WANTED:
                self._note(Track(self._recording.pid, "resizes"), f"{mark['number']} workers", mark["at_ns"])
        for cell, worker in pool.workers.items():
            tickets = {life: {} for life in lives.of(cell)}  # type: dict[Life, dict[int, _TicketSpan]]
            for record in _rows(worker.tickets):
                life = lives.at(cell, record["began_ns"])
                tickets.setdefault(life, {})[record["ticket"]] = self._tell_ticket(place, life, record)
            for record in _rows(worker.calls):
                life = lives.at(cell, record["began_ns"])
                self._tell_call(place, life, record, tickets.get(life, {}).get(record["ticket"]))
            if worker.running is not None:
                item, items, since_ns = worker.running
                what = "item" if items == 1 else f"{items} items from"
                track = Track(lives.at(cell, now_ns).pid, "tasks")
                self._add(track, f"{what} {item_number(item)} (still running)", since_ns, now_ns, index=item)

    def _tell_ticket(self, place: int, life: Life, record: dict[str, int]) -> _TicketSpan:
        track, begun_ns = Track(life.pid, "tasks"), record["began_ns"]
        if record["waited_us"]:
            waited_ns = record["waited_us"] * 1000
            self._add(track, "wait for a task", begun_ns - waited_ns, begun_ns)
        made_ns = begun_ns + record["made_us"] * 1000 + _CUT_NS  # so that its calls end before it, and a flow goes on
        published_ns = made_ns + record["published_us"] * 1000
        status = _STATUS_NAMES.get(record["status"], "?")
        span = self._add(
            track,
            _batches(record["batch"], record["count"]) + ("" if record["status"] in _MADE else f" ({status})"),
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
            self._add(track, "publish", made_ns, published_ns)
        made = _TicketSpan(span, record["slot"], published_ns)
        if record["status"] in _MADE:
            key = (place, record["run"], record["epoch"], record["batch"])
            self._made.setdefault(key, []).append(made)
        return made

    def _tell_call(self, place: int, life: Life, record: dict[str, int], made: _TicketSpan | None) -> None:
        begun_ns, kind = record["began_ns"], record["kind"]
        ended_ns = begun_ns + record["us"] * 1000
        track = Track(life.pid, "tasks")
        if kind != CallKind.CALL:
            self._add(track, _CALL_NAMES.get(kind, "call made alone"), begun_ns, ended_ns)
            return
        calls_of = "sample"
        if made is not None:
            ended_ns = min(ended_ns, max(begun_ns, made.span.ended_ns - _CUT_NS // 2))
            calls_of = self._calls_of.get((place, made.span.told["loader"]), calls_of)
        name = f"{'sample' if calls_of == 'sample' else 'call from item'} {item_number(record['index'])}"
        span = self._add(track, name, begun_ns, ended_ns, index=record["index"], ticket=record["ticket"])
        if made is not None and (made.longest is None or _length(span) > _length(made.longest)):
            made.longest = span

    # ---- the trainer ----

    def _tell_loader(self, loader: LoaderRecords, released: list[dict[tuple[int, int], int]]) -> None:
        recording = self._recording
        name = "steps" if len(recording.loaders) == 1 else f"steps of loader {loader.number or 'without workers'}"
        track = Track(recording.pid, name)
        records = sorted(_rows(loader.deliveries), key=lambda each: each["handed_over_ns"])
        nexts = [*records[1:], None]
        for record, following in zip(records, nexts, strict=False):
            until_ns = following["asked_ns"] if following else loader.asked_ns or recording.now_ns
            is_last = bool(following and following["begins_pass"])
            self._tell_delivery(track, record, until_ns, is_last, loader, released)
        if loader.asked_ns:
            self._add(track, "wait for data (still waiting)", loader.asked_ns, recording.now_ns)
        self._tell_passes(loader, records)

    def _tell_delivery(
        self,
        track: Track,
        record: dict[str, int],
        until_ns: int,
        is_last: bool,
        loader: LoaderRecords,
        released: list[dict[tuple[int, int], int]],
    ) -> None:
        asked_ns, handed_over_ns = record["asked_ns"], record["handed_over_ns"]
        batches = _batches(record["batch"], record["count"])
        told = {"epoch": record["epoch"], "batch": record["batch"], "count": record["count"]}
        is_made_here = record["way"] == DeliveryKind.MADE_HERE
        if is_made_here:
            made_us = record["waited_us"]
            what = "make" if record["count"] == 1 else "make and take"
            asking = self._add(track, f"{what} {batches}", asked_ns, handed_over_ns, **told, made_us=made_us)
        else:
            waited_us = record["waited_us"]
            what = "wait for" if waited_us >= _WAITING_FROM_US else "take"
            asking = self._add(track, f"{what} {batches}", asked_ns, handed_over_ns, **told, wait_us=waited_us)
        if record["copied_us"]:
            self._add(track, "copy out", handed_over_ns - record["copied_us"] * 1000, handed_over_ns)
        step = self._add(
            track,
            ("step: " if record["count"] == 1 else "steps: ") + batches + (" (last of the epoch)" if is_last else ""),
            handed_over_ns,
            max(handed_over_ns, until_ns),
            **told,
            way=_DELIVERY_NAMES.get(record["way"], "?"),
        )
        if is_made_here or loader.pool is None:
            return
        slot = self._tell_slot(record, loader.pool, released[loader.pool])
        key = (loader.pool, record["run"], record["epoch"], record["batch"])
        for made in self._made.get(key, ()):
            made.span.told["consumed_by"] = step.name
            way = [each for each in (made.longest, made.span) if each is not None]
            self.found.ways.append([*way, slot, asking, step])

    def _tell_slot(self, record: dict[str, int], pool: int, released: dict[tuple[int, int], int]) -> Span:
        """Tell of the time from a batch's arrival to its slot's release; returns its first part."""
        handed_over_ns, slot = record["handed_over_ns"], record["slot"]
        name = f"buffer {slot}" if len(self._recording.pools) == 1 else f"buffer {slot} of pool {pool + 1}"
        track = Track(self._recording.pid, name)
        batches = _batches(record["batch"], record["count"])
        arrived_ns = min(record["arrived_ns"] or handed_over_ns, handed_over_ns - 4 * _CUT_NS)  # so that it is seen
        ready = self._add(track, f"{batches} ready", arrived_ns, handed_over_ns, epoch=record["epoch"])
        if record["way"] == DeliveryKind.LENT:
            until_ns = released.get((slot, record["ticket"]), self._recording.now_ns)
            self._add(track, f"{batches} in use", handed_over_ns, max(until_ns, handed_over_ns), epoch=record["epoch"])
        else:
            ready.ended_ns = handed_over_ns - 2 * _CUT_NS  # it is free before a copy is handed over
        return ready

    def _tell_passes(self, loader: LoaderRecords, records: list[dict[str, int]]) -> None:
        track = Track(self._recording.pid, "epochs" if len(self._recording.loaders) == 1 else f"epochs {loader.number}")
        begin: dict[str, int] | None = None
        for record, following in zip(records, [*records[1:], None], strict=False):
            begin = begin or record
            if following is None or following["begins_pass"]:
                self._add(track, f"epoch {begin['epoch']}", begin["asked_ns"], record["handed_over_ns"])
                begin = None

    def _add(self, track: Track, name: str, begun_ns: int, ended_ns: int, **told: Any) -> Span:
        span = Span(track, name, begun_ns, ended_ns, told)
        self.found.spans.append(span)
        return span

    def _note(self, track: Track, name: str, at_ns: int) -> None:
        self.found.moments.append(Moment(track, name, at_ns))


def find_spans(recording: Recording) -> Spans:
    """Return what happened, as far as it was recorded."""
    return _SpanMaker(recording).tell()


def _releases(pool: PoolRecords) -> dict[tuple[int, int], int]:
    """Return when each slot was free again, by slot and the ticket whose work it held."""
    marks = (mark for mark in _rows(pool.trainer) if mark["kind"] == MarkKind.RELEASED)
    return {(mark["number"], mark["value"]): mark["at_ns"] for mark in marks}


def _rows(ring: RingContent) -> Iterator[dict[str, int]]:
    names = ring.records.dtype.names or ()
    for record in ring.records.tolist():
        yield dict(zip(names, record, strict=True))


def _batches(first: int, count: int) -> str:
    return f"batch {first}" if count == 1 else f"batches {first} to {first + count - 1}"


def _length(span: Span) -> int:
    return span.ended_ns - span.begun_ns


def on_lanes(spans: Iterable[Span]) -> list[Span]:
    """Return spans by their beginnings, those that partly overlap on tracks of their own: viewers nest what they show.

    They are given their track's name with a number behind it.
    """
    lanes: dict[Track, list[list[Span]]] = {}  # of each what is open
    found = sorted(spans, key=lambda each: (each.begun_ns, -each.ended_ns))
    for span in found:
        of_track = lanes.setdefault(span.track, [])
        place = next((place for place, is_open in enumerate(of_track) if _fits(span, is_open)), len(of_track))
        if place == len(of_track):
            of_track.append([])
        of_track[place].append(span)
        if place:
            span.track = Track(span.track.pid, f"{span.track.name} ({place + 1})")
    return found


def _fits(span: Span, is_open: list[Span]) -> bool:
    """Whether a span lies behind or within the last of those that are open at its beginning; others are closed."""
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
