"""Spans as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are in microseconds,
counted from `baseTimeNanoseconds` of the wall clock, as traces of `torch.profiler` have it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loaderpool.errors import brief, readable_s
from loaderpool.system.process import why_no_file, write_whole
from loaderpool.trainer.tracing.recording import Recording
from loaderpool.trainer.tracing.spans import Span, Spans, Track, put_on_lanes

FORMAT_VERSION = 1  # of what is told beside events; raised when a key changes its meaning or goes away
VIEWER = "https://ui.perfetto.dev"
# Viewers in a browser get slow with more. What stands before the events has the rest.
MOST_BYTES = 20 << 20
_SHARE_OF_EVENTS = 0.95
_COMPRESSED = ".gz"
_GZIP_LEVEL = 6
# Spans of a way from a ticket on: its slot, the wait, the step.
_WITHOUT_CALL = 4
# So many of the longest waits are told, if they were so long.
_LONGEST, _LONG_NS = 3, 10_000_000


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
    """Write a trace; where that fails, what stood there before still does.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode()
    if path.name.endswith(_COMPRESSED):
        data = gzip.compress(data, _GZIP_LEVEL)
    write_whole(path, data)


def chrome_trace(recording: Recording, seconds: float | None, most_bytes: int = MOST_BYTES) -> Trace:
    """Return the trace of the last so many seconds, or of fewer where that is too much.

    Args:
        recording: of a training.
        seconds: how far to look back; None: as far as is known.
        most_bytes: of the trace.
    """
    found, now_ns = Spans(recording), recording.now_ns
    put_on_lanes(found.spans)
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
            "format": FORMAT_VERSION,
            "pid": recording.pid,
            "seconds": round(held_s, 3),
            "clock": "CLOCK_MONOTONIC, converted to CLOCK_REALTIME with the offset at the time of writing",
            "notes": notes,
        },
    }
    text = f'{json.dumps(about)[:-1]}, "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    return Trace(text, held_s, len(events), tuple(notes), tuple(_longest_waits(found, since_ns)))


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"))


def _longest_waits(found: Spans, since_ns: int) -> Iterator[str]:
    """Yield the longest waits for a batch of which all is known, the longest first."""
    ways = {id(way[-2]): way for way in found.ways if way[0].ended_ns >= since_ns and way[-2].ns >= _LONG_NS}
    for way in sorted(ways.values(), key=lambda each: -each[-2].ns)[:_LONGEST]:
        call, wait = way[0], way[-2]
        what = f"; {call.name} took {readable_s(call.ns / 1e9)}" if len(way) > _WITHOUT_CALL else ""
        yield f"{readable_s(wait.ns / 1e9)} for batch {wait.told['batch']} of epoch {wait.told['epoch']}{what}"


def _names(processes: dict[int, str], numbers: dict[Track, int]) -> Iterator[dict[str, Any]]:
    for place, (pid, name) in enumerate(processes.items()):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": place}}
    for track, number in numbers.items():
        on = {"ph": "M", "pid": track.pid, "tid": number}
        yield {**on, "name": "thread_name", "args": {"name": track.name}}
        yield {**on, "name": "thread_sort_index", "args": {"sort_index": number}}


def _events(found: Spans, numbers: dict[Track, int], base_ns: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield events that belong together, with the time at which the first of them is over; none is over before base."""

    def event(track: Track, kind: str, name: str, at_ns: int, **more: Any) -> dict[str, Any]:
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
            arrows = zip(way, "s" + "t" * (len(way) - 2) + "f", _arrow_ends(way, base_ns), strict=True)
            bound = {"bp": "e"}
            yield (
                first_ns,
                [
                    event(span.track, kind, "batch", at_ns, id=number, **(bound if kind != "s" else {}))
                    for span, kind, at_ns in arrows
                ],
            )


def _arrow_ends(way: Sequence[Span], base_ns: int) -> Iterator[int]:
    """Yield when arrows from each span to the next one end: each within its span, and after the one before."""
    at_ns = base_ns
    for place, span in enumerate(way):
        # Of a ticket after its calls, of which none reaches to its end; of others where they begin.
        is_ticket = place + _WITHOUT_CALL == len(way)
        at_ns = max(at_ns, span.ended_ns - 100 if is_ticket else span.begun_ns + min(100, span.ns // 2))
        yield at_ns


def _notes(recording: Recording, since_ns: int) -> Iterator[str]:
    """Yield what the trace cannot have."""
    workers = [worker for pool in recording.pools for worker in pool.workers.values()]
    for what, rings in (
        ("tasks of some workers", [worker.tickets for worker in workers]),
        ("calls of some workers", [worker.calls for worker in workers]),
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
