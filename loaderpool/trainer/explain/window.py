"""What is counted of a loader at a moment, a `Snapshot`, and what two of them tell of the time between, a `Window`.

Three laws bind a step: the consumer's own time with data ready; what workers do for it, which they share; what CPUs do
for it, which all share. It is as long as the longest of them (operational analysis: the bottleneck law).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.call_times import CallTimes

# Fewer steps are those of caches that fill and code that compiles. More, and a short training hears nothing.
LEAST_STEPS = 20
# Of the time: with less waiting there is nothing to gain that the next run would not hide by its noise.
WAITS_ABOVE = 0.05
# Two rates this close are the same: each worker costs memory, and CPU time that the training wants too. Smaller, noise
# decides; larger, throughput is given away.
TOLERANCE = 0.05
# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
_COMPUTES_ABOVE = 0.75
# Of CPUs, of workers' time: the part from which on they are full. Higher, and the moments between two tickets, or what
# else a machine does, would pass for room; lower, and room would be taken for none.
FULL = 0.85
# Waiting for a CPU while some are used by others: below this it is the ordinary turn-taking of a few processes.
CONTESTED = 0.15
# A number of workers that was so much smaller should have been slower by far more than noise.
FEWER_BY = 1.2
# Steps that found data ready: a mean of fewer may be that of one hiccup.
_LEAST_READY_STEPS = 5
# Workers that are given back leave so much of what is needed, or the waiting would come back with the next slow sample.
_SPARE = 1.15
# A rate that differs by more is that of another training, or of a source that has changed.
_SAME_RATE = 1 / 3
# Of the rate that feeds the step, so much is enough: what is missing is well below `WAITS_ABOVE`, and noise in times
# does not add a worker.
_FEEDS = 0.98
# More threads than that in a worker have not been measured; each holds a result, and a connection where it reads.
MOST_THREADS = 64
# So many steps each have a snapshot of their own: code that compiles does so in these, and caches fill.
FIRST_STEPS = 3
# Of the time: a start that was a smaller part of it is over, and hides what goes on now.
_STARTS = 1 / 3


@dataclasses.dataclass(frozen=True)
class Decision:
    """Change of the number of workers made by `workers="auto"`."""

    time_s: float  # Time of the change, as returned by `time.time()`.
    workers_before: int  # Number of workers before the change.
    workers: int  # Number of workers after the change.
    reason: str  # Reason for the change.


class Autotuned(NamedTuple):
    """How far `workers="auto"` may go, and what it did."""

    most: int = 0  # workers; 0: the number is the user's
    decisions: tuple[Decision, ...] = ()  # the latest last

    @property
    def in_vain(self) -> int:
        """How many more workers it tried last and took back; 0: it did something else."""
        if len(self.decisions) < 2:
            return 0
        tried, back = self.decisions[-2:]
        is_back = (tried.workers_before, tried.workers) == (back.workers, back.workers_before)
        return tried.workers if is_back and tried.workers > tried.workers_before else 0


class Tried(NamedTuple):
    """Outcome of trials in which some of the workers were paused."""

    most: int  # so many workers were no faster than `enough`
    enough: int  # the fewest that were as fast; `most`: none fewer were
    too_few: int  # the most that were slower; 0: none were
    samples_per_s: float

    def is_like(self, samples_per_s: float) -> bool:
        """Whether a training of this rate is still the same one."""
        return abs(samples_per_s - self.samples_per_s) <= _SAME_RATE * max(
            samples_per_s, self.samples_per_s
        )

    def merged(self, newer: Tried) -> Tried:
        """Return what both tell; the newer one alone, if they contradict each other."""
        most, enough = max(self.most, newer.most), min(self.enough, newer.enough)
        too_few = max(self.too_few, newer.too_few)
        is_limit = self.enough < self.most or newer.enough < newer.most
        is_same = self.is_like(newer.samples_per_s) and too_few < enough and is_limit
        return Tried(most, enough, too_few, newer.samples_per_s) if is_same else newer


class WorkerCounts(NamedTuple):
    """One worker's numbers since it began, or those of all workers of a node; `Sums` says what they are."""

    pid: int = 0  # 0: it is a node
    workers: int = 1
    busy_s: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0
    queued_s: float = 0.0
    made: int = 0
    doing: Mapping[str, Any] = {}  # at that moment, as the page tells it

    def since(self, before: WorkerCounts | None) -> WorkerCounts:
        """Return what has come since; all of it, where it is another process."""
        if before is None or before.pid != self.pid:
            return self
        return self._replace(
            **{name: getattr(self, name) - getattr(before, name) for name in _SUMS_OF_WORKERS}
        )


