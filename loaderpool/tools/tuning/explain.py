"""Says why a number of workers is recommended, and what else the measurements show; pure functions to sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loaderpool.tools.tuning.ideal import COMPUTES_ABOVE
from loaderpool.tools.tuning.window import Measurement

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
# Waiting for a CPU while some are used by others: below this it is the ordinary turn-taking of a few processes.
_CONTESTED = 0.15
# A count that costs this much less CPU time per sample than another got its work cheaper, and not by chance.
_CHEAPER = 0.95
# A larger step from the last count but one to the last says that the end is not reached.
_STILL_GROWS = 1.1
# A batch in less time costs about as much to hand over (some 20 µs to 100 µs) as to make.
_CHEAP_BATCH_S = 300e-6
# One core copies some GB a second, a machine some ten of them; a function touches each delivered byte several times.
_HEAVY_BYTES_PER_S = 0.5e9


def describe_ideal(base: Measurement, unit: Measurement, cpus: int, share: float, threads: int = 1) -> str:
    """Which ideal it is, and what decided it.

    Args:
        base: the measurement of the fewest workers.
        unit: the measurement whose rate counts as that of one process.
        cpus: CPUs that may be used.
        share: the function's `cpu_share`, taken from `base`.
        threads: calls that a worker makes at the same time.
    """
    text = _which_ideal(base, cpus, share, threads)
    if unit is not base:
        ratio = unit.samples_per_s / base.samples_per_s
        text += f"; one process counts as {_count(unit.workers)}, {ratio:.2f} times as fast as {_count(base.workers)}"
    return text


def _which_ideal(base: Measurement, cpus: int, share: float, threads: int) -> str:
    if threads > 1 and share < COMPUTES_ABOVE:
        computes = f"a call alone computes {share:.0%} of the time, as far as {_count(base.workers)} tell"
        return (
            f"workers times their {threads} threads, as the function blocks ({computes}), until computing fills the "
            "CPUs, or all of a worker's time"
        )
    measured = f"{_count(base.workers)} computed {share:.0%} of the time"
    if share >= COMPUTES_ABOVE:
        return f"min(workers, CPUs), as the function is CPU-bound: {measured}"
    if share < _WAITS_BELOW:
        limit = f", up to the {cpus / share:.0f} whose computing would fill the CPUs" if share > 0.01 else ""
        return f"workers, as the function blocks (I/O, sleep, a lock): {measured}{limit}"
    return f"min(workers, CPUs / {share:.2f}), as the function partly computes and partly blocks: {measured}"


def explain_excess(above: Mapping[Measurement, float], unit: Measurement) -> str:
    """Why some number of workers has more than 100 % of the ideal, as a sentence.

    Args:
        above: the share of each that has.
        unit: the measurement whose rate counts as that of one process.
    """
    most = max(above, key=lambda each: above[each])
    excess, spread = above[most] - 1, max(most.spread, unit.spread)
    who, other = _count(most.workers), _count(unit.workers)
    begins = f"above 100 % because the ideal rests on the rate of {other}, which was low: "
    cost = _cpu_s_per_sample(most) / _cpu_s_per_sample(unit)
    if spread >= excess / 2:
        return f"{begins}the rounds differ by {spread:.0%}, so that this may be chance"
    if _queued_share(unit) >= excess / 2:
        return f"{begins}other processes had the CPUs for {_queued_share(unit):.0%} of its time"
    if cost <= _CHEAPER:
        return (
            f"{begins}with {who} a sample cost {1 - cost:.0%} less CPU time, as when files or the function's own "
            "caches are in memory by then, or the CPU runs faster"
        )
    return f"{begins}with {who} a sample waited less, as for a disk or a server that has the data ready by then"


def give_reason(
    by_count: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float
) -> str:
    """Why `chosen` is the one to use, as a sentence.

    Args:
        by_count: all measurements, ascending.
        chosen: the one that is recommended.
        best: the fastest one.
        cpus: CPUs that may be used.
        share: the function's `cpu_share`.
    """
    if len(by_count) == 1:
        return "it is the only number that was measured"
    if chosen.workers == 0:
        return _reason_for_none(by_count, chosen, best, cpus)
    fewer = [each for each in by_count if each.workers < chosen.workers]
    gain = "the smallest number that was measured"
    if fewer:
        gain = f"{chosen.samples_per_s / fewer[-1].samples_per_s:.2f} times the rate of {_count(fewer[-1].workers)}"
    if chosen.workers > cpus and share < COMPUTES_ABOVE:
        return (
            f"more workers than the {_cpus(cpus)} help, because the function waits {1 - share:.0%} of its time: {gain}"
        )
    if chosen is by_count[-1]:
        return f"the largest number measured is the fastest: {gain}"
    beyond = "more workers bring less than 5 %"
    if _wanted_cpus(best) >= _FULL * cpus:
        return f"{gain}; {beyond}, as {'both CPUs are' if cpus == 2 else f'the {_cpus(cpus)} {_is(cpus)}'} full"
    if best.best.own_cpu_s / best.best.elapsed_s >= _FULL:
        return f"{gain}; {beyond}, as this process is busy handing over batches: larger ones cost it less per sample"
    return (
        f"{gain}; {beyond}, although only {best.cpu_use:.1f} of {_cpus(cpus)} {_is(cpus)} in use: something that the "
        "workers share is the limit (disk, network, a lock)"
    )


def _reason_for_none(by_count: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int) -> str:
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
    contested = _contested(by_count, cpus)
    # Only where the time spent waiting for a CPU is what is missing.
    if contested and contested.samples_per_s / (1 - _queued_share(contested)) > 1.05 * chosen.samples_per_s:
        return (
            f"workers gained less than 5 %, on a machine that other processes kept busy: {_count(contested.workers)} "
            f"waited for a CPU {_queued_share(contested):.0%} of the time, using {contested.cpu_use:.1f} of {cpus}; "
            "measure again when it is quiet"
        )
    return (
        f"workers gain less than 5 % ({best.samples_per_s / chosen.samples_per_s:.2f} times the rate at best): "
        "something that they share is the limit (memory bandwidth, disk, network, a lock)"
    )


def give_notes(
    by_count: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float, threads: int = 1
) -> Iterator[str]:
    """What else the measurements show, a sentence or two each; arguments as for `give_reason`."""
    yield from _notes_on_slow_work(by_count, threads)
    yield from _notes_on_crowding(by_count, cpus, share)
    last = by_count[-1]
    if len(by_count) > 1 and last is best and last.samples_per_s >= _STILL_GROWS * by_count[-2].samples_per_s:
        if last.workers > cpus or share < COMPUTES_ABOVE:
            more = f"{by_count[0].workers},{last.workers},{2 * last.workers},{4 * last.workers}"
            yield f"The rate still grows at {_count(last.workers)}: --workers {more} looks further."
        elif last.workers < cpus:
            yield f"The rate still grows at {_count(last.workers)}, and there are {_cpus(cpus)}: measure up to these."
    cpus_used = by_count[0].best.cpu_use
    if by_count[0].workers == 0 and cpus_used > _THREADS_ABOVE_CPUS and chosen.workers:
        yield (
            f"With 0 workers the function uses {cpus_used:.1f} CPUs, with threads of its own (BLAS, OpenMP, OpenCV); "
            "workers run with one thread each, so the speed-up over 0 workers is smaller than the number of workers."
        )
    if chosen.workers == 0 and len(by_count) > 1:
        other = max(by_count[1:], key=lambda each: each.samples_per_s)
        yield (
            f"0 workers make batches in the training process, between its steps. {_count(other.workers)} reached "
            f"{other.samples_per_s / chosen.samples_per_s:.0%} of that rate and would work beside the steps."
        )
    contested = _contested(by_count, cpus)
    if contested and chosen.workers:
        yield (
            f"Other processes used the CPUs too: {_count(contested.workers)} waited for one "
            f"{_queued_share(contested):.0%} of the time. A quiet machine gives other rates."
        )
    spread = max(chosen.spread, best.spread)
    if spread > _NOISY:
        yield (
            f"The rounds differ by {spread:.0%}, so the machine is busy or the work uneven: a larger --seconds and a "
            "quiet machine give a surer answer."
        )


def _notes_on_slow_work(by_count: Sequence[Measurement], threads: int) -> Iterator[str]:
    processes, window = max(1, by_count[0].workers), by_count[0].best
    sample_s = window.elapsed_s * (by_count[0].workers * threads or 1) / window.samples
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
    if len(within) < 2 or share < COMPUTES_ABOVE or within[-1].best.batch_s * within[-1].workers < _CHEAP_BATCH_S:
        return
    few, many = within[1] if within[0].workers == 0 and len(within) > 2 else within[0], within[-1]
    growth = _cpu_s_per_sample(many) / _cpu_s_per_sample(few)
    if growth < _SLOWED_DOWN or few.best.cpu_use > _THREADS_ABOVE_CPUS * max(1, few.workers):
        return
    text = f"With {_count(many.workers)} a sample costs {growth:.2f} times the CPU time it costs with {few.workers}"
    if many.best.bytes_per_s >= _HEAVY_BYTES_PER_S:
        yield (
            f"{text}: most likely memory bandwidth is full ({many.best.bytes_per_s / 1e9:.1f} GB/s of finished "
            "batches, each byte read and written several times). Smaller dtypes (uint8 rather than float32) and an "
            "`out` parameter help more than workers."
        )
    else:
        yield f"{text}: the workers slow each other down, by shared caches, memory bandwidth or hyper-threads."


def _wanted_cpus(measurement: Measurement) -> float:
    """CPUs in use, and those that were waited for."""
    return measurement.cpu_use + measurement.best.queued_s / measurement.best.elapsed_s


def _contested(by_count: Sequence[Measurement], cpus: int) -> Measurement | None:
    """The measurement that waited most for CPUs which others had: it left some unused, and yet had to wait."""
    robbed = [each for each in by_count if each.workers <= cpus and each.cpu_use < _FULL * cpus]
    worst = max(robbed, key=_queued_share, default=None)
    return worst if worst is not None and _queued_share(worst) > _CONTESTED else None


def _queued_share(measurement: Measurement) -> float:
    return measurement.best.queued_s / (measurement.best.elapsed_s * max(1, measurement.workers))


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
