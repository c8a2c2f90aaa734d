"""What was measured of a loader and of the machine between two moments."""

from __future__ import annotations

import dataclasses

from loaderpool.memory.call_times import CallTimes
from loaderpool.transport.payload.load_time import NOT_TOLD, LoadTime


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
    left_out_s: float = 0.0  # in none of these, as a pause test waited; batches were made meanwhile
    most_workers: int = 0  # to which `workers="auto"` may go; 0: the number is the user's
    made: int = 0  # samples that they finished, of all loaders of the pool; 0: not known
    busy_s: float = 0.0  # workers were at tickets, summed over them
    idle_s: float = 0.0  # workers waited for a ticket: for a slot, or for work
    cpu_s: float = 0.0  # CPU time of the workers
    queued_s: float = 0.0  # workers could have run, and waited for a CPU
    calls: CallTimes = dataclasses.field(default_factory=CallTimes)  # of the user's function, in the window
    calls_of: str = "sample"  # what a call makes: a "sample", or a "batch"
    can_have_cache: bool = False  # whether `cache=` may be given: single samples by index, one thread, none given yet
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
    load_time: LoadTime = NOT_TOLD  # of the user's function
    # How fast other numbers of workers were, of this training.
    paces: tuple[Pace, ...] = ()

    @property
    def wait_share(self) -> float:
        """Of the window, 0.0 to 1.0."""
        return min(1.0, self.wait_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Of what was consumed; 0.0 before there is a step."""
        return self.samples / (self.seconds + self.left_out_s) if self.seconds > 0 else 0.0

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