_SUMS_OF_WORKERS = WorkerCounts._fields[2:-1]


class Pace(NamedTuple):
    """How fast a number of workers was, lately."""

    workers: int
    samples_per_s: float
    cpu_s_per_sample: float = 0.0  # of workers; 0.0: not known

    def is_in_vain_beside(self, few: Pace) -> bool:
        """Whether these brought no more than noise."""
        return self.samples_per_s <= (1 + TOLERANCE) * few.samples_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """What only grows, since the loader was made or in a window. A step is from one hand-over to the next."""

    seconds: float = (
        0.0  # of steps, and of waits for epochs' first batches; time between passes is in none
    )
    steps: int = 0
    samples: int = 0
    bytes: int = 0  # of the batches
    wait_s: float = 0.0  # of `seconds`: the consumer waited; with workers=0, what making took
    ready_steps: int = 0  # steps whose batch was there when it was asked for
    ready_steps_s: float = 0.0  # how long these took
    epochs: int = 0  # that have begun, the loader's first one not among them
    epoch_starts_s: float = 0.0  # of `wait_s`: before the first batches of these
    made: int = 0  # samples that workers finished, of all loaders of the pool; 0: not known
    busy_s: float = 0.0  # workers were at tickets, summed over them
    idle_s: float = 0.0  # workers waited for a ticket: for a slot, or for work
    paused_s: float = 0.0  # of `idle_s`: a trial had paused them
    cpu_s: float = (
        0.0  # CPU time of the workers; 0.0: not measured, as on some systems and of nodes
    )
    queued_s: float = 0.0  # workers could have run, and waited for a CPU
    machine_cpu_s: float = 0.0  # CPU time of all processes of the machine
    trainer_cpu_s: float = 0.0  # of the consumer's process
    trainer_queued_s: float = 0.0  # the consumer's thread could have run, and waited for a CPU
    copied: int = 0  # batches copied out, as too few slots were free to lend one
    copy_s: float = 0.0  # that this took the consumer

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot(Sums):
    """All that is counted of a loader, at a moment."""

    number: int = 0  # from 0 on
    now_ns: int = 0  # monotonic
    calls: CallTimes = dataclasses.field(
        default_factory=CallTimes
    )  # in a window, but the slowest are of all time
    start_s: float = (
        0.0  # the wait for the loader's first batch; of a window, 0.0 where that is not in it
    )
    by_worker: Mapping[int, WorkerCounts] = dataclasses.field(
        default_factory=dict
    )  # by their own numbers
    workers: int = 0
    autotuned: Autotuned = dataclasses.field(default_factory=Autotuned)
    tried: Tried | None = None  # with some workers paused, for this function and source
    slots: int = 0
    slots_lent: int = (
        0  # that the consumer's arrays look at; of a window, the most that were seen in it
    )
    slots_ready: int = 0  # whose batches are finished and not taken yet
    slots_wanted: int = 0  # that workers and consumer would have, were memory no limit
    slot_bytes: int = 0
    by_tf_data: bool = False  # the consumer takes batches through `as_dataset`
    room_bytes: int = 0  # memory that is free, where `items_to_cache` may be kept

    # What does not change.
    threads: int = 1  # of each worker
    calls_of: str = "sample"  # what a call of the function makes: a "sample", or a "batch"
    items_to_cache: int = (
        0  # of an epoch, where `cache=` may be given: single samples by index, one thread, none yet
    )
    deterministic: bool = True  # batches come in the plan's order
    is_stream: bool = False  # whose items one reader reads
    lanes: int = (
        0  # generators that run at once, each in one thread of one worker; 0: there are none
    )
    cpus: float = 1.0  # that may be used, after affinity and cgroups
    machine_cpus: float = 0.0  # that the machine has, where these are more
    cpu_advice: str = ""  # what is wrong with the CPUs that may be used

    def since(self, first: Sums) -> Sums:
        """Return what has come since then."""
        return Sums(**{name: getattr(self, name) - getattr(first, name) for name in _SUMS})


_SUMS = tuple(each.name for each in dataclasses.fields(Sums))


