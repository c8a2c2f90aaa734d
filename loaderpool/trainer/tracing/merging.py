"""Traces of several programs on one time line.

Each is moved to the wall clock: a trace of ours and one of torch.profiler tell `baseTimeNanoseconds`, from which
their times count. JAX' and TensorFlow's profilers count theirs from `profile_start_time`, which they note in the
.xplane.pb beside the .trace.json.gz. Older ones of torch count from the beginning of that clock itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loaderpool.trainer.tracing.chrome import Trace
from loaderpool.trainer.tracing.files import read_text

# In microseconds: such a time counts from 1970, and no profiler's from its own beginning.
_SURELY_SINCE_1970_US = 1e15
_XPLANE = "*.xplane.pb"
_START = b"profile_start_time"
# Of protobuf: what a field's value is.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Field numbers of xplane.proto.
_SPACE_PLANES, _PLANE_NAMES, _PLANE_STATS, _ENTRY_VALUE = 1, 5, 6, 2
_NAME_ID, _NAME_TEXT, _STAT_NAME, _STAT_UINT64, _STAT_INT64 = 1, 2, 1, 3, 4
# Where two programs' processes have one number that are not the same process, one's get others from here on.
_FREE_PIDS = 10_000_000


_OF_PROCESSES = ("process_name", "process_labels", "process_sort_index")


class UnmergeableError(Exception):
    """Traces cannot be merged; the text is one sentence that says why."""


class _TraceFile(NamedTuple):
    path: Path
    events: list[dict[str, Any]]
    base_ns: int  # when its time 0 was, by the wall clock
    has_true_pids: bool  # and no numbers of its own
    is_ours: bool = False


def merge_traces(paths: Sequence[Path]) -> Trace:
    """Return one trace of all of them.

    Args:
        paths: of two files or more.

    Raises:
        UnmergeableError: one is no trace, or its times cannot be known.
    """
    if len(paths) < 2:
        raise UnmergeableError("there is nothing to merge: name two traces or more")
    inputs = sorted((_read(path) for path in paths), key=lambda each: not each.is_ours)  # whose names say more
    begins_ns = [each.base_ns + int(_first_us(each.events) * 1000) for each in inputs]
    ends_ns = [each.base_ns + int(_last_us(each.events) * 1000) for each in inputs]
    base_ns = min(begins_ns)
    events: list[dict[str, Any]] = []
    taken: set[Any] = set()
    notes = []
    for each in inputs:
        moved = list(_moved(each, base_ns, taken))
        taken |= {event["pid"] for event in moved if "pid" in event}
        events += moved
    for number, (begin_ns, end_ns) in enumerate(zip(begins_ns, ends_ns, strict=True)):
        others = [other for other in range(len(inputs)) if other != number]
        if not any(begins_ns[other] <= end_ns and begin_ns <= ends_ns[other] for other in others):
            notes.append(f"{inputs[number].path} has no moment in common with the others")
    head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "loaderpool": {"merged": len(inputs)}}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    text = f'{json.dumps(head)[:-1]}, "traceEvents": [\n{lines}\n]}}\n'
    return Trace(text, (max(ends_ns) - base_ns) / 1e9, len(events), tuple(notes))


def _moved(found: _TraceFile, base_ns: int, taken: set[Any]) -> Iterator[dict[str, Any]]:
    """Yield a trace's events at their time after that one; processes that are others get numbers of their own."""
    shift_us = (found.base_ns - base_ns) / 1000
    numbers: dict[Any, int] = {}
    for event in found.events:
        if "ts" in event:
            event = {**event, "ts": round(event["ts"] + shift_us, 3)}
        pid = event.get("pid")
        if pid in taken and not found.has_true_pids:
            event = {**event, "pid": numbers.setdefault(pid, _FREE_PIDS + len(taken) + len(numbers))}
        elif pid in taken and event.get("name") in _OF_PROCESSES:  # it has a name already
            continue
        yield event


def _read(path: Path) -> _TraceFile:
    try:
        found = json.loads(read_text(path))
    except OSError as error:
        raise UnmergeableError(f"{path} cannot be read: {error.strerror or 'it is damaged'}") from None
    except (EOFError, ValueError, RecursionError):
        raise UnmergeableError(f"{path} is no trace in Chrome's JSON format, compressed or not") from None
    content = {"traceEvents": found} if isinstance(found, list) else found
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise UnmergeableError(f"{path} is no trace: it has no traceEvents")
    events = [event for event in events if isinstance(event, dict) and "ph" in event]
    if not any(_has_time(event) for event in events):
        raise UnmergeableError(f"{path} has no event with a time")
    base_ns = content.get("baseTimeNanoseconds")
    if isinstance(base_ns, (int, float)):
        return _TraceFile(path, events, int(base_ns), has_true_pids=True, is_ours="loaderpool" in content)
    if _first_us(events) > _SURELY_SINCE_1970_US:
        return _TraceFile(path, events, 0, has_true_pids=True)
    return _TraceFile(path, events, _start_beside(path), has_true_pids=False)


def _start_beside(path: Path) -> int:
    """Return when a profile of JAX or TensorFlow began, in nanoseconds since 1970."""
    planes = sorted(path.parent.glob(_XPLANE))
    for each in planes:
        try:
            start_ns = next(_starts(each.read_bytes()), None)
        except (OSError, IndexError, ValueError):
            continue
        if start_ns is not None:
            return start_ns
    beside = "that beside it does not say" if planes else "there is none beside it"
    raise UnmergeableError(
        f"{path} does not say when its time 0 was: of torch.profiler it would have baseTimeNanoseconds, and of JAX or "
        f"TensorFlow a .xplane.pb in the same folder tells; {beside}"
    )


def _starts(space: bytes) -> Iterator[int]:
    """Yield what an XSpace, as JAX and TensorFlow write it, says of its profile's beginning."""
    for number, plane in _fields(space):
        if number != _SPACE_PLANES or not isinstance(plane, bytes) or _START not in plane:
            continue
        fields = list(_fields(plane))
        entries = [dict(_fields(value)) for number, value in fields if number == _PLANE_NAMES and _is_bytes(value)]
        names = [dict(_fields(entry[_ENTRY_VALUE])) for entry in entries if _ENTRY_VALUE in entry]
        wanted = {name.get(_NAME_ID) for name in names if name.get(_NAME_TEXT) == _START}
        for number, value in fields:
            if number == _PLANE_STATS and isinstance(value, bytes):
                stat = dict(_fields(value))
                start_ns = stat.get(_STAT_UINT64, stat.get(_STAT_INT64))
                if stat.get(_STAT_NAME) in wanted and isinstance(start_ns, int):
                    yield start_ns


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield a protobuf message's fields: number and value.

    Raises:
        IndexError, ValueError: it is none.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            nbytes, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            nbytes = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError("no protobuf message")
        if at + nbytes > len(message):
            raise ValueError("a protobuf message that was cut")
        yield key >> 3, message[at : at + nbytes]
        at += nbytes


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _has_time(event: dict[str, Any]) -> bool:
    return event.get("ph") != "M" and isinstance(event.get("ts"), (int, float))


def _first_us(events: Iterable[dict[str, Any]]) -> float:
    return min(float(event["ts"]) for event in events if _has_time(event))


def _last_us(events: Iterable[dict[str, Any]]) -> float:
    return max(float(event["ts"] + event.get("dur", 0)) for event in events if _has_time(event))
