"""Where the time went: the looks of all workers, added up by function and by line. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from loaderpool.tools.profiling.parts import is_own, part_of
from loaderpool.tools.profiling.recording import Look, Place, Recording, Stack


@dataclasses.dataclass(frozen=True)
class SpentTime:
    """Time of a function or a line; seconds, added up over all threads that make samples."""

    function: str
    file: str  # empty: it is no Python code
    line: int  # of a function: its first
    total_s: float  # while it, or what it called, was at work
    self_s: float  # while nothing was that it called, but for code in C
    computing_s: float  # of the total: with a CPU, or waiting for one
    is_own: bool  # the user's own code, and no library's

    @property
    def waiting_s(self) -> float:
        """Of the total: without a wish for a CPU."""
        return max(0.0, self.total_s - self.computing_s)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a thread was at, in the order of time; consecutive looks at the same are one."""

    stack: Stack  # the user's part; empty: our own code
    seconds: float
    computing_s: float


@dataclasses.dataclass(frozen=True)
class ThreadSteps:
    """One thread's steps."""

    name: str
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """Where the functions of a loader spent their time."""

    window_s: float  # how long it was looked
    looks: int  # at threads that were at work
    processes: int
    busy_s: float  # what all shares are of: the threads' time, but for `idle_s`
    idle_s: float  # workers had nothing to do
    own_s: float  # loaderpool's share of `busy_s`
    own_computing_s: float
    computing_s: float  # of `busy_s`: with a CPU, or waiting for one
    looking_share: float  # CPUs that looking took in each process
    knows_cpu: bool  # whether computing was told from waiting
    functions: tuple[SpentTime, ...]  # by the time of their own, the longest first
    lines: tuple[SpentTime, ...]  # of the user's own code, by their total
    threads: tuple[ThreadSteps, ...]
    errors: tuple[str, ...]  # of samplers that have ended too soon

    @property
    def own(self) -> SpentTime:
        """The work of loaderpool itself, as if it was one function."""
        return SpentTime("loaderpool", "", 0, self.own_s, self.own_s, self.own_computing_s, is_own=False)

    def share(self, seconds: float) -> float:
        """A time as a share of all."""
        return seconds / self.busy_s if self.busy_s else 0.0


def merge(
    recordings: Sequence[Recording], since_ns: int = 0, until_ns: int | None = None, in_c: str = "", window_s: float = 0
) -> Profile:
    """Add up the looks of a span of time.

    Args:
        recordings: of each process.
        since_ns: looks before are left out.
        until_ns: looks behind are left out; None: none is.
        in_c: what to call a call of a function that has no Python code.
        window_s: how long it was looked.
    """
    functions: dict[Place, _Sum] = {}
    lines: dict[Place, _Sum] = {}
    threads: list[ThreadSteps] = []
    looks, idle_s, own_s, own_computing_s, knows_cpu = 0, 0.0, 0.0, 0.0, False
    for number, recording in enumerate(recordings):
        by_thread: dict[int, list[Step]] = {}
        for look, seconds in _weighed(recording.looks, since_ns, until_ns):
            kind, stack = part_of(look.stack, in_c)
            if kind == "other":
                continue
            if kind == "idle":
                idle_s += seconds
                continue
            looks += 1
            knows_cpu |= look.computes is not None  # of the first look at a thread it cannot be told
            computing_s = seconds if look.computes else 0.0
            _append(by_thread.setdefault(look.thread, []), Step(stack, seconds, computing_s))
            if kind == "loaderpool":
                own_s, own_computing_s = own_s + seconds, own_computing_s + computing_s
                continue
            inmost = stack[-1]
            for place in {_function(place) for place in stack}:
                functions.setdefault(place, _Sum()).add(seconds, computing_s, place == _function(inmost))
            for place in {place for place in stack if is_own(place)}:
                lines.setdefault(place, _Sum()).add(seconds, computing_s, place == inmost)
        name = f"worker {number} (pid {recording.pid})"
        for at, steps in enumerate(by_thread.values()):
            threads.append(ThreadSteps(name if len(by_thread) == 1 else f"{name}, thread {at}", tuple(steps)))
    return Profile(
        window_s=window_s,
        looks=looks,
        processes=len(recordings),
        busy_s=own_s + sum(step.seconds for thread in threads for step in thread.steps if step.stack),
        idle_s=idle_s,
        own_s=own_s,
        own_computing_s=own_computing_s,
        computing_s=sum(step.computing_s for thread in threads for step in thread.steps),
        looking_share=_looking_share(recordings),
        knows_cpu=knows_cpu,
        functions=tuple(sorted(_spent(functions), key=lambda spent: (-spent.self_s, -spent.total_s))),
        lines=tuple(sorted(_spent(lines), key=lambda spent: (-spent.total_s, -spent.self_s))),
        threads=tuple(threads),
        errors=tuple(recording.error for recording in recordings if recording.error),
    )


class _Sum:
    __slots__ = ("computing_s", "self_s", "total_s")

    def __init__(self) -> None:
        self.total_s = self.self_s = self.computing_s = 0.0

    def add(self, seconds: float, computing_s: float, is_inmost: bool) -> None:
        self.total_s += seconds
        self.computing_s += computing_s
        self.self_s += seconds * is_inmost


def _weighed(looks: Iterable[Look], since_ns: int, until_ns: int | None) -> Iterator[tuple[Look, float]]:
    """Each look of a span with the seconds that it stands for.

    Where CPUs are short, a sampler gets one when another thread begins to wait, so that too many looks are at lines
    that wait. But how long a thread computed in all is known from its clock: those looks at which it did are given that
    time in all, and the others the rest.
    """
    by_thread: dict[int, list[Look]] = {}
    for look in looks:
        if look.at_ns >= since_ns and (until_ns is None or look.at_ns <= until_ns):
            by_thread.setdefault(look.thread, []).append(look)
    for each in by_thread.values():
        factors = _factors(each)
        for look in each:
            yield look, look.lasted_ns / 1e9 * factors.get(look.computes, 1.0)


def _factors(looks: Sequence[Look]) -> dict[bool | None, float]:
    """Return by what to multiply the times of one thread's looks, of those at which it computed and of the others."""
    first, last = looks[0], looks[-1]
    seen_ns = {kind: sum(look.lasted_ns for look in looks[1:] if look.computes is kind) for kind in (True, False)}
    if first.wanted_ns is None or last.wanted_ns is None or not all(seen_ns.values()):
        return {}
    span_ns = last.at_ns - first.at_ns
    wanted_ns = min(span_ns, last.wanted_ns - first.wanted_ns)
    return {True: wanted_ns / seen_ns[True], False: (span_ns - wanted_ns) / seen_ns[False]}


def _looking_share(recordings: Sequence[Recording]) -> float:
    spans_ns = [each.looks[-1].at_ns - each.looks[0].at_ns for each in recordings if each.looks]
    return sum(each.own_cpu_ns for each in recordings) / max(1, sum(spans_ns))


def _function(place: Place) -> Place:
    return Place(place.function, place.file, place.first_line, place.first_line)


def _append(steps: list[Step], step: Step) -> None:
    if steps and steps[-1].stack == step.stack:
        latest = steps.pop()
        step = Step(step.stack, latest.seconds + step.seconds, latest.computing_s + step.computing_s)
    steps.append(step)


def _spent(sums: dict[Place, _Sum]) -> Iterable[SpentTime]:
    for place, each in sums.items():
        yield SpentTime(
            place.function, place.file, place.line, each.total_s, each.self_s, each.computing_s, is_own(place)
        )
