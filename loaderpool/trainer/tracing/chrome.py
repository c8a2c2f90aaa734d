"""Spans as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in microseconds,
counted from `baseTimeNanoseconds` of the wall clock, as traces of `torch.profiler` have it.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loaderpool.errors import brief, readable_s
from loaderpool.memory.recorder import RingContent
from loaderpool.system.process import why_no_file, write_whole
from loaderpool.trainer.tracing.recording import Recording
from loaderpool.trainer.tracing.spans import Span, Spans, Track, find_spans, on_lanes

_COMPRESSED = ".gz"
_GZIP_LEVEL = 6


def check_trace_path(path: Path) -> str:
    """Return why no trace can be written there, as an answer to "path is ..."; "": it can be."""
    if problem := why_no_file(path, "trace.json"):
        return problem
    if not path.name.endswith((".json", f".json{_COMPRESSED}")):
        return f"{brief(str(path))} must end in .json or .json.gz"
    return ""


def write_trace(path: Path, text: str) -> None:
    """Write a trace; where that fails, what stood there before still does.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode()
    if path.name.endswith(_COMPRESSED):
        data = gzip.compress(data, _GZIP_LEVEL)
    write_whole(path, data)


FORMAT_VERSION = 1  # of what is told beside events; raised when a key changes its meaning or goes away
CATEGORY = "loaderpool"
VIEWER = "https://ui.perfetto.dev"
# Viewers in a browser get slow with more.
MOST_BYTES = 20 << 20
_FIT_AGAIN = 8
# Spans of a way from a ticket on: its slot, the wait, the step.
_WITHOUT_CALL = 4
# So many of the longest waits are told, if they were so long.
_LONGEST, _LONG_NS = 3, 10_000_000
_SHARE_THAT_FITS = 0.95


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace that can be written.

    Attributes:
        text: JSON.
        seconds: how far it goes back.
        events: how many it has.
        notes: what it lacks, a sentence each.
        waits: which batches were waited for longest, and what took so long in them.
    """

    text: str
    seconds: float
    events: int
    notes: tuple[str, ...]
    waits: tuple[str, ...] = ()


def chrome_trace(recording: Recording, seconds: float | None, most_bytes: int = MOST_BYTES) -> Trace:
    """Return the trace of the last so many seconds, or of fewer where that is too much.

    Args:
        recording: of a training.
        seconds: how far to look back; None: as far as is known.
        most_bytes: of the trace.
    """
    found = find_spans(recording)
    found.spans = on_lanes(found.spans)
    begun_ns = min((span.begun_ns for span in found.spans), default=recording.now_ns)
    wanted_ns = 0 if seconds is None else recording.now_ns - int(seconds * 1e9)
    notes = list(_notes(recording, wanted_ns))
    since_ns = wanted_ns = max(begun_ns, wanted_ns)
    for _ in range(_FIT_AGAIN):
        timed = [(at_ns, json.dumps(event, separators=(",", ":"))) for at_ns, event in _events(found, since_ns)]
        room = int(most_bytes * _SHARE_THAT_FITS)
        if sum(len(text) + 1 for _, text in timed) <= room:
            break
        since_ns = max(since_ns + 1, _since_that_fits(timed, room))
    held_s = (recording.now_ns - since_ns) / 1e9
    if since_ns > wanted_ns:
        wanted_s = (recording.now_ns - wanted_ns) / 1e9
        notes.append(
            f"the trace covers {held_s:.1f} s, not {wanted_s:.1f} s: older events were left out to keep the file below "
            f"{most_bytes >> 20} MiB"
        )
    head = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": recording.wall_ns - (recording.now_ns - since_ns),
        "loaderpool": {
            "format": FORMAT_VERSION,
            "pid": recording.pid,
            "seconds": round(held_s, 3),
            "clock": "CLOCK_MONOTONIC, converted to CLOCK_REALTIME with the offset at the time of writing",
            "notes": notes,
        },
    }
    begin = json.dumps(head)[:-1]
    text = f'{begin}, "traceEvents": [\n' + ",\n".join(text for _, text in timed) + "\n]}\n"
    return Trace(text, held_s, len(timed), tuple(notes), tuple(_longest_waits(found, since_ns)))


def _longest_waits(found: Spans, since_ns: int) -> Iterator[str]:
    """Yield the longest waits for a batch of which all is known, the longest first."""
    ways = {id(way[-2]): way for way in found.ways if way[0].ended_ns >= since_ns and _length(way[-2]) >= _LONG_NS}
    for way in sorted(ways.values(), key=lambda each: -_length(each[-2]))[:_LONGEST]:
        call, wait = way[0], way[-2]
        what = f"; {call.name} took {_seconds(call)}" if len(way) > _WITHOUT_CALL else ""
        yield f"{_seconds(wait)} for batch {wait.told['batch']} of epoch {wait.told['epoch']}{what}"


def _seconds(span: Span) -> str:
    return readable_s(_length(span) / 1e9)


def _since_that_fits(timed: Sequence[tuple[int, str]], room: int) -> int:
    """Return from when on events have room; those of no time stay."""
    room -= sum(len(text) + 1 for at_ns, text in timed if not at_ns)
    for at_ns, text in sorted((each for each in timed if each[0]), reverse=True):
        room -= len(text) + 1
        if room < 0:
            return at_ns + 1
    return 0


def _events(found: Spans, since_ns: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield events, each with the time at which it is over; 0: it is of none."""
    spans = [span for span in found.spans if span.ended_ns >= since_ns]
    moments = [moment for moment in found.moments if moment.at_ns >= since_ns]
    tracks = _tracks([*(span.track for span in spans), *(moment.track for moment in moments)])
    yield from ((0, event) for event in _names(found.processes, tracks))
    for span in spans:
        yield span.ended_ns, {**_on(tracks, span.track), **_span(span, since_ns)}
    for moment in moments:
        event = {"ph": "i", "s": "t", "name": moment.name, "cat": CATEGORY, "ts": _us(moment.at_ns - since_ns)}
        yield moment.at_ns, {**_on(tracks, moment.track), **event}
    for number, way in enumerate(found.ways):
        if all(span.ended_ns >= since_ns for span in way):
            yield from _flow(number, way, tracks, since_ns)


