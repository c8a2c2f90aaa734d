"""Says why a setting is recommended, and what else the measurements show; pure functions to sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loaderpool.settings.groups import MAX_THREADS
from loaderpool.system.readable import counted
from loaderpool.tools.tuning.ideal import THREADS_ABOVE_CPUS
from loaderpool.tools.tuning.window import Measurement
from loaderpool.trainer.explain.thresholds import (
    BLOCKS_BELOW,
    CHEAP_BATCH_S,
    COMPUTES_ABOVE,
    CONTESTED,
    FULL,
    HEAVY_BYTES_PER_S,
    SLOWED_DOWN,
)

# Rounds further apart than this leave the difference between neighbouring counts open.
_NOISY = 0.15
# A count that costs this much less CPU time per sample than another got its work cheaper, and not by chance.
_CHEAPER = 0.95
# A larger step from the last count but one to the last says that the end is not reached.
_STILL_GROWS = 1.1


def describe_ideal(ascending: Sequence[Measurement], unit: Measurement, cpus: int, share: float, in_turns: bool) -> str:
    """Which ideal it is, and what decided it.

    Args:
        ascending: all measurements, the smallest setting first.
        unit: the measurement whose rate counts as that of one process.
        cpus: CPUs that may be used.
        share: the function's `cpu_share`.
        in_turns: whether the threads of a worker compute in turns.
    """
    base = ascending[0]
    text = _which_ideal(base, {each.setting.threads for each in ascending if each.workers}, cpus, share, in_turns)
    if unit is not base:
        ratio = unit.samples_per_s / base.samples_per_s
        text += f"; one process counts as {unit.setting.label}, {ratio:.2f} times as fast as {base.setting.label}"
    return text


def _which_ideal(base: Measurement, threads: set[int], cpus: int, share: float, in_turns: bool) -> str:
    has_threads = max(threads, default=1) > 1
    if has_threads and share < COMPUTES_ABOVE:
        their = f"their {max(threads)} threads" if len(threads) == 1 else "their threads"
        computes = f"a call alone computes {share:.0%} of the time, as far as {base.setting.label} tell"
        until = "computing fills the CPUs" + (", or all of a worker's time" if in_turns else "")
        return f"workers times {their}, as the function blocks ({computes}), until {until}"
    measured = f"{base.setting.label} computed {share:.0%} of the time"
    if share >= COMPUTES_ABOVE:
        if has_threads and not in_turns:
            return (
                f"min(workers times their threads, CPUs), as the function computes outside of Python's lock: {measured}"
            )
        return f"min(workers, CPUs), as the function is CPU-bound: {measured}"
    if share < BLOCKS_BELOW:
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
    who, other = most.setting.label, unit.setting.label
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
    ascending: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float, in_turns: bool
) -> str:
    """Why `chosen` is the one to use, as a sentence.

    Args:
        ascending: all measurements, the smallest setting first.
        chosen: the one that is recommended.
        best: the fastest one.
        cpus: CPUs that may be used.
        share: the function's `cpu_share`.
        in_turns: whether the threads of a worker compute in turns.
    """
    if len(ascending) == 1:
        return "it is the only number that was measured"
    if chosen.workers == 0:
        return _reason_for_none(ascending, chosen, best, cpus)
    ratios = [
        f"{chosen.samples_per_s / each.samples_per_s:.2f} times {{}} of {each.setting.label}"
        for each in (_with_fewer_workers(ascending, chosen), _with_fewer_threads(ascending, chosen))
        if each is not None
    ]
    gain = " and ".join(ratios).replace("{}", "the rate", 1).replace("{}", "that")
    gain = gain or "the smallest number that was measured"
    if chosen.workers > cpus and share < COMPUTES_ABOVE:
        return (
            f"more workers than the {_cpus(cpus)} help, because the function waits {1 - share:.0%} of its time: {gain}"
        )
    names_threads = chosen.setting.names_threads
    if chosen is ascending[-1]:
        return f"the largest {'setting' if names_threads else 'number'} measured is the fastest: {gain}"
    beyond = f"more workers {'or threads ' * names_threads}bring less than 5 %"
    if _wanted_cpus(best) >= FULL * cpus:
        return f"{gain}; {beyond}, as {'both CPUs are' if cpus == 2 else f'the {_cpus(cpus)} {_is(cpus)}'} full"
    if best.best.own_cpu_s / best.best.elapsed_s >= FULL:
        return f"{gain}; {beyond}, as this process is busy handing over batches: larger ones cost it less per sample"
    computed = best.best.workers_cpu_s / best.best.elapsed_s
    if in_turns and best.setting.threads > 1 and computed >= FULL * best.workers:
        return f"{gain}; {beyond}, as the threads of a worker compute in turns, which takes all of its time"
    return (
        f"{gain}; {beyond}, although only {best.cpu_use:.1f} of {_cpus(cpus)} {_is(cpus)} in use: something that the "
        "workers share is the limit (disk, network, a lock)"
    )


def _with_fewer_workers(ascending: Sequence[Measurement], than: Measurement) -> Measurement | None:
    """The next smaller number of workers with as many threads, of which 0 workers have none."""
    fewer = [each for each in ascending if each.workers < than.workers]
    return next(
        (each for each in reversed(fewer) if each.setting.threads == than.setting.threads or not each.workers), None
    )


def _with_fewer_threads(ascending: Sequence[Measurement], than: Measurement) -> Measurement | None:
    """The next smaller number of threads with as many workers."""
    fewer = [each for each in ascending if each.setting < than.setting and each.workers == than.workers]
    return fewer[-1] if fewer else None


def _reason_for_none(ascending: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int) -> str:
    window = chosen.best
    if window.cpu_use > THREADS_ABOVE_CPUS:
        return (
            f"the function uses {window.cpu_use:.1f} CPUs by itself, with threads of its own (BLAS, OpenMP, OpenCV); "
            "workers run with one thread each and gain nothing over that"
        )
    if window.batch_s < CHEAP_BATCH_S:
        return (
            f"the function is so cheap ({_time(window.batch_s)} a batch) that handing batches over from workers costs "
            "as much as they gain"
        )
    if cpus == 1:
        return "there is one CPU only, on which workers can but take turns with this process"
    contested = _contested(ascending, cpus)
    # Only where the time spent waiting for a CPU is what is missing.
    if contested and contested.samples_per_s / (1 - _queued_share(contested)) > 1.05 * chosen.samples_per_s:
        return (
            f"workers gained less than 5 %, on a machine that other processes kept busy: {contested.setting.label} "
            f"waited for a CPU {_queued_share(contested):.0%} of the time, using {contested.cpu_use:.1f} of {cpus}; "
            "measure again when it is quiet"
        )
    return (
        f"workers gain less than 5 % ({best.samples_per_s / chosen.samples_per_s:.2f} times the rate at best): "
        "something that they share is the limit (memory bandwidth, disk, network, a lock)"
    )


def give_notes(
    ascending: Sequence[Measurement], chosen: Measurement, best: Measurement, cpus: int, share: float, in_turns: bool
) -> Iterator[str]:
    """What else the measurements show, a sentence or two each; arguments as for `give_reason`."""
    yield from _notes_on_slow_work(ascending)
    yield from _notes_on_crowding(ascending, cpus, share)
    if ascending[-1] is best:
        yield from _notes_on_growth(ascending, cpus, share)
    most = max(ascending, key=lambda each: each.setting.threads)
    has_more = most.setting.names_threads and most.setting.threads > chosen.setting.threads == 1
    if has_more and chosen.workers and share >= COMPUTES_ABOVE and in_turns:
        yield "Threads gain nothing here: the function computes, and the threads of a worker compute in turns."
    cpus_used = ascending[0].best.cpu_use
    if ascending[0].workers == 0 and cpus_used > THREADS_ABOVE_CPUS and chosen.workers:
        yield (
            f"With 0 workers the function uses {cpus_used:.1f} CPUs, with threads of its own (BLAS, OpenMP, OpenCV); "
            "workers run with one thread each, so the speed-up over 0 workers is smaller than the number of workers."
        )
    if chosen.workers == 0 and len(ascending) > 1:
        other = max(ascending[1:], key=lambda each: each.samples_per_s)
        yield (
            f"0 workers make batches in the training process, between its steps. {other.setting.label} reached "
            f"{other.samples_per_s / chosen.samples_per_s:.0%} of that rate and would work beside the steps."
        )
    contested = _contested(ascending, cpus)
    if contested and chosen.workers:
        yield (
            f"Other processes used the CPUs too: {contested.setting.label} waited for one "
            f"{_queued_share(contested):.0%} of the time. A quiet machine gives other rates."
        )
    spread = max(chosen.spread, best.spread)
    if spread > _NOISY:
        yield (
            f"The rounds differ by {spread:.0%}, so the machine is busy or the work uneven: a larger --seconds and a "
            "quiet machine give a surer answer."
        )


def _notes_on_growth(ascending: Sequence[Measurement], cpus: int, share: float) -> Iterator[str]:
    """The largest setting is the fastest: where to look further."""
    last = ascending[-1]
    workers, threads = last.setting.workers, last.setting.threads

    def grew(since: Measurement | None) -> bool:
        return since is not None and last.samples_per_s >= _STILL_GROWS * since.samples_per_s

    if grew(_with_fewer_threads(ascending, last)) and threads < MAX_THREADS:
        more = sorted({threads, *(min(MAX_THREADS, factor * threads) for factor in (2, 4))})
        yield f"The rate still grows at {last.setting.label}: --threads {','.join(map(str, more))} looks further."
    elif grew(_with_fewer_workers(ascending, last)):
        if workers > cpus or share < COMPUTES_ABOVE:
            more = [ascending[0].workers, workers, 2 * workers, 4 * workers]
            yield f"The rate still grows at {last.setting.label}: --workers {','.join(map(str, more))} looks further."
        elif workers < cpus:
            yield f"The rate still grows at {last.setting.label}, and there are {_cpus(cpus)}: measure up to these."


def _notes_on_slow_work(ascending: Sequence[Measurement]) -> Iterator[str]:
    base, window = ascending[0].setting, ascending[0].best
    sample_s = window.elapsed_s * base.calls / window.samples
    longest = max((each.best for each in ascending), key=lambda window: window.elapsed_s)
    if sample_s > window.wanted_s:
        what = f"A single sample takes {_time(sample_s)}"
    elif longest.elapsed_s >= 2 * longest.wanted_s and window.batch_s * base.processes > window.wanted_s:
        what = f"A batch takes {_time(window.batch_s * base.processes)}"
    else:
        return
    fewest = min(each.best.batches for each in ascending)
    yield (
        f"{what}, longer than the {_time(window.wanted_s)} of one measurement: some rates rest on {fewest} "
        f"batch{'es' * (fewest != 1)}. A larger --seconds makes them surer."
    )


def _notes_on_crowding(ascending: Sequence[Measurement], cpus: int, share: float) -> Iterator[str]:
    """Workers that compute without getting further: they wait for memory, which counts as CPU time."""
    fewest = min((each.setting.threads for each in ascending if each.workers), default=1)  # more disturb each other
    within = [
        each for each in ascending if each.workers <= cpus and (each.setting.threads == fewest or not each.workers)
    ]
    if len(within) < 2 or share < COMPUTES_ABOVE or within[-1].best.batch_s * within[-1].workers < CHEAP_BATCH_S:
        return
    few, many = within[1] if within[0].workers == 0 and len(within) > 2 else within[0], within[-1]
    growth = _cpu_s_per_sample(many) / _cpu_s_per_sample(few)
    if growth < SLOWED_DOWN or few.best.cpu_use > THREADS_ABOVE_CPUS * few.setting.processes:
        return
    text = f"With {many.setting.label} a sample costs {growth:.2f} times the CPU time it costs with {few.workers}"
    if many.best.bytes_per_s >= HEAVY_BYTES_PER_S:
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


def _contested(ascending: Sequence[Measurement], cpus: int) -> Measurement | None:
    """The measurement that waited most for CPUs which others had: it left some unused, and yet had to wait."""
    robbed = [each for each in ascending if each.workers <= cpus and each.cpu_use < FULL * cpus]
    worst = max(robbed, key=_queued_share, default=None)
    return worst if worst is not None and _queued_share(worst) > CONTESTED else None


def _queued_share(measurement: Measurement) -> float:
    return measurement.best.queued_s / (measurement.best.elapsed_s * measurement.setting.processes)


def _cpu_s_per_sample(measurement: Measurement) -> float:
    window = measurement.best
    cpu_s = window.workers_cpu_s if measurement.workers else window.own_cpu_s
    return max(cpu_s, 1e-9) / max(window.samples, 1)


def _cpus(cpus: int) -> str:
    return counted(cpus, "CPU")


def _is(cpus: int) -> str:
    return "is" if cpus == 1 else "are"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
