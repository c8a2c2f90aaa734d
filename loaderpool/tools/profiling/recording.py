"""What samplers have written: looks at threads, with stacks of places in the code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a function's code."""

    function: str  # with its class, where Python tells it
    file: str  # empty: it is no Python code
    line: int
    first_line: int  # of the function


Stack = tuple[Place, ...]  # from the outermost call to the innermost


@dataclasses.dataclass(frozen=True)
class Look:
    """What one thread was at, and the time that this stands for: all that has passed since the look before."""

    at_ns: int  # by the clock that all processes have
    thread: int
    stack: Stack
    lasted_ns: int
    computes: bool | None  # whether it had a CPU, or waited for one; None: that cannot be told
    wanted_ns: int | None = None  # for how long it has done so, since it began; None: that cannot be told


@dataclasses.dataclass(frozen=True)
class Recording:
    """All looks at one process."""

    pid: int
    looks: tuple[Look, ...]
    is_over: bool  # the sampler has ended as it was told to
    error: str  # why it has ended before; empty: it has not
    own_cpu_ns: int  # what looking took


def read_recordings(folder: Path) -> list[Recording]:
    """Return what samplers have written so far, in the order in which they began."""
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return [read_recording(path.read_bytes()) for path in paths]


def read_recording(data: bytes) -> Recording:
    """Return a recording from its pieces. What a process was writing when it ended is left out."""
    codes: dict[int, tuple[str, str, int]] = {}
    stacks: list[Stack] = []
    looks: list[Look] = []
    pid, is_over, error, own_cpu_ns = 0, False, "", 0
    for piece in _pieces(data):
        pid, own_cpu_ns = piece["pid"], max(own_cpu_ns, piece["own_cpu_ns"])
        is_over, error = is_over or piece["is_over"], error or piece["error"]
        codes |= {number: (name, file, line) for number, name, file, line in piece["codes"]}
        for flat in piece["stacks"]:
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            stacks.append(tuple(_place(codes[code], line) for code, line in reversed(pairs)))
        for at_ns, thread, stack, lasted_ns, computes, wanted_ns in piece["looks"]:
            computes = None if computes < 0 else bool(computes)
            looks.append(Look(at_ns, thread, stacks[stack], lasted_ns, computes, wanted_ns))
    return Recording(pid, tuple(looks), is_over, error, own_cpu_ns)


def _pieces(data: bytes) -> Iterator[dict[str, Any]]:
    whole, _, _ = data.rpartition(b"\n")
    for line in whole.splitlines():
        yield json.loads(line)


def _place(code: tuple[str, str, int], line: int) -> Place:
    name, file, first_line = code
    return Place(name.replace(".<locals>.", "."), file, line, first_line)
