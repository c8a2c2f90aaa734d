"""What was measured of a loader and of the machine between two moments."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from loaderpool.memory.call_times import CallTimes

# Fewer steps are those of caches that fill and code that compiles. More, and a short training hears nothing.
LEAST_STEPS = 20
# So many steps each have a look of their own: code that compiles does so in these.
FIRST_STEPS = 3
# A first step that takes the consumer so many times as long as later ones compiles, or fills caches.
COMPILES = 3
# Of the time: a start that was a smaller part of it is over, and hides what goes on now.
STARTS = 1 / 3
# Of the time: with less waiting there is nothing to gain that the next run would not hide by its noise.
WAITS_ABOVE = 0.05
# Two rates this close are the same: each worker costs memory, and CPU time that the training wants too. Smaller, noise
# decides; larger, throughput is given away.
TOLERANCE = 0.05
# A change that makes steps no more than so many times as fast is not worth a word: noise has more.
GAINS = 1.05
# What goes on is clear by then; with less, slow calls are not counted yet, and rings are still full from the beginning.
CLEAR_S, CLEAR_CALLS = 10.0, 200
# A call in less time costs about as much to make as its sample: many in one are cheaper.
CHEAP_CALL_S = 20e-6
# Of the free memory: what a cache may take, or the training's own growth would end it.
CACHE_TAKES = 0.5
# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
COMPUTES_ABOVE = 0.75
# Below this share it hardly computes at all, so that the threads of a worker do not take turns.
BLOCKS_BELOW = 0.25
# Of CPUs, of workers' time: the part from which on they are full. Higher, and the moments between two tickets, or what
# else a machine does, would pass for room; lower, and room would be taken for none.
FULL = 0.85
# Waiting for a CPU while some are used by others: below this it is the ordinary turn-taking of a few processes.
CONTESTED = 0.15
# From here on, CPU time per sample grew because of the other workers and not by chance.
SLOWED_DOWN = 1.25
# One core copies some GB a second, a machine some ten of them; a function touches each delivered byte several times.
HEAVY_BYTES_PER_S = 0.5e9
# A batch in less time costs about as much to hand over (some 20 µs to 100 µs) as to make.
CHEAP_BATCH_S = 300e-6
# One cause of several explains a wait if it has at least this part of it: no other can have more.
MOST_OF_IT = 0.5
# Of the waiting, where workers are idle: calls that were slow before the median was known are not counted, nor those
# that still run. Less, and causes that are not counted may have more.
SLOW_CALLS_EXPLAIN = 1 / 3
# Of the work: slow calls that are less of it are no reason of their own, where workers have enough to do.
SLOW_CALLS_ARE = 0.25
# A number of workers that was so much smaller should have been slower by far more than noise.
FEWER_BY = 1.2
# Of what more workers should bring: with less they wait for what they share, and noise of short windows is no more.
BRINGS_LITTLE = 0.05
# Steps that found data ready: a mean of fewer may be that of one hiccup.
LEAST_READY_STEPS = 5
# Workers that are given back leave so much of what is needed, or the waiting would come back with the next slow sample.
SPARE = 1.15
# Of the rate that feeds the step, so much is enough: what is missing is well below `WAITS_ABOVE`, and noise in times
# does not add a worker.
FEEDS = 0.98
# Batches are made no larger than so many times: with larger ones a training is another one.
MOST_TIMES_LARGER = 4
# More threads than that in a worker have not been measured; each holds a result, and a connection where it reads.
MOST_THREADS = 64
# A consumer has the batch that it works on, and tf.data or a device some more on their way. Who has more keeps them.
USUALLY_LENT = 4
# Of the steps: batches that are copied out now and then are no habit.
COPIED_OFTEN = 0.1


@dataclasses.dataclass(frozen=True)
class Decision:
    """Change of the number of workers made by `workers="auto"`."""

    time_s: float  # Time of the change, as returned by `time.time()`.
    workers_before: int  # Number of workers before the change.
    workers: int  # Number of workers after the change.
    reason: str  # Reason for the change.


class Autotuned(NamedTuple):
    """How far `workers="auto"` may go, and what it did; as it stands here, where the number is the user's."""

    most: int = 0  # workers; 0: the number is not changed
    decisions: tuple[Decision, ...] = ()  # the latest last

    @property
    def in_vain(self) -> int:
        """How many more workers it tried last and took back; 0: it did something else."""
        if len(self.decisions) < 2:
            return 0
        tried, back = self.decisions[-2:]
        is_back = (tried.workers_before, tried.workers) == (back.workers, back.workers_before)
        return tried.workers if is_back and tried.workers > tried.workers_before else 0


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast a number of workers was, lately."""

    workers: int
    samples_per_s: float
    cpu_s_per_sample: float = 0.0  # of workers; 0.0: not known


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was measured over a window of time, which begins and ends when a batch is handed over.

    A step is the time from one hand-over to the next: what the consumer does with a batch, and its wait for the next.
    Times are sums over the window, in seconds.
    """

    seconds: float  # the window's length, time between passes left out
    steps: int
    samples: int
    bytes: int  # of the batches
    wait_s: float  # the consumer waited for data
    ready_steps: int  # steps whose batch was there when it was asked for
    ready_steps_s: float  # how long these took
    start_s: float  # of `wait_s`: before the loader's first batch; 0.0 where the window begins behind it
    epochs: int  # that have begun in the window
    epoch_starts_s: float  # of `wait_s`: before the first batch of an epoch that is not the loader's first
    # Samples: by workers, or in the consumer's own process (workers=0), where `wait_s` is the time that making takes.
    workers: int
    threads: int  # of each worker
    can_have_threads: bool  # whether `threads_per_worker` may be raised: batches, and not Python's lock, take the time
    most_workers: int = 0  # to which `workers="auto"` may go; 0: the number is the user's
    in_vain: int = 0  # more workers that it tried last, and took back; 0: none
    made: int = 0  # samples that they finished, of all loaders of the pool; 0: not known
    busy_s: float = 0.0  # workers were at tickets, summed over them
    idle_s: float = 0.0  # workers waited for a ticket: for a slot, or for work
    cpu_s: float = 0.0  # CPU time of the workers
    queued_s: float = 0.0  # workers could have run, and waited for a CPU
    calls: CallTimes = dataclasses.field(default_factory=CallTimes)  # of the user's function, in the window
    calls_of: str = "sample"  # what a call makes: a "sample", or a "batch"
    can_have_cache: bool = False  # whether `cache=` may be given: single samples by index, one thread, none given yet
    items: int = 0  # of an epoch; 0: not known
    room_bytes: int = 0  # memory that is free for what later epochs may read again; 0: none comes, or it is not known
    deterministic: bool = True  # batches come in the plan's order
    # The machine. CPU times, as those of workers, are of the whole time, also of that between passes.
    elapsed_s: float = 0.0  # that time; 0.0: `seconds`
    cpus: float = 1.0  # that may be used, after affinity and cgroups
    machine_cpus: float = 0.0  # that the machine has, where these are more
    machine_cpu_s: float = 0.0  # CPU time of all processes of the machine
    trainer_cpu_s: float = 0.0  # of the consumer's process
    trainer_queued_s: float = 0.0  # the consumer's thread could have run, and waited for a CPU
    throttled_s: float = 0.0  # the cgroup's limit held processes back
    read_bytes: int = 0  # that workers read from disks
    # The ring.
    slots: int = 0
    slots_lent: int = 0  # that the consumer's arrays look at, the most that were seen in the window
    slots_wanted: int = 0  # that workers and consumer would have, were memory no limit
    slot_bytes: int = 0
    copied: int = 0  # batches copied out, as too few slots were free to lend one
    copy_s: float = 0.0  # that this took the consumer
    by_tf_data: bool = False  # the consumer takes them through `as_dataset`
    # A stream, or generators.
    is_stream: bool = False  # whose items one reader reads
    lanes: int = 0  # generators that run at once, each in one worker; 0: there are none
    # The beginning.
    load_s: float = 0.0  # of the user's function
    # How fast other numbers of workers were, of this training.
    paces: tuple[Pace, ...] = ()

    @property
    def wait_share(self) -> float:
        """Of the window, 0.0 to 1.0."""
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Of what was consumed; 0.0 before there is a step."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def slow_s(self) -> float:
        """How long calls took that took over 8 times the median one, less that median."""
        return self.calls.slow_ns / 1e9

    @property
    def whole_s(self) -> float:
        """The window's length with the time between passes."""
        return max(self.elapsed_s, self.seconds)

    @property
    def step_s(self) -> float:
        """Of a step, on average; 0.0 before there is one."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def ready_step_s(self) -> float | None:
        """Of a step that finds data ready, on average: the step that there would be, were data always ready."""
        return self.ready_steps_s / self.ready_steps if self.ready_steps else None
