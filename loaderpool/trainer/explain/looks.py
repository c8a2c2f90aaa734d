"""Looks at a running loader: all that is counted, at a moment. Two of them tell what was measured between.

The trainer takes one every two seconds while batches are taken.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from loaderpool.memory.call_times import CallTimes
from loaderpool.trainer.explain.observed import COMPILES, FIRST_STEPS, LEAST_STEPS, STARTS, Autotuned, Observed, Pace


class WorkerCounts(NamedTuple):
    """One worker's numbers, or those of all workers of a host, since it began."""

    pid: int  # 0: it is a host
    workers: int
    busy_ns: int  # at tickets
    idle_ns: int  # waiting for one
    cpu_s: float
    queued_s: float  # runnable, without a CPU
    samples: int = 0  # made, for all loaders of the pool
    read_bytes: int = 0  # from disks

    def since(self, before: WorkerCounts | None) -> WorkerCounts:
        """Return what has come since; what the kernel counts begins at 0 with each process."""
        if before is None:
            return self
        is_same = before.pid == self.pid
        cpu_s, queued_s = (before.cpu_s, before.queued_s) if is_same else (0.0, 0.0)
        return WorkerCounts(
            self.pid,
            self.workers,
            self.busy_ns - before.busy_ns,
            self.idle_ns - before.idle_ns,
            self.cpu_s - cpu_s,
            self.queued_s - queued_s,
            self.samples - before.samples,
            self.read_bytes - (before.read_bytes if is_same else 0),
        )


class WorkCounts(NamedTuple):
    """Workers' numbers, by their own, and the ring's; as they stand here, those of a loader that has neither."""

    workers: dict[int, WorkerCounts] = {}  # noqa: RUF012  # never written to
    calls: CallTimes = CallTimes()
    slots: int = 0  # that there may be
    slots_lent: int = 0
    slots_wanted: int = 0  # that there would be, were memory no limit
    slot_bytes: int = 0
    copied: int = 0  # batches copied out, as too few slots were free to lend one
    copied_ns: int = 0  # that this took the consumer
    slots_ready: int = 0  # whose batches are finished and not taken yet
    load_s: float = 0.0

    @property
    def worker_count(self) -> int:
        """How many workers there are, those of hosts too."""
        return sum(worker.workers for worker in self.workers.values())


class StepCounts(NamedTuple):
    """Sums since the loader was made. A step is the time from one batch's hand-over to the next one's."""

    steps: int = 0
    steps_ns: int = 0
    wait_ns: int = 0  # of `steps_ns`: for data
    ready_steps: int = 0  # whose batch was there when it was asked for
    ready_steps_ns: int = 0
    epochs: int = 0  # that have begun, the first one not among them
    epoch_starts_ns: int = 0  # waits for the first batches of these
    start_ns: int = 0  # the wait for the very first batch


class MachineCounts(NamedTuple):
    """CPU time, in seconds."""

    all_cpu_s: float  # of all processes of the machine
    trainer_cpu_s: float  # of the consumer's process
    trainer_queued_s: float  # the consumer's thread could have run, and had no CPU
    throttled_s: float  # the cgroup's limit held processes back


class Look(NamedTuple):
    """All that is counted, at a moment."""

    number: int  # from 0 on
    now_ns: int  # monotonic
    steps: StepCounts
    samples: int
    nbytes: int
    work: WorkCounts
    machine: MachineCounts
    by_tf_data: bool = False  # the consumer takes batches through `as_dataset`
    autotuned: Autotuned = Autotuned()
    room_bytes: int = 0  # memory that is free for what later epochs may read again; 0: none comes, or it is not known


class AboutLoader(NamedTuple):
    """What does not change while it runs."""

    threads: int  # of each worker
    can_have_threads: bool
    calls_of: str  # "sample" or "batch": what a call of the function makes
    can_have_cache: bool
    deterministic: bool
    is_stream: bool
    cpus: float  # that may be used
    machine_cpus: float  # that there are
    lanes: int = 0  # generators that run at once, each in one worker; 0: there are none
    items: int = 0  # of an epoch; 0: not known


def observed_in(looks: Sequence[Look], about: AboutLoader, seconds: float) -> Observed:
    """Return what was measured in the last so many seconds of what was looked at.

    Args:
        looks: the latest last, at least one.
        about: the loader.
        seconds: how far to go back from the latest look.
    """
    looks, has_begun = _behind_compiling(looks), not looks[0].number
    last = looks[-1]
    earlier = [look for look in looks[:-1] if look.now_ns >= last.now_ns - seconds * 1e9] or list(looks[-2:-1])
    first = _first_of_one_number(earlier, last) or (earlier[0] if earlier else last)
    observed = _between(first, last, about, last.steps.start_ns if has_begun and first is looks[0] else 0)
    lent = max(look.work.slots_lent for look in looks if look.now_ns >= first.now_ns)
    return dataclasses.replace(observed, paces=_paces(looks), slots_lent=lent)


def _first_of_one_number(looks: Sequence[Look], last: Look) -> Look | None:
    """Return the look from which on there were as many workers as at last; None: too short ago to tell something."""
    count = last.work.worker_count
    same = list(itertools.takewhile(lambda look: look.work.worker_count == count, reversed(looks)))
    return same[-1] if same and last.steps.steps - same[-1].steps.steps >= LEAST_STEPS else None


