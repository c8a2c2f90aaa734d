"""Which number of workers to use, and why: pure functions over measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from loaderpool.errors import ArgumentError
from loaderpool.tuning.measure import Measurement

__all__ = ["Comparison", "Recommendation", "cpu_share", "ideal_speedup", "recommend"]

# A count this close to the fastest is as good: each worker costs memory, and CPU time that the training wants too.
# Smaller, noise decides; larger, throughput is given away.
_TOLERANCE = 0.05
# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
_COMPUTES_ABOVE = 0.75
# Below this share it hardly computes at all.
_WAITS_BELOW = 0.25
# Of all CPUs (or of one, for this process): the part from which on they are full. The machine has other things to do.
_FULL = 0.85
# A function with one thread uses at most one CPU; the margin is for this process's own other threads.
_THREADS_ABOVE_CPUS = 1.3
# From here on, CPU time per sample grew because of the other workers and not by chance.
_SLOWED_DOWN = 1.25
# Rounds further apart than this leave the difference between neighbouring counts open.
_NOISY = 0.15
# A larger step from the last count but one to the last says that the end is not reached.
_STILL_GROWS = 1.1
# A batch in less time costs about as much to hand over (some 20 µs to 100 µs) as to make.
_CHEAP_BATCH_S = 300e-6
# One core copies some GB a second, a machine some ten of them; a function touches each delivered byte several times.
_HEAVY_BYTES_PER_S = 0.5e9


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One count beside the smallest that was measured, and beside what would be ideal."""

    measurement: Measurement
    speedup: float  # samples per second over those of the smallest count
    ideal_speedup: float  # what it would be if workers did not get in each other's way

    @property
    def share_of_ideal(self) -> float:
        """How much of the ideal was reached; 1.0 for all of it."""
        return self.speedup / self.ideal_speedup


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A number of workers, with the reason and with what else the measurements show."""

    workers: int  # how many to use
    reason: str  # why, in a sentence
    notes: tuple[str, ...]  # what else to know, a sentence each
    ideal: str  # which ideal the comparisons are with, and what decided it
    comparisons: tuple[Comparison, ...]  # by number of workers, ascending


def cpu_share(base: Measurement, cpus: int) -> float:
    """The share of its time that the function computes, 0.0 to 1.0; the rest it waits.

    Args:
        base: the measurement of the fewest workers, which disturb each other least.
        cpus: CPUs there are.
    """
    window = base.best
    cpu_s = window.workers_cpu_s if base.workers else window.own_cpu_s
    share = cpu_s / window.elapsed_s / max(1, min(base.workers, cpus))
    return min(1.0, share)


def ideal_speedup(workers: int, cpus: int, share: float) -> float:
    """The speed-up over one process that `workers` could reach: until their computing fills the CPUs.

    For a function that only computes this is `min(workers, cpus)`, for one that only waits it is `workers`.

    Args:
        workers: 0 counts as one process, this one.
        cpus: CPUs there are.
        share: the function's `cpu_share`.
    """
    processes = max(1, workers)
    if share >= _COMPUTES_ABOVE:
        return float(min(processes, cpus))
    return min(float(processes), cpus / share) if share > 0 else float(processes)


def recommend(measurements: Sequence[Measurement], cpus: int) -> Recommendation:
    """The smallest number of workers whose rate is within 5 % of the best one.

    Args:
        measurements: of different numbers of workers, at least one.
        cpus: CPUs that may be used, at least 1.

    Raises:
        ArgumentError: there are no measurements.
    """
    if not measurements:
        raise ArgumentError("measurements is empty: measure at least one number of workers")
    by_count = sorted(measurements, key=lambda each: each.workers)
    base = by_count[0]
    best = max(by_count, key=lambda each: each.samples_per_s)
    chosen = next(each for each in by_count if each.samples_per_s >= (1 - _TOLERANCE) * best.samples_per_s)
    share = cpu_share(base, cpus)
    base_ideal = ideal_speedup(base.workers, cpus, share)
    return Recommendation(
        workers=chosen.workers,
        reason=_reason(by_count, chosen, best, cpus, share),
        notes=tuple(_notes(by_count, chosen, best, cpus, share)),
        ideal=_describe_ideal(base, cpus, share),
        comparisons=tuple(
            Comparison(
                each,
                each.samples_per_s / base.samples_per_s,
                ideal_speedup(each.workers, cpus, share) / base_ideal,
            )
            for each in by_count
        ),
    )


def _describe_ideal(base: Measurement, cpus: int, share: float) -> str:
    measured = f"{_count(base.workers)} computed {share:.0%} of the time"
    if share >= _COMPUTES_ABOVE:
        return f"min(workers, CPUs), as the function is CPU-bound: {measured}"
    if share < _WAITS_BELOW:
        limit = f", up to the {cpus / share:.0f} whose computing would fill the CPUs" if share > 0.01 else ""
        return f"workers, as the function blocks (I/O, sleep, a lock): {measured}{limit}"
    return f"min(workers, CPUs / {share:.2f}), as the function partly computes and partly blocks: {measured}"


def _reason(by_count: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float) -> str:
    if len(by_count) == 1:
        return "it is the only number that was measured"
    if chosen.workers == 0:
        return _reason_for_none(chosen, best, cpus)
    fewer = [each for each in by_count if each.workers < chosen.workers]
    gain = "the smallest number that was measured"
    if fewer:
        gain = f"{chosen.samples_per_s / fewer[-1].samples_per_s:.2f} times the rate of {_count(fewer[-1].workers)}"
    if chosen.workers > cpus and share < _COMPUTES_ABOVE:
        return (
            f"more workers than the {_cpus(cpus)} help, because the function spends {1 - share:.0%} of its time waiting: "
            f"{gain}"
        )
    if chosen is by_count[-1]:
        return f"the largest number measured is the fastest: {gain}"
    beyond = "more workers bring less than 5 %"
    if best.cpu_use >= _FULL * cpus:
        return f"{gain}; {beyond}, as {'both CPUs are' if cpus == 2 else f'the {_cpus(cpus)} {_is(cpus)}'} full"
    if best.best.own_cpu_s / best.best.elapsed_s >= _FULL:
        return f"{gain}; {beyond}, as this process is busy handing over batches: larger ones cost it less per sample"
    return (
        f"{gain}; {beyond}, although only {best.cpu_use:.1f} of {_cpus(cpus)} {_is(cpus)} in use: something that the "
        "workers share is the limit (disk, network, a lock)"
    )


def _reason_for_none(chosen: Measurement, best: Measurement, cpus: int) -> str:
    window = chosen.best
    if window.cpu_use > _THREADS_ABOVE_CPUS:
        return (
            f"the function uses {window.cpu_use:.1f} CPUs by itself, with threads of its own (BLAS, OpenMP, OpenCV); "
            "workers run with one thread each and gain nothing over that"
        )
    if window.batch_s < _CHEAP_BATCH_S:
        return (
            f"the function is so cheap ({_time(window.batch_s)} a batch) that handing batches over from workers costs "
            "as much as they gain"
        )
    if cpus == 1:
        return "there is one CPU only, on which workers can but take turns with this process"
    return (
        f"workers gain less than 5 % ({best.samples_per_s / chosen.samples_per_s:.2f} times the rate at best): "
        "something that they share is the limit (memory bandwidth, disk, network, a lock)"
    )


def _notes(
    by_count: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float
) -> Iterator[str]:
    yield from _notes_on_slow_work(by_count)
    yield from _notes_on_crowding(by_count, cpus, share)
    last = by_count[-1]
    if len(by_count) > 1 and last is best and last.samples_per_s >= _STILL_GROWS * by_count[-2].samples_per_s:
        if last.workers > cpus or share < _COMPUTES_ABOVE:
            more = f"{last.workers},{2 * last.workers},{4 * last.workers}"
            yield f"The rate still grows at {_count(last.workers)}: --workers {by_count[0].workers},{more} looks further."
        elif last.workers < cpus:
            yield f"The rate still grows at {_count(last.workers)}, and there are {_cpus(cpus)}: measure up to these."
    threads = by_count[0].best.cpu_use
    if by_count[0].workers == 0 and threads > _THREADS_ABOVE_CPUS and chosen.workers:
        yield (
            f"With 0 workers the function uses {threads:.1f} CPUs, with threads of its own (BLAS, OpenMP, OpenCV); "
            "workers run with one thread each, so the speed-up over 0 workers is smaller than the number of workers."
        )
    if chosen.workers == 0 and len(by_count) > 1:
        other = max(by_count[1:], key=lambda each: each.samples_per_s)
        yield (
            f"0 workers make batches in the training process, between its steps. {_count(other.workers)} reached "
            f"{other.samples_per_s / chosen.samples_per_s:.0%} of that rate and would work beside the steps."
        )
    spread = max(chosen.spread, best.spread)
    if spread > _NOISY:
        yield (
            f"The rounds differ by {spread:.0%}, so the machine is busy or the work uneven: a larger --seconds and a "
            "quiet machine give a surer answer."
        )


def _notes_on_slow_work(by_count: Sequence[Measurement]) -> Iterator[str]:
    processes, window = max(1, by_count[0].workers), by_count[0].best
    sample_s = window.elapsed_s * processes / window.samples
    longest = max((each.best for each in by_count), key=lambda window: window.elapsed_s)
    if sample_s > window.wanted_s:
        what = f"A single sample takes {_time(sample_s)}"
    elif longest.elapsed_s >= 2 * longest.wanted_s:
        what = f"A batch takes {_time(window.batch_s * processes)}"
    else:
        return
    fewest = min(each.best.batches for each in by_count)
    yield (
        f"{what}, longer than the {_time(window.wanted_s)} of one measurement: some rates rest on {fewest} "
        f"batch{'es' * (fewest != 1)}. A larger --seconds makes them surer."
    )


def _notes_on_crowding(by_count: Sequence[Measurement], cpus: int, share: float) -> Iterator[str]:
    """Workers that compute without getting further: they wait for memory, which counts as CPU time."""
    within = [each for each in by_count if each.workers <= cpus]
    if len(within) < 2 or share < _COMPUTES_ABOVE:
        return
    few, many = within[1] if within[0].workers == 0 and len(within) > 2 else within[0], within[-1]
    growth = _cpu_s_per_sample(many) / _cpu_s_per_sample(few)
    if growth < _SLOWED_DOWN or few.best.cpu_use > _THREADS_ABOVE_CPUS * max(1, few.workers):
        return
    text = f"With {_count(many.workers)} a sample costs {growth:.2f} times the CPU time that it costs with {few.workers}"
    if many.best.bytes_per_s >= _HEAVY_BYTES_PER_S:
        yield (
            f"{text}: memory bandwidth is full, most likely ({many.best.bytes_per_s / 1e9:.1f} GB/s of finished batches, "
            "each byte read and written several times). Smaller dtypes (uint8 rather than float32) and an `out` "
            "parameter help more than workers."
        )
    else:
        yield f"{text}: the workers slow each other down, by shared caches, memory bandwidth or hyper-threads."


def _cpu_s_per_sample(measurement: Measurement) -> float:
    window = measurement.best
    cpu_s = window.workers_cpu_s if measurement.workers else window.own_cpu_s
    return max(cpu_s, 1e-9) / max(window.samples, 1)


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _cpus(cpus: int) -> str:
    return f"{cpus} CPU{'s' * (cpus != 1)}"


def _is(cpus: int) -> str:
    return "is" if cpus == 1 else "are"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
