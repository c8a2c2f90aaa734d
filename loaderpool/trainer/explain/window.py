"""The counters of a loader at a moment, a `Snapshot`, and over the time between two, a `Window`.

Three bounds limit how short a step can be: the consumer's own time with data ready; the time of the
workers, which they share; and the CPU time, which all processes share. A step is as long as the
longest of them (the bottleneck law of operational analysis).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loaderpool.config import FIRST_STEPS, MAX_WORKERS
from loaderpool.memory.call_times import CallTimes

# Steps needed for a verdict. Smaller: these are steps in which caches fill and code compiles.
# Larger: a short training gets no verdict.
LEAST_STEPS = 20
# Share of the time spent waiting. With less waiting, an improvement would be smaller than the noise
# between two runs.
WAITS_ABOVE = 0.05
# Share by which two rates may differ and still count as equal. Each worker costs memory, and CPU
# time that the training needs, too. Smaller: noise decides. Larger: throughput is lost.
TOLERANCE = 0.05
# Share of CPU time above which the function computes. The rest is CPU time of other processes, not
# waiting of its own.
_COMPUTES_ABOVE = 0.75
# Share of the CPUs, or of the workers' time, from which they count as full. Larger: the moments
# between two tickets, or the machine's other work, would pass for free capacity. Smaller: free
# capacity would count as none.
FULL = 0.85
# Share of time spent waiting for a CPU that others use. Below this, a few processes just take
# turns.
CONTESTED = 0.15
# If two numbers of workers differ by this factor, their rates should differ by far more than noise.
FEWER_BY = 1.2
# Steps with data ready that are needed for a mean. Fewer may be due to a single hiccup.
_LEAST_READY_STEPS = 5
# Factor of the needed workers that remains when workers are removed. Otherwise the waiting would
# return with the next slow sample.
_SPARE = 1.15
# Relative difference of rates above which the training is another one, or its source has changed.
_SAME_RATE = 1 / 3
# Share of the rate that the step needs that is enough. The missing rest is well below
# `WAITS_ABOVE`, so noise in times does not add a worker.
_FEEDS = 0.98
# The largest number of threads per worker that was measured. Each holds a result, and perhaps a
# connection.
MOST_THREADS = 64
# Share of the time that the start must have to be reported. A shorter start is over, and would hide
# the present state.
_STARTS = 1 / 3


@dataclasses.dataclass(frozen=True)
class Decision:
    """Change of the number of workers made by `workers="auto"`."""

    time_s: float  # Time of the change, as returned by `time.time()`.
    workers_before: int  # Number of workers before the change.
    workers: int  # Number of workers after the change.
    reason: str  # Reason for the change.


class Autotuned(NamedTuple):
    """The limit of `workers="auto"`, and its decisions."""

    most: int = 0  # upper limit of workers; 0: the user has set the number
    decisions: tuple[Decision, ...] = ()  # the latest last

    @property
    def in_vain(self) -> int:
        """Number of workers of the last increase, if it was reverted; otherwise 0."""
        if len(self.decisions) < 2:
            return 0
        tried, back = self.decisions[-2:]
        is_back = (tried.workers_before, tried.workers) == (back.workers, back.workers_before)
        return tried.workers if is_back and tried.workers > tried.workers_before else 0


class Tried(NamedTuple):
    """Outcome of trials in which some of the workers were paused."""

    most: int  # the number of all workers; they were no faster than `enough`
    enough: int  # the smallest number that was as fast; equal to `most` if no smaller one was
    too_few: int  # the largest number that was slower; 0: none was
    samples_per_s: float

    def is_like(self, samples_per_s: float) -> bool:
        """Return True if a training of this rate is probably the same one."""
        return abs(samples_per_s - self.samples_per_s) <= _SAME_RATE * max(
            samples_per_s, self.samples_per_s
        )

    def merged(self, newer: Tried) -> Tried:
        """Return both outcomes combined, or the newer one if they contradict each other."""
        most, enough = max(self.most, newer.most), min(self.enough, newer.enough)
        too_few = max(self.too_few, newer.too_few)
        is_limit = self.enough < self.most or newer.enough < newer.most
        is_same = self.is_like(newer.samples_per_s) and too_few < enough and is_limit
        return Tried(most, enough, too_few, newer.samples_per_s) if is_same else newer


class WorkerCounts(NamedTuple):
    """Totals of one worker since it started, or of all workers of a node.

    `Sums` has the same fields, and explains them. `capacity.process_times` returns those that the
    kernel counts.
    """

    pid: int = 0  # pid of the worker; 0: a node
    workers: int = 1
    busy_s: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    made: int = 0
    doing: Mapping[str, Any] = {}  # present activity, as the page shows it

    def since(self, before: WorkerCounts | None) -> WorkerCounts:
        """Return the difference since `before`; the totals if the process is another one."""
        if before is None or before.pid != self.pid:
            return self
        return self._replace(
            **{name: getattr(self, name) - getattr(before, name) for name in _SUMS_OF_WORKERS}
        )


_SUMS_OF_WORKERS = WorkerCounts._fields[2:-1]


class Pace(NamedTuple):
    """Recent rate of a number of workers."""

    workers: int
    samples_per_s: float
    cpu_s_per_sample: float = 0.0  # CPU time of the workers; 0.0: not known

    def is_in_vain_beside(self, few: Pace) -> bool:
        """True if these workers gave no measurable speed-up."""
        return self.samples_per_s <= (1 + TOLERANCE) * few.samples_per_s


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sums:
    """Counters that only grow, since the loader was created, or their differences over a window.

    A step is the time from one delivery to the next.
    """

    # Time of steps and of waits for epochs' first batches, without the time between passes.
    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    bytes: int = 0  # size of the batches
    # Part of `seconds` in which the consumer waited; with workers=0, in which it made batches.
    wait_s: float = 0.0
    ready_steps: int = 0  # steps whose batch was ready when it was requested
    ready_steps_s: float = 0.0  # duration of these steps
    epochs: int = 0  # epochs started, without the loader's first one
    epoch_starts_s: float = 0.0  # part of `wait_s` before the first batches of these epochs
    made: int = 0  # samples finished by workers, for all loaders of the pool; 0: not known
    busy_s: float = 0.0  # time of workers at tickets, summed over the workers
    idle_s: float = 0.0  # time of workers waiting for a ticket: for a slot, or for work
    paused_s: float = 0.0  # part of `idle_s` in which a trial had paused the workers
    # CPU time of the workers; 0.0: not measured, as on some systems and for nodes.
    cpu_s: float = 0.0
    queued_s: float = 0.0  # time of workers that were ready to run and waited for a CPU
    machine_cpu_s: float = 0.0  # CPU time of all processes of the machine
    trainer_cpu_s: float = 0.0  # CPU time of the consumer's process
    # Time of the consumer's thread, ready to run and waiting for a CPU.
    trainer_queued_s: float = 0.0
    copied: int = 0  # batches copied out of slots, because too few slots were free
    copy_s: float = 0.0  # time of the consumer for these copies

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Snapshot(Sums):
    """All counters and settings of a loader, at a moment."""

    number: int = 0  # number of the snapshot, from 0 on
    now_ns: int = 0  # time by the monotonic clock
    # Durations of calls. In a window these are differences, except `slowest`, which covers all
    # calls.
    calls: CallTimes = dataclasses.field(default_factory=CallTimes)
    # Wait for the loader's first batch; 0.0 in a window that does not contain it.
    start_s: float = 0.0
    # Counts of each worker, by its number.
    by_worker: Mapping[int, WorkerCounts] = dataclasses.field(default_factory=dict)
    workers: int = 0
    autotuned: Autotuned = dataclasses.field(default_factory=Autotuned)
    # Outcome of trials with some workers paused, for this function and source.
    tried: Tried | None = None
    slots: int = 0
    slots_lent: int = 0  # slots used by the consumer's arrays; in a window, the maximum
    slots_ready: int = 0  # slots with finished batches that are not delivered yet
    slots_wanted: int = 0  # slots for workers and consumer if memory were unlimited
    slot_bytes: int = 0
    by_tf_data: bool = False  # True: the consumer reads batches through `as_dataset`
    room_bytes: int = 0  # free memory for `items_to_cache`

    short_batches: str = ""  # sentences on batches with few rows, as in `ShortBatches`

    # Settings that do not change.
    threads: int = 1  # threads of each worker
    calls_of: str = "sample"  # result of one call of the function: "sample" or "batch"
    takes_batch_fn: bool = True  # True: `batch_fn` can replace `fn`
    # Argument that limits a batch, with "{}" for each number, and the numbers. Without numbers: the
    # user's order gives the batches.
    batch_limit: tuple[str, tuple[int, ...]] = ("batch_size={}", (32,))
    # Items of an epoch if `cache=` is possible: single samples by index, one thread, no cache yet.
    items_to_cache: int = 0
    deterministic: bool = True  # True: batches come in the plan's order
    is_stream: bool = False  # True: one reader reads the items
    lanes: int = 0  # generators that run at once, each in one thread of one worker; 0: none
    cpus: float = 1.0  # usable CPUs, after affinity and cgroups
    machine_cpus: float = 0.0  # CPUs of the machine if these are more
    cpu_advice: str = ""  # problem with the usable CPUs

    def since(self, first: Sums) -> Sums:
        """Return the differences since an earlier snapshot."""
        return Sums(**{name: getattr(self, name) - getattr(first, name) for name in _SUMS})


_SUMS = tuple(each.name for each in dataclasses.fields(Sums))


def sums_of_workers(now: Mapping[int, WorkerCounts], before: Snapshot | None) -> dict[str, float]:
    """Return the sums over all workers, including those that have ended.

    They are the sums of the snapshot before, plus the differences since then.
    """
    earlier = {} if before is None else before.by_worker
    new = [worker.since(earlier.get(number)) for number, worker in now.items()]
    return {
        name: getattr(before, name, 0) + sum(getattr(each, name) for each in new)
        for name in _SUMS_OF_WORKERS
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Window(Snapshot):
    """Measurements over a time that begins and ends at a delivery.

    The properties are figures computed from them.
    """

    # Length of the window with the time between passes, because the CPU times include that; 0.0:
    # equal to `seconds`.
    elapsed_s: float = 0.0
    paces: tuple[Pace, ...] = ()  # recent rates of this training, one for each number of workers

    @property
    def whole_s(self) -> float:
        """The window's length, including the time between passes."""
        return max(self.elapsed_s, self.seconds)

    # -- the consumer --

    @property
    def steady_wait_s(self) -> float:
        """Waiting time within epochs.

        More workers do not shorten the waiting at the beginning of epochs.
        """
        return max(0.0, self.wait_s - self.start_s - self.epoch_starts_s)

    @property
    def steady_wait_share(self) -> float:
        seconds = self.seconds - self.start_s - self.epoch_starts_s
        return self.steady_wait_s / seconds if seconds > 0 else 0.0

    @property
    def is_ready_measured(self) -> bool:
        """True if the duration of steps with data ready is measured.

        If these steps are longer than the average step, they do not count: data was ready because a
        few of them were long.
        """
        return (
            self.ready_steps >= _LEAST_READY_STEPS
            and 0 < self.ready_steps_s / self.ready_steps <= self.step_s
        )

    @property
    def ready_s(self) -> float:
        """Duration of a step with data ready.

        If it is not measured, return the consumer's own time per step. A device may need more.
        """
        if self.is_ready_measured:
            return self.ready_steps_s / self.ready_steps
        return max(self.seconds - self.wait_s, 1e-9) / self.steps

    # -- workers --

    @property
    def busy_share(self) -> float:
        """Share of the workers' time at tickets, without the time in which they were paused."""
        return (
            self.busy_s / (self.busy_s + max(0.0, self.idle_s - self.paused_s))
            if self.busy_s
            else 0.0
        )

    @property
    def queued_share(self) -> float:
        """Share of the time at tickets spent waiting for a CPU."""
        return min(1.0, self.queued_s / self.busy_s) if self.busy_s else 0.0

    @property
    def cpu_share(self) -> float:
        """Share of the time at tickets spent computing. Waiting for a CPU is excluded."""
        return min(1.0, self.batch_cpu_s / self.making_s) if self.making_s else 0.0

    @property
    def computes(self) -> bool:
        """True if the function computes, rather than waits for something other than a CPU."""
        return self.cpu_share >= _COMPUTES_ABOVE

    @property
    def slow_s(self) -> float:
        """Total excess of slow calls over the median.

        A slow call takes more than 8 times the median.
        """
        return self.calls.slow_ns / 1e9

    # -- times of a batch, in seconds --

    @property
    def _batches_made(self) -> float:
        """The number of batches on which the workers spent their time.

        The number made differs from the number of steps by the batches in the slots. If it differs
        by more, the workers also make batches of other loaders. Their cost is part of a step, so
        the number of steps is returned then.
        """
        made = self.made * self.steps / max(1, self.samples)
        return made if made and abs(made - self.steps) <= self.slots else self.steps

    @property
    def _making_cpu_s(self) -> float:
        """CPU time for samples.

        With workers=0 this may be all of the process's CPU time, as far as the consumer waited.
        """
        return self.cpu_s if self.workers else min(self.wait_s, self.trainer_cpu_s) or self.wait_s

    @property
    def making_s(self) -> float:
        """Time of a single worker for a batch, without waiting for a CPU."""
        if not self.workers:
            return self.wait_s / self._batches_made
        return (
            max(self.cpu_s / max(1, self.threads), self.busy_s - self.queued_s) / self._batches_made
        )

    @property
    def batch_cpu_s(self) -> float:
        return self._making_cpu_s / self._batches_made

    @property
    def call_s(self) -> float:
        """Time of a worker for a sample."""
        return self.making_s * max(1, self.threads) * self.steps / max(1, self.samples)

    @property
    def is_outpaced(self) -> bool:
        """True if making a batch takes longer than a step with data ready.

        Other waits of the workers do not count.
        """
        return self.making_s / max(1, self.workers) > (1 + WAITS_ABOVE) * self.ready_s

    # -- CPUs --

    @property
    def cpus_used(self) -> float:
        """Mean number of CPUs used by workers and consumer."""
        return (self.cpu_s + self.trainer_cpu_s) / self.whole_s

    @property
    def cpus_of_others(self) -> float:
        """CPUs used by other processes (lower bound).

        The bound assumes that they prefer CPUs that are not usable here.
        """
        elsewhere = max(0.0, self.machine_cpus - self.cpus)
        return max(0.0, self.machine_cpu_s / self.whole_s - self.cpus_used - elsewhere)

    @property
    def cpus_left(self) -> float:
        """Number of CPUs that workers and consumer can get, as far as is known.

        It is at least the number of CPUs that other processes leave. Other processes also use idle
        CPUs, which they would yield to the workers. So the number is larger if the workers hardly
        compute now. It assumes that they always get the same share of the CPU time that they want.
        """
        wanted_s = self.cpu_s + self.queued_s
        times = max(1.0, self.busy_s / wanted_s) if wanted_s else 1.0
        to_be_had = (times * self.cpu_s + self.trainer_cpu_s) / self.whole_s
        return max(self.cpus - self.cpus_of_others, min(self.cpus, to_be_had), 0.01)

    @property
    def has_full_cpus(self) -> bool:
        """True if workers and consumer use all CPUs left to them, or workers wait for CPUs."""
        return self.cpus_used >= FULL * self.cpus_left or self.queued_share >= CONTESTED

    @property
    def cpu_bound_s(self) -> float:
        """The shortest step that the CPUs allow."""
        own_s = (
            self.trainer_cpu_s
            if self.workers
            else max(0.0, self.trainer_cpu_s - self._making_cpu_s)
        )
        return (self.batch_cpu_s + own_s / self.steps) / self.cpus_left

    # -- other numbers of workers --

    @property
    def target_s(self) -> float:
        """The shortest step that any number of workers can feed."""
        return max(self.ready_s, self.cpu_bound_s)

    def step_with(self, workers: int, threads: int | None = None) -> float:
        """Return the expected length of a step for this number of workers with `threads` threads.

        `threads` defaults to the present number. More threads overlap the waiting for samples, but
        not the computing.
        """
        making_s = self.making_s
        if threads is not None:
            making_s = max(
                min(self.batch_cpu_s, making_s), making_s * max(1, self.threads) / threads
            )
        return max(self.target_s, making_s / workers)

    @property
    def least_workers(self) -> int:
        """Number of workers that feed the shortest possible step, with the present threads."""
        return max(1, min(math.ceil(_FEEDS * self.making_s / self.target_s), MAX_WORKERS))

    @property
    def least_threads(self) -> int:
        """Number of threads per worker that feed the shortest possible step."""
        threads = (
            _FEEDS * self.making_s * max(1, self.threads) / (max(1, self.workers) * self.target_s)
        )
        return max(1, min(math.ceil(threads), MOST_THREADS))

    @property
    def enough_workers(self) -> int:
        """Number of workers that feed steps of the present length, with at most one to spare."""
        needed = self.making_s / max(self.target_s, self.step_s)
        return max(1, min(math.ceil(_SPARE * needed), math.ceil(_FEEDS * needed) + 1))

    def slower_paces(self) -> list[Pace]:
        """Return the paces measured with far fewer workers, which should have been much slower.

        Sorted by the number of workers, fewest first.
        """
        return sorted(pace for pace in self.paces if 0 < pace.workers * FEWER_BY <= self.workers)

    @property
    def pace(self) -> Pace:
        """Pace of the present number of workers."""
        return Pace(self.workers, self.samples_per_s, self.cpu_s / max(1, self.samples))

    @property
    def limit(self) -> Tried | None:
        """Trials that show that the present workers share a limit.

        None if none show it, or if they belong to another training.
        """
        tried = self.tried
        if tried is None or self.autotuned.most or not tried.is_like(self.samples_per_s):
            return None
        most = max(tried.most, self.workers)
        is_limit = tried.enough < tried.most and FEWER_BY * tried.enough <= most
        return tried if is_limit and tried.enough <= self.workers else None

    def more_as_slow(self) -> Pace | None:
        """Return the pace of more workers that should have been faster, but were not.

        If there are several, return that of the fewest workers. None if there is none.
        """
        now = self.pace
        more = (
            each
            for each in self.paces
            if each.workers >= FEWER_BY * now.workers and each.is_in_vain_beside(now)
        )
        return min(more, key=lambda pace: pace.workers, default=None)