def sums_of_workers(now: Mapping[int, WorkerCounts], before: Snapshot | None) -> dict[str, float]:
    """Return the sums of all workers that there were: those up to the snapshot before, and what has come since."""
    earlier = {} if before is None else before.by_worker
    new = [worker.since(earlier.get(number)) for number, worker in now.items()]
    return {
        name: getattr(before, name, 0) + sum(getattr(each, name) for each in new)
        for name in _SUMS_OF_WORKERS
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Snapshot):
    """What was measured over a time that begins and ends when a batch is handed over, and what follows from it."""

    elapsed_s: float = (
        0.0  # with the time between passes, of which CPU times are, too; 0.0: `seconds`
    )
    paces: tuple[Pace, ...] = ()  # of this training, of other numbers of workers, too

    @property
    def whole_s(self) -> float:
        """The window's length with the time between passes."""
        return max(self.elapsed_s, self.seconds)

    # -- the consumer

    @property
    def steady_wait_s(self) -> float:
        """Waiting within epochs: at their beginning more workers would not help."""
        return max(0.0, self.wait_s - self.start_s - self.epoch_starts_s)

    @property
    def steady_wait_share(self) -> float:
        seconds = self.seconds - self.start_s - self.epoch_starts_s
        return self.steady_wait_s / seconds if seconds > 0 else 0.0

    @property
    def is_ready_measured(self) -> bool:
        """Whether steps that found data ready tell how long one would be, were data always ready.

        Not where they are longer than the average step: data were ready because a few of them were long.
        """
        return (
            self.ready_steps >= _LEAST_READY_STEPS
            and 0 < self.ready_steps_s / self.ready_steps <= self.step_s
        )

    @property
    def ready_s(self) -> float:
        """The step with data ready; if not measured, the consumer's own time, beside which a device may take more."""
        if self.is_ready_measured:
            return self.ready_steps_s / self.ready_steps
        return max(self.seconds - self.wait_s, 1e-9) / self.steps

    # -- workers

    @property
    def busy_share(self) -> float:
        """Of the workers' time, without that in which they were paused: at tickets."""
        return (
            self.busy_s / (self.busy_s + max(0.0, self.idle_s - self.paused_s))
            if self.busy_s
            else 0.0
        )

    @property
    def queued_share(self) -> float:
        """Of the time at tickets: waiting for a CPU."""
        return min(1.0, self.queued_s / self.busy_s) if self.busy_s else 0.0

    @property
    def cpu_share(self) -> float:
        """Of the time at tickets, waiting for a CPU left out: computing."""
        return min(1.0, self.batch_cpu_s / self.making_s) if self.making_s else 0.0

    @property
    def computes(self) -> bool:
        """Whether the function computes, rather than waits for anything else than a CPU."""
        return self.cpu_share >= _COMPUTES_ABOVE

    @property
    def slow_s(self) -> float:
        """How long calls took that took over 8 times the median one, less that median."""
        return self.calls.slow_ns / 1e9

    # -- what a batch takes, in seconds

    @property
    def _batches_made(self) -> float:
        """Of how many batches the workers' time is: of those taken, but for what slots took in or gave meanwhile.

        Where it differs by more, other loaders' batches are among those made, and a step needs its share of these, too.
        """
        made = self.made * self.steps / max(1, self.samples)
        return made if made and abs(made - self.steps) <= self.slots else self.steps

    @property
    def _making_cpu_s(self) -> float:
        """CPU time for samples. With workers=0 all of the process's may have been, as far as it waited."""
        return self.cpu_s if self.workers else min(self.wait_s, self.trainer_cpu_s) or self.wait_s

    @property
    def making_s(self) -> float:
        """Of one worker alone, waiting for a CPU left out."""
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
        """How long a worker takes for a sample."""
        return self.making_s * max(1, self.threads) * self.steps / max(1, self.samples)

    @property
    def is_outpaced(self) -> bool:
        """Whether making takes longer than a step with data ready, whatever workers wait for besides."""
        return self.making_s / max(1, self.workers) > (1 + WAITS_ABOVE) * self.ready_s

    # -- CPUs

    @property
    def cpus_used(self) -> float:
        """How many workers and consumer use, on average."""
        return (self.cpu_s + self.trainer_cpu_s) / self.whole_s

    @property
    def cpus_of_others(self) -> float:
        """How many of the usable ones other processes have at least: they use those first that we may not."""
        elsewhere = max(0.0, self.machine_cpus - self.cpus)
        return max(0.0, self.machine_cpu_s / self.whole_s - self.cpus_used - elsewhere)

    @property
    def cpus_left(self) -> float:
        """How many are left by others, or got from them.

        Others use what is free, and give way: what they use is no bound for workers that hardly ask for a CPU. These
        would get as many as they got, times how much more they would ask if they wanted one all of the time.
        """
        wanted_s = self.cpu_s + self.queued_s
        times = max(1.0, self.busy_s / wanted_s) if wanted_s else 1.0
        to_be_had = (times * self.cpu_s + self.trainer_cpu_s) / self.whole_s
        return max(self.cpus - self.cpus_of_others, min(self.cpus, to_be_had), 0.01)

    @property
    def has_full_cpus(self) -> bool:
        """Whether workers and consumer use what others leave them, or workers have to wait for it."""
        return self.cpus_used >= FULL * self.cpus_left or self.queued_share >= CONTESTED

    @property
    def cpu_bound_s(self) -> float:
        """The shortest step for which there are CPUs."""
        own_s = (
            self.trainer_cpu_s
            if self.workers
            else max(0.0, self.trainer_cpu_s - self._making_cpu_s)
        )
        return (self.batch_cpu_s + own_s / self.steps) / self.cpus_left

    # -- another number of workers

    @property
    def target_s(self) -> float:
        """The shortest step that any number of workers can feed."""
        return max(self.ready_s, self.cpu_bound_s)

    def step_with(self, workers: int, threads: int | None = None) -> float:
        """Return how long a step is with so many workers, of so many threads each; None: of as many as now.

        What a sample waits for, threads wait for at the same time; they compute in turns.
        """
        making_s = self.making_s
        if threads is not None:
            making_s = max(
                min(self.batch_cpu_s, making_s), making_s * max(1, self.threads) / threads
            )
        return max(self.target_s, making_s / workers)

    @property
    def least_workers(self) -> int:
        """How many workers feed the shortest step there can be, each with its threads of now."""
        return max(1, min(math.ceil(_FEEDS * self.making_s / self.target_s), MAX_WORKERS))

    @property
    def least_threads(self) -> int:
        """How many threads of each worker feed it."""
        threads = (
            _FEEDS * self.making_s * max(1, self.threads) / (max(1, self.workers) * self.target_s)
        )
        return max(1, min(math.ceil(threads), MOST_THREADS))

    @property
    def enough_workers(self) -> int:
        """How many workers feed the step of now with something to spare, but no more than one."""
        needed = self.making_s / max(self.target_s, self.step_s)
        return max(1, min(math.ceil(_SPARE * needed), math.ceil(_FEEDS * needed) + 1))

    def slower_paces(self) -> list[Pace]:
        """Return the paces of so few workers that they should have been slower by far, the fewest first."""
        return sorted(pace for pace in self.paces if 0 < pace.workers * FEWER_BY <= self.workers)

    @property
    def pace(self) -> Pace:
        """Of the workers of now."""
        return Pace(self.workers, self.samples_per_s, self.cpu_s / max(1, self.samples))

    @property
    def limit(self) -> Tried | None:
        """Trials that show that the workers of now share a limit; None if none do, or of another training."""
        tried = self.tried
        if tried is None or self.autotuned.most or not tried.is_like(self.samples_per_s):
            return None
        most = max(tried.most, self.workers)
        is_limit = tried.enough < tried.most and FEWER_BY * tried.enough <= most
        return tried if is_limit and tried.enough <= self.workers else None

    def more_as_slow(self) -> Pace | None:
        """Return the pace of the fewest of so many more workers that they should have been faster, and were not."""
        now = self.pace
        more = (
            each
            for each in self.paces
            if each.workers >= FEWER_BY * now.workers and each.is_in_vain_beside(now)
        )
        return min(more, key=lambda pace: pace.workers, default=None)


def window_of(snapshots: Sequence[Snapshot], seconds: float) -> Window:
    """Return what was measured in the last so many seconds of these snapshots, the latest of which is the last."""
    has_begun = not snapshots[0].number
    later = [each for each in snapshots if each.steps >= FIRST_STEPS]
    snapshots = later if len(later) > 1 else snapshots  # the first steps compile
    last = snapshots[-1]
    earlier = [
        each for each in snapshots[:-1] if each.now_ns >= last.now_ns - seconds * 1e9
    ] or list(snapshots[-2:-1])
    same = list(itertools.takewhile(lambda each: each.workers == last.workers, reversed(earlier)))
    if (
        same and last.steps - same[-1].steps >= LEAST_STEPS
    ):  # enough is known of the number of workers of now
        first = same[-1]
    else:
        first = earlier[0] if earlier else last
    sums = dict(vars(last.since(first)))
    # The first one is of the first batch. What came before is told where it is most of the waiting, and not yet past.
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
    """Return how fast each number of workers was when it was there last, of those that there were lately."""
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