def _tracks(tracks: Iterable[Track]) -> dict[Track, int]:
    """Return a number for each track, which is its thread's; a process's first ones are where most happens."""
    ordered = sorted(set(tracks), key=lambda each: (each.pid, _rank(each.name), each.name))
    return {track: number for number, track in enumerate(ordered, start=1)}


def _rank(name: str) -> tuple[int, int]:
    """Return where a track stands in its process."""
    kinds = ("epochs", "steps", "tasks", "resizes", "buffer")
    kind = next((place for place, kind in enumerate(kinds) if name.startswith(kind)), len(kinds))
    digits = "".join(itertools.takewhile(str.isdigit, name.partition(" ")[2]))
    return kind, int(digits or 0)


def _names(processes: dict[int, str], tracks: dict[Track, int]) -> Iterator[dict[str, Any]]:
    for place, (pid, name) in enumerate(processes.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}
    for track, number in tracks.items():
        on = {"pid": track.pid, "tid": number}
        yield {"ph": "M", **on, "name": "thread_name", "args": {"name": track.name}}
        yield {"ph": "M", **on, "name": "thread_sort_index", "args": {"sort_index": number}}


def _on(tracks: dict[Track, int], track: Track) -> dict[str, Any]:
    return {"pid": track.pid, "tid": tracks[track]}


def _span(span: Span, since_ns: int) -> dict[str, Any]:
    begun_ns = max(span.begun_ns, since_ns)  # no time is below 0
    return {
        "ph": "X",
        "name": span.name,
        "cat": CATEGORY,
        "ts": _us(begun_ns - since_ns),
        "dur": _us(span.ended_ns - begun_ns),
        "args": span.told,
    }


def _flow(
    number: int, way: Sequence[Span], tracks: dict[Track, int], since_ns: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield arrows from each span to the next one; each end lies within its span, and behind the one before."""
    at_ns = since_ns
    for place, span in enumerate(way):
        # Of a ticket behind its calls, of which none reaches to its end; of others where they begin.
        is_ticket = place + _WITHOUT_CALL == len(way)
        wanted_ns = span.ended_ns - 100 if is_ticket else span.begun_ns + min(100, _length(span) // 2)
        at_ns = max(at_ns, wanted_ns)
        kind = "s" if place == 0 else "f" if place == len(way) - 1 else "t"
        event = {"ph": kind, "id": number, "name": "batch", "cat": CATEGORY, "ts": _us(at_ns - since_ns)}
        if kind != "s":
            event["bp"] = "e"
        yield at_ns, {**_on(tracks, span.track), **event}


def _length(span: Span) -> int:
    return max(0, span.ended_ns - span.begun_ns)


def _us(ns: int) -> float:
    return ns / 1000


def _notes(recording: Recording, since_ns: int) -> Iterator[str]:
    """Yield what the trace cannot have."""
    for what, rings in _rings(recording):
        latest_ns = max((ring.since_ns for ring in rings), default=0)
        if latest_ns > since_ns:
            held_s = (recording.now_ns - latest_ns) / 1e9
            yield f"{what} cover only the last {held_s:.1f} s, because their record buffer was full"
    if any(loader.has_hosts for loader in recording.loaders):
        yield "workers on other nodes are not recorded: the trace has only the delivery of their batches"
    for loader in recording.loaders:
        if loader.number is None:
            yield "workers=0: batches are loaded in the main process, where single calls are not recorded"
        elif loader.pool is None and not loader.has_hosts:
            yield (
                f"the workers of loader {loader.number} could not be read: if workers are spawned, only "
                "Loader.trace() in the training script can read their records"
            )
    unrecorded = sum(pool.unrecorded for pool in recording.pools)
    if unrecorded:
        yield f"{unrecorded} workers are not recorded, because the shared memory for records is full"


def _rings(recording: Recording) -> Iterator[tuple[str, list[RingContent]]]:
    workers = [worker for pool in recording.pools for worker in pool.workers.values()]
    yield "tasks of some workers", [worker.tickets for worker in workers]
    yield "calls of some workers", [worker.calls for worker in workers]
    yield "releases of batch buffers", [pool.trainer for pool in recording.pools]
    yield "deliveries of some loaders", [loader.deliveries for loader in recording.loaders]
