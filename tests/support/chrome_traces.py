"""Read a trace file by the rules of Chrome's trace format."""

from __future__ import annotations

import collections
import json
from typing import Any, NamedTuple

Event = dict[str, Any]
# Times are in microseconds with three decimals. Their sums are off by a part of the last one.
_ROUNDED_US = 0.0015


class Loaded(NamedTuple):
    """A trace as a viewer shows it.

    Attributes:
        head: all keys beside the events.
        processes: names by pid.
        tracks: names by pid and tid.
        slices: slices of each track, ordered by their starts.
    """

    head: dict[str, Any]
    processes: dict[int, str]
    tracks: dict[tuple[int, int], str]
    slices: dict[tuple[int, int], list[Event]]

    def named(self, begin: str) -> list[Event]:
        """Return slices whose name starts with this text, ordered by their starts."""
        found = [
            each
            for track in self.slices.values()
            for each in track
            if each["name"].startswith(begin)
        ]
        return sorted(found, key=lambda each: each["ts"])

    def one(self, name: str) -> Event:
        """Return the only slice with this name."""
        (found,) = [each for each in self.named(name) if each["name"] == name]
        return found


def load(text: str) -> Loaded:
    """Return a trace as a viewer shows it. Fail if it breaks a rule, because a viewer would then
    drop something.
    """
    head = json.loads(text)
    events: list[Event] = head.pop("traceEvents")
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int], list[Event]] = collections.defaultdict(list)
    for event in events:
        kind = event["ph"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str) and event["name"]
        if kind == "M":
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in tracks
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= 0
        assert kind == "X" and isinstance(event["tid"], int) and event["dur"] >= 0
        slices[event["pid"], event["tid"]].append(event)
    for track, found in slices.items():
        assert track in tracks and track[0] in processes
        found.sort(key=lambda each: (each["ts"], -each["dur"]))
        _check_nesting(found)
    return Loaded(head, processes, tracks, dict(slices))


def _check_nesting(slices: list[Event]) -> None:
    open_ends: list[float] = []
    for each in slices:
        end = each["ts"] + each["dur"]
        while open_ends and open_ends[-1] <= each["ts"] + _ROUNDED_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + _ROUNDED_US, (
            f"{each} reaches out of the slice around it"
        )
        open_ends.append(end)