def window_of(snapshots: Sequence[Snapshot], seconds: float) -> Window:
    """Return the window of the last `seconds` of snapshots, which are sorted, the latest last."""
    has_begun = not snapshots[0].number
    later = [each for each in snapshots if each.steps >= FIRST_STEPS]
    snapshots = later if len(later) > 1 else snapshots  # without the first steps, which compile
    last = snapshots[-1]
    earlier = [
        each for each in snapshots[:-1] if each.now_ns >= last.now_ns - seconds * 1e9
    ] or list(snapshots[-2:-1])
    same = list(itertools.takewhile(lambda each: each.workers == last.workers, reversed(earlier)))
    # If there are enough steps with the present number of workers, use only these.
    if same and last.steps - same[-1].steps >= LEAST_STEPS:
        first = same[-1]
    else:
        first = earlier[0] if earlier else last
    sums = dict(vars(last.since(first)))
    # Snapshot 0 is taken at the first batch. The wait before it is reported only if it is most of
    # the waiting and still a considerable share of the time.
    start_s = last.start_s if has_begun and first is snapshots[0] else 0.0
    if start_s <= sums["wait_s"] or start_s < _STARTS * (sums["seconds"] + start_s):
        start_s = 0.0
    sums |= {
        "seconds": sums["seconds"] + start_s,
        "wait_s": sums["wait_s"] + start_s,
        "start_s": start_s,
    }
    lent = max(each.slots_lent for each in snapshots if each.now_ns >= first.now_ns)
    return Window(
        **{**vars(last), **sums, "calls": last.calls.since(first.calls), "slots_lent": lent},
        elapsed_s=(last.now_ns - first.now_ns) / 1e9 + start_s,
        paces=tuple(_paces(snapshots)),
    )


def _paces(snapshots: Sequence[Snapshot]) -> list[Pace]:
    """Return the latest pace of each number of workers in these snapshots."""
    paces = {}
    for (workers, _), group in itertools.groupby(
        snapshots, lambda each: (each.workers, each.by_worker.keys())
    ):
        first, *later = group
        if not later or not workers:
            continue
        part = later[-1].since(first)
        seconds, samples = part.seconds - part.epoch_starts_s, part.samples
        if part.steps >= LEAST_STEPS and seconds > 0:
            paces[workers] = Pace(workers, samples / seconds, part.cpu_s / max(1, samples))
    return list(paces.values())
