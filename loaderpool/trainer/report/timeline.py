"""What looks tell of the last two minutes: how steps went from one look to the next, and what each worker did."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from loaderpool.trainer.explain.looks import Look


@dataclasses.dataclass(frozen=True)
class Moment:
    """The time between two looks in which steps were taken. Means are over its steps."""

    begin_s: float  # before the latest look, so at most 0.0
    end_s: float
    steps: int
    computing_s: float  # of a step: the consumer's own
    waiting_s: float  # of a step: for data
    samples_per_s: float
    epochs: int  # that have begun in it
    workers: int  # of hosts all of theirs
    slots: int  # that there may be
    slots_lent: int  # that the consumer's arrays look at
    slots_ready: int  # whose batches were not taken yet


@dataclasses.dataclass(frozen=True)
class WorkerShares:
    """What a worker, or all those of a host, did in the time that looks are of; None: it has not been there so long."""

    number: int
    pid: int | None  # None: it is a host
    workers: int
    samples: int | None  # that it made, for any loader of its pool; None also of a host
    busy_share: float | None  # of its time, 0.0 to 1.0: at tickets
    cpus: float | None  # that it used, on average; None also of a host
    read_bytes_per_s: float | None  # from disks; None also of a host


def moments(looks: Sequence[Look]) -> list[Moment]:
    """Return what was between each two looks; none where no step was taken."""
    found = []
    for first, last in itertools.pairwise(looks):
        before, now, work = first.steps, last.steps, last.work
        steps, steps_ns = now.steps - before.steps, now.steps_ns - before.steps_ns
        if steps <= 0 or steps_ns <= 0:
            continue
        waiting_ns = min(steps_ns, now.wait_ns - before.wait_ns)
        left_out_ns = now.left_out_ns - before.left_out_ns
        taking_ns = steps_ns + now.epoch_starts_ns - before.epoch_starts_ns + left_out_ns
        found.append(
            Moment(
                begin_s=(first.now_ns - looks[-1].now_ns) / 1e9,
                end_s=(last.now_ns - looks[-1].now_ns) / 1e9,
                steps=steps,
                computing_s=(steps_ns - waiting_ns) / 1e9 / steps,
                waiting_s=waiting_ns / 1e9 / steps,
                samples_per_s=(last.samples - first.samples) / (taking_ns / 1e9),
                epochs=now.epochs - before.epochs,
                workers=work.worker_count,
                slots=work.slots,
                slots_lent=work.slots_lent,
                slots_ready=work.slots_ready,
            )
        )
    return found


def worker_shares(looks: Sequence[Look]) -> list[WorkerShares]:
    """Return what each of the latest look's workers did since the first look that has it, by number."""
    last = looks[-1]
    return [_shares(number, looks) for number in sorted(last.work.workers)]


def _shares(number: int, looks: Sequence[Look]) -> WorkerShares:
    last = looks[-1]
    now = last.work.workers[number]
    first = next(look for look in looks if (seen := look.work.workers.get(number)) is not None and seen.pid == now.pid)
    seconds = (last.now_ns - first.now_ns) / 1e9
    if seconds <= 0:
        return WorkerShares(number, now.pid or None, now.workers, None, None, None, None)
    new = now.since(first.work.workers[number])
    counted_ns = new.busy_ns + new.idle_ns
    busy_share = min(1.0, max(0.0, new.busy_ns / counted_ns)) if counted_ns > 0 else None
    if not now.pid:
        return WorkerShares(number, None, now.workers, None, busy_share, None, None)
    return WorkerShares(
        number, now.pid, now.workers, new.samples, busy_share, new.cpu_s / seconds, new.read_bytes / seconds
    )
