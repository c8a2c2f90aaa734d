"""What a viewer makes of a trace in Chrome's format, by the rules of that format."""

from __future__ import annotations

import collections
import json
from typing import Any, NamedTuple

Event = dict[str, Any]
# Times are in microseconds with three digits behind the point; their sums are off by a part of the last one.
_ROUNDED_US = 0.0015


class Loaded(NamedTuple):
    """A trace, as it is shown.

    Attributes:
        head: what is told beside events.
        processes: names by pid.
        tracks: names by pid and tid.
        slices: of each track, by their beginnings.
        flows: by id, the slices that each leads through.
    """

    head: dict[str, Any]
    processes: dict[int, str]
    tracks: dict[tuple[int, int], str]
    slices: dict[tuple[int, int], list[Event]]
    flows: dict[int, list[Event]]

    def named(self, begin: str) -> list[Event]:
        """Return slices whose name begins so, by their beginnings."""
        found = [each for track in self.slices.values() for each in track if each["name"].startswith(begin)]
        return sorted(found, key=lambda each: each["ts"])

    def one(self, name: str) -> Event:
        """Return the slice of this name, of which there is one."""
        (found,) = [each for each in self.named(name) if each["name"] == name]
        return found

    def flows_through(self, event: Event) -> list[list[Event]]:
        """Return the flows that lead through a slice."""
        return [flow for flow in self.flows.values() if any(each is event for each in flow)]


def load(text: str) -> Loaded:
    """Return a trace as it is shown; fails where the rules are broken, so that a viewer would drop something."""
    head = json.loads(text)
    events: list[Event] = head.pop("traceEvents")
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int], list[Event]] = collections.defaultdict(list)
    arrows: dict[int, list[Event]] = collections.defaultdict(list)
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
        assert kind == "C" or isinstance(event["tid"], int)
        if kind == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        elif kind in "stf":
            arrows[event["id"]].append(event)
        else:
            assert kind == "i" and event["s"] in "tpg"
    for track, found in slices.items():
        assert track in tracks and track[0] in processes
        found.sort(key=lambda each: (each["ts"], -each["dur"]))
        _check_nesting(found)
    flows = {number: _follow(ends, slices) for number, ends in arrows.items()}
    return Loaded(head, processes, tracks, dict(slices), flows)


def _check_nesting(slices: list[Event]) -> None:
    open_ends: list[float] = []
    for each in slices:
        end = each["ts"] + each["dur"]
        while open_ends and open_ends[-1] <= each["ts"] + _ROUNDED_US:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + _ROUNDED_US, f"{each} reaches out of the slice around it"
        open_ends.append(end)


def _follow(ends: list[Event], slices: dict[tuple[int, int], list[Event]]) -> list[Event]:
    """Return the slices that a flow's arrows are bound to: the innermost one at the time of each."""
    kinds = "".join(each["ph"] for each in ends)
    assert kinds == "s" + "t" * (len(kinds) - 2) + "f", kinds
    assert [each["ts"] for each in ends] == sorted(each["ts"] for each in ends)
    assert len({(each["cat"], each["name"]) for each in ends}) == 1
    assert all(each["ph"] == "s" or each["bp"] == "e" for each in ends)
    return [_innermost(each, slices[each["pid"], each["tid"]]) for each in ends]


def _innermost(end: Event, slices: list[Event]) -> Event:
    around = [each for each in slices if each["ts"] <= end["ts"] <= each["ts"] + each["dur"] + _ROUNDED_US]
    assert around, f"an arrow that ends nowhere: {end}"
    return max(around, key=lambda each: (each["ts"], -each["dur"]))