def _behind_compiling(looks: Sequence[Look]) -> Sequence[Look]:
    """Leave out the first steps, each of which has a look, up to the last one that took the consumer far longer."""
    behind = next((number for number, look in enumerate(looks) if look.steps.steps >= FIRST_STEPS), len(looks) - 1)
    usual_s = _own_s(looks[behind], looks[-1])
    compiling = [number for number in range(behind) if _own_s(looks[number], looks[number + 1]) > COMPILES * usual_s]
    return looks[max(compiling) + 1 :] if compiling and usual_s else looks


def _own_s(first: Look, last: Look) -> float:
    """How long the consumer takes for a step, waiting left out; 0.0: there was none."""
    before, now = first.steps, last.steps
    own_ns = now.steps_ns - before.steps_ns - (now.wait_ns - before.wait_ns)
    return own_ns / 1e9 / (now.steps - before.steps) if now.steps > before.steps else 0.0


def _between(first: Look, last: Look, about: AboutLoader, start_ns: int) -> Observed:
    before, now, work = first.steps, last.steps, last.work
    workers = [worker.since(first.work.workers.get(number)) for number, worker in work.workers.items()]
    edges_ns = now.epoch_starts_ns - before.epoch_starts_ns
    wait_ns = now.wait_ns - before.wait_ns + edges_ns
    # The first look is at the first batch. What came before is told where it is most of the waiting, and not yet past.
    steps_ns = now.steps_ns - before.steps_ns
    if start_ns <= wait_ns or start_ns < STARTS * (steps_ns + edges_ns + start_ns):
        start_ns = 0
    calls = work.calls.since(first.work.calls)
    return Observed(
        seconds=(steps_ns + edges_ns + start_ns) / 1e9,
        steps=now.steps - before.steps,
        samples=last.samples - first.samples,
        bytes=last.nbytes - first.nbytes,
        wait_s=(wait_ns + start_ns) / 1e9,
        ready_steps=now.ready_steps - before.ready_steps,
        ready_steps_s=(now.ready_steps_ns - before.ready_steps_ns) / 1e9,
        start_s=start_ns / 1e9,
        epochs=now.epochs - before.epochs,
        epoch_starts_s=edges_ns / 1e9,
        workers=work.worker_count,
        threads=about.threads,
        can_have_threads=about.can_have_threads,
        made=sum(worker.samples for worker in workers),
        busy_s=sum(worker.busy_ns for worker in workers) / 1e9,
        idle_s=sum(worker.idle_ns for worker in workers) / 1e9,
        cpu_s=sum(worker.cpu_s for worker in workers),
        queued_s=sum(worker.queued_s for worker in workers),
        calls=calls,
        calls_of=about.calls_of,
        can_have_cache=about.can_have_cache,
        items=about.items,
        room_bytes=last.room_bytes,
        deterministic=about.deterministic,
        elapsed_s=(last.now_ns - first.now_ns + start_ns) / 1e9,
        cpus=about.cpus,
        machine_cpus=about.machine_cpus,
        machine_cpu_s=last.machine.all_cpu_s - first.machine.all_cpu_s,
        trainer_cpu_s=last.machine.trainer_cpu_s - first.machine.trainer_cpu_s,
        trainer_queued_s=last.machine.trainer_queued_s - first.machine.trainer_queued_s,
        throttled_s=last.machine.throttled_s - first.machine.throttled_s,
        read_bytes=sum(worker.read_bytes for worker in workers),
        slots=work.slots,
        slots_wanted=work.slots_wanted,
        slot_bytes=work.slot_bytes,
        copied=work.copied - first.work.copied,
        copy_s=(work.copied_ns - first.work.copied_ns) / 1e9,
        is_stream=about.is_stream,
        lanes=about.lanes,
        by_tf_data=last.by_tf_data,
        most_workers=last.autotuned.most,
        in_vain=last.autotuned.in_vain,
        load_s=work.load_s,
    )


def _paces(looks: Sequence[Look]) -> tuple[Pace, ...]:
    """Return how fast each number of workers was, of those that there were lately."""
    seconds: dict[int, float] = collections.defaultdict(float)
    cpu_s: dict[int, float] = collections.defaultdict(float)
    samples: dict[int, int] = collections.defaultdict(int)
    steps: dict[int, int] = collections.defaultdict(int)
    for first, last in itertools.pairwise(looks):
        before, now = first.work.workers, last.work.workers
        workers = first.work.worker_count
        if before.keys() == now.keys():
            seconds[workers] += (last.steps.steps_ns - first.steps.steps_ns) / 1e9
            cpu_s[workers] += sum(worker.since(before[number]).cpu_s for number, worker in now.items())
            samples[workers] += last.samples - first.samples
            steps[workers] += last.steps.steps - first.steps.steps
    return tuple(
        Pace(each, samples[each] / seconds[each], cpu_s[each] / max(1, samples[each]))
        for each in sorted(seconds)
        if seconds[each] and each and steps[each] >= LEAST_STEPS
    )
