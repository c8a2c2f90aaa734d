"""Looks at a running loader: all that is counted, at a moment. Two of them tell what was measured between.

The trainer takes one every two seconds while batches are taken.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loaderpool.trainer.explain.observed import LEAST_STEPS, AboutLoader, Autotuned, Counts, Observed, Pace, Sums

# So many steps each have a look of their own: code that compiles does so in these.
FIRST_STEPS = 3
# A first step that takes the consumer so many times as long as later ones compiles, or fills caches.
COMPILES = 3
# Of the time: a start that was a smaller part of it is over, and hides what goes on now.
STARTS = 1 / 3


class WorkerCounts(NamedTuple):
    """One worker's numbers, or those of all workers of a node, since it began."""

    pid: int = 0  # 0: it is a node
    workers: int = 1
    busy_s: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    made: int = 0
    read_bytes: int = 0

    def since(self, before: WorkerCounts | None) -> WorkerCounts:
        """Return what has come since; all of it, where it is another process."""
        if before is None or before.pid != self.pid:
            return self
        return self._replace(**{name: getattr(self, name) - getattr(before, name) for name in _SUMS_OF_WORKERS})


_SUMS_OF_WORKERS = WorkerCounts._fields[2:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look(Counts):
    """All that is counted, at a moment."""

    number: int  # from 0 on
    now_ns: int  # monotonic
    by_worker: Mapping[int, WorkerCounts] = dataclasses.field(default_factory=dict)  # by their own numbers
    slots_ready: int = 0  # whose batches are finished and not taken yet
    autotuned: Autotuned = dataclasses.field(default_factory=Autotuned)

    @property
    def own_s(self) -> float:
        """How long steps took the consumer, waiting left out."""
        return self.seconds - self.wait_s


def counts_of_workers(now: Mapping[int, WorkerCounts], before: Look | None) -> dict[str, float]:
    """Return the sums of all workers that there were: those up to the look before, and what has come since."""
    earlier = {} if before is None else before.by_worker
    new = [worker.since(earlier.get(number)) for number, worker in now.items()]
    sums = {name: sum(getattr(each, name) for each in new) for name in _SUMS_OF_WORKERS}
    return {name: value + (0 if before is None else getattr(before, name)) for name, value in sums.items()}


def observed_in(looks: Sequence[Look], about: AboutLoader, seconds: float) -> Observed:
    """Return what was measured in the last so many seconds of what was looked at.

    Args:
        looks: the latest last, at least one.
        about: the loader.
        seconds: how far to go back from the latest look.
    """
    looks, has_begun = _after_compiling(looks), not looks[0].number
    last = looks[-1]
    earlier = [look for look in looks[:-1] if look.now_ns >= last.now_ns - seconds * 1e9] or list(looks[-2:-1])
    first = _first_of_one_number(earlier, last) or (earlier[0] if earlier else last)
    lent = max(look.slots_lent for look in looks if look.now_ns >= first.now_ns)
    found = {field.name: getattr(last, field.name) for field in dataclasses.fields(Counts)}
    found |= {each.name: found[each.name] - getattr(first, each.name) for each in dataclasses.fields(Sums)}
    # The first look is at the first batch. What came before is told where it is most of the waiting, and not yet past.
    start_s = last.start_s if has_begun and first is looks[0] else 0.0
    if start_s <= found["wait_s"] or start_s < STARTS * (found["seconds"] + start_s):
        start_s = 0.0
    found |= {"seconds": found["seconds"] + start_s, "wait_s": found["wait_s"] + start_s, "start_s": start_s}
    return Observed(
        **{**vars(about), **found, "calls": last.calls.since(first.calls), "slots_lent": lent},
        elapsed_s=(last.now_ns - first.now_ns) / 1e9 + start_s,
        most_workers=last.autotuned.most,
        in_vain=last.autotuned.in_vain,
        paces=tuple(_paces(looks)),
    )


def _first_of_one_number(looks: Sequence[Look], last: Look) -> Look | None:
    """Return the look from which on there were as many workers as at last; None: too short ago to tell something."""
    same = list(itertools.takewhile(lambda look: look.workers == last.workers, reversed(looks)))
    return same[-1] if same and last.steps - same[-1].steps >= LEAST_STEPS else None


def _after_compiling(looks: Sequence[Look]) -> Sequence[Look]:
    """Leave out the first steps, each of which has a look, up to the last one that took the consumer far longer."""
    after = next((number for number, look in enumerate(looks) if look.steps >= FIRST_STEPS), len(looks) - 1)
    usual_s = _own_step_s(looks[after], looks[-1])
    compiling = [at for at in range(after) if _own_step_s(looks[at], looks[at + 1]) > COMPILES * usual_s]
    return looks[max(compiling) + 1 :] if compiling and usual_s else looks


def _own_step_s(first: Look, last: Look) -> float:
    """How long the consumer takes for a step, waiting left out; 0.0: there was none."""
    return (last.own_s - first.own_s) / (last.steps - first.steps) if last.steps > first.steps else 0.0


def _paces(looks: Sequence[Look]) -> list[Pace]:
    """Return how fast each number of workers was, of those that there were lately."""
    sums: dict[int, list[float]] = collections.defaultdict(lambda: [0.0] * 4)  # seconds, CPU time, samples, steps
    for first, last in itertools.pairwise(looks):
        if first.by_worker.keys() == last.by_worker.keys():
            seconds = last.seconds - first.seconds - (last.epoch_starts_s - first.epoch_starts_s)
            new = (seconds, last.cpu_s - first.cpu_s, last.samples - first.samples, last.steps - first.steps)
            sums[first.workers] = [old + more for old, more in zip(sums[first.workers], new, strict=True)]
    return [
        Pace(workers, samples / seconds, cpu_s / max(1, samples))
        for workers, (seconds, cpu_s, samples, steps) in sorted(sums.items())
        if seconds and workers and steps >= LEAST_STEPS
    ]
