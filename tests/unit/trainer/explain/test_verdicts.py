"""The verdict of a window: a typical window for each verdict, and neighbors on both sides of
thresholds.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from typing import Any

import pytest

import loaderpool
from loaderpool import Buckets, Limits, Loader, Packed, TokenBudget
from loaderpool.trainer.explain.verdicts import Verdict, find_verdict
from loaderpool.trainer.explain.window import Autotuned, Decision, Pace, Window
from tests.support.trainings import BLOCKING, COMPUTING, MIXED, Training, idle, slowed, times

V = Verdict
FULL = Training(sample_cpu_s=24e-3, cpus=4)  # none of four CPUs is free
CACHED: dict[str, Any] = {"items_to_cache": 10_000, "room_bytes": 4 << 30}  # 1.5 GB
TINY = Training(step_s=150e-6, batch=32, sample_cpu_s=1e-6, step_cpu_s=100e-6)
IN_VAIN = Autotuned(32, (Decision(0.0, 4, 8, ""), Decision(1.0, 8, 4, "")))
WIDE = Training(step_s=2e-3, batch=256, sample_cpu_s=60e-6, step_cpu_s=0.5e-3)


def with_waits(window: Window, share: float) -> Window:
    """Return the same window with these waits of the consumer, and less time of its own."""
    return dataclasses.replace(
        window, wait_s=share * window.seconds, ready_steps=0, ready_steps_s=0.0
    )


def verdict(window: Window) -> Verdict:
    return find_verdict(window).verdict


# -- a typical window for each verdict

TYPICAL: dict[Verdict, Window] = {
    Verdict.WARM_UP: COMPUTING.window(4, steps=19),
    Verdict.COMPUTE_BOUND: COMPUTING.window(16),
    Verdict.TOO_FEW_WORKERS: COMPUTING.window(4),
    Verdict.CPUS_FULL: FULL.window(4),
    Verdict.SOURCE_WAITS: BLOCKING.window(4),
    Verdict.SOURCE_LIMIT: MIXED.window(
        8, paces=(Pace(4, 320.0), Pace(8, 320.0)), samples=16_000, seconds=50.0
    ),
    Verdict.MEMORY_BANDWIDTH: WIDE.window(
        6, paces=(Pace(2, 33_000.0, 30e-6), Pace(6, 80_000.0, 60e-6))
    ),
    Verdict.MEMORY_LIMIT: idle(slots=4, slots_wanted=19, slot_bytes=400 << 20),
    Verdict.STRAGGLERS: slowed(idle(), 30.0),
    Verdict.BATCH_OVERHEAD: TINY.window(2),
    Verdict.BATCHES_KEPT: idle(slots_lent=27, copied=400),
    Verdict.STREAM_READER: idle(is_stream=True),
    Verdict.NOISY_NEIGHBOUR: COMPUTING.window(16, trainer_queued_s=10.0),
    Verdict.EPOCH_START: idle(epochs=20, epoch_starts_s=35.0),
    Verdict.START_UP: COMPUTING.window(16, seconds=37.5 + 25.0, start_s=25.0, wait_s=25.0),
    Verdict.INCOMPLETE: idle(),
}


@pytest.mark.parametrize("wanted", Verdict, ids=lambda wanted: wanted.name)
def test_each_verdict_is_told_by_its_evidence_in_rates_and_in_spite_of_noise(
    wanted: Verdict,
) -> None:
    window = TYPICAL[wanted]
    found = find_verdict(window)
    assert found.verdict is wanted
    assert found.why
    assert found == find_verdict(dataclasses.replace(window))
    if wanted is not Verdict.WARM_UP:  # a longer window has another verdict
        longer = find_verdict(times(window, 3))
        assert (longer.verdict, longer.change) == (wanted, found.change)
    for noise in (0.98, 1.02):
        noisy = {
            "wait_s": noise * window.wait_s,
            "cpu_s": noise * window.cpu_s,
            "busy_s": noise * window.busy_s,
        }
        assert verdict(dataclasses.replace(window, **noisy)) is wanted


# -- the explanation of each verdict

FEW = Training(sample_cpu_s=6e-3, cpus=8)
HERE, START = Training(sample_cpu_s=24e-3, cpus=8), TYPICAL[Verdict.START_UP]
LIMITED, WIDE_S = TYPICAL[Verdict.SOURCE_LIMIT], WIDE.window(6).seconds
CROWDED = dataclasses.replace(FULL, others=1.5).window(4)
SHORT = Training(step_s=10e-6, batch=256, sample_cpu_s=19e-6, step_cpu_s=10e-6, cpus=1)

MEMORY = {"slots": 4, "slot_bytes": 400 << 20}
COPIES = {"slots_lent": 27, "copied": 500}
UNKNOWN = {"cpu_s": 0.0, "queued_s": 0.0}
MORE_CPUS = {"machine_cpus": 64.0, "machine_cpu_s": HERE.window(4).seconds * 50}
# A validation takes as long as the training. Meanwhile workers are idle, and other programs use no
# more CPUs.
PAUSED = {"elapsed_s": 2 * COMPUTING.window(4).seconds, "idle_s": 4 * COMPUTING.window(4).seconds}
PROFILE = "`loaderpool profile` shows which lines"

# A window, its verdict, a part of the change (None: any), parts of the explanation, and after "!"
# parts that it must not have.
EXPECTED: list[tuple[Any, ...]] = [
    (COMPUTING.window(4, steps=20), V.TOO_FEW_WORKERS, None),
    (with_waits(COMPUTING.window(4), 0.049), V.COMPUTE_BOUND, None),
    (with_waits(COMPUTING.window(4), 0.051), V.TOO_FEW_WORKERS, None),
    (Training(step_s=299e-6, sample_cpu_s=1e-6, step_cpu_s=1e-4).window(2), V.BATCH_OVERHEAD, None),
    (Training(step_s=301e-6, sample_cpu_s=1e-6, step_cpu_s=1e-4).window(2), V.COMPUTE_BOUND, None),
    (
        WIDE.window(6, paces=(Pace(2, 33_000.0, 40e-6),), bytes=int(0.4e9 * WIDE_S)),
        V.TOO_FEW_WORKERS,
        None,
    ),
    (
        WIDE.window(6, paces=(Pace(2, 33_000.0, 40e-6),), bytes=int(0.6e9 * WIDE_S)),
        V.MEMORY_BANDWIDTH,
        None,
    ),
    (
        MIXED.window(6, paces=(Pace(6, 999.0),)),
        V.SOURCE_WAITS,
        None,
    ),  # such a number should not have been slower
    (
        COMPUTING.window(4, queued_s=0.2 * COMPUTING.window(4).busy_s),
        V.CPUS_FULL,
        None,
    ),  # they wait for a CPU
    (idle(slots=27, slots_wanted=32), V.INCOMPLETE, None),
    (slowed(idle(), 0.3 * idle().wait_s), V.INCOMPLETE, None),
    (idle(slots_lent=10, copied=45), V.INCOMPLETE, None),
    (idle(slots_lent=4, copied=100), V.INCOMPLETE, None),
    (idle(epochs=9, epoch_starts_s=0.4 * idle().wait_s), V.INCOMPLETE, None),
    (
        COMPUTING.window(16, seconds=125.0, start_s=25.0, wait_s=32.0),
        V.INCOMPLETE,
        None,
    ),  # more waits come later
    (
        COMPUTING.window(16),
        V.COMPUTE_BOUND,
        "workers=12)",
    ),  # one more than needed for 32 samples of 25 ms in 75 ms
    (COMPUTING.window(12), V.COMPUTE_BOUND, ""),
    (slowed(COMPUTING.window(16), 3.0), V.COMPUTE_BOUND, ""),  # workers that wait hide slow calls
    (Training(sample_cpu_s=1e-6).window(1), V.COMPUTE_BOUND, ""),
    (FEW.window(8, trainer_queued_s=8.0), V.NOISY_NEIGHBOUR, ""),
    (
        dataclasses.replace(FEW, others=5.0).window(8, trainer_queued_s=8.0),
        V.NOISY_NEIGHBOUR,
        "",
        "other programs 5.0",
    ),
    (idle(trainer_queued_s=20.0), V.NOISY_NEIGHBOUR, None),
    (idle(trainer_queued_s=18.0), V.INCOMPLETE, None),  # more measurements are missing
    (
        COMPUTING.window(2, autotuned=Autotuned(32)),
        V.TOO_FEW_WORKERS,
        "",
        "tries 11 workers by itself: about 75 ms",
    ),
    (COMPUTING.window(2, autotuned=Autotuned(8)), V.TOO_FEW_WORKERS, "workers=(1, 11))"),
    (Training(sample_cpu_s=1e-3).window(16, autotuned=Autotuned(32)), V.COMPUTE_BOUND, ""),
    (BLOCKING.window(4), V.SOURCE_WAITS, "threads=6)"),
    (BLOCKING.window(4, lanes=40), V.SOURCE_WAITS, "workers=21)"),
    # threads help only functions that hardly compute
    (MIXED.window(4), V.SOURCE_WAITS, "workers=11)"),
    (FULL.window(4), V.CPUS_FULL, "", PROFILE),
    (
        FULL.window(4, **CACHED),
        V.CPUS_FULL,
        "cache=",
        PROFILE,
        "after the first epoch, at best 75 ms a step",
    ),
    (FULL.window(4, calls_of="batch"), V.CPUS_FULL, "", PROFILE),
    (SHORT.in_process(), V.CPUS_FULL, "batch_fn="),
    (
        dataclasses.replace(SHORT, sample_cpu_s=21e-6).in_process(),
        V.CPUS_FULL,
        "",
    ),  # longer than a call
    (CROWDED, V.CPUS_FULL, None, "of 4 usable CPUs, other programs 1.5. Stop these programs first"),
    (dataclasses.replace(FULL, others=0.3).window(4), V.CPUS_FULL, None, "!Stop"),
    (
        HERE.window(4, **MORE_CPUS),
        V.TOO_FEW_WORKERS,
        None,
        "!other programs",
    ),  # CPUs that others use
    (Training(sample_cpu_s=24e-3, step_cpu_s=75e-3, cpus=1).in_process(), V.CPUS_FULL, None),
    (LIMITED, V.SOURCE_LIMIT, "", "320 with 4"),
    (
        BLOCKING.window(4, autotuned=IN_VAIN),
        V.SOURCE_LIMIT,
        "",
        'no more with the 8 that workers="auto" tried',
    ),
    (BLOCKING.window(4, autotuned=Autotuned(32)), V.SOURCE_WAITS, None),
    (COMPUTING.window(4, autotuned=IN_VAIN), V.TOO_FEW_WORKERS, None),  # CPUs may be free again
    (idle(**MEMORY, slots_wanted=19), V.MEMORY_LIMIT, 'limits=lp.Limits(memory="7600MiB"))'),
    (slowed(idle(slots=4, slots_wanted=20), 30.0), V.STRAGGLERS, None),
    (slowed(idle(deterministic=False), 30.0), V.STRAGGLERS, ""),
    (idle(is_stream=True), V.STREAM_READER, "shards=parts", "read parts of it"),
    (slowed(idle(queued_s=25.0), 30.0), V.INCOMPLETE, None),  # slow calls had no CPU
    (BLOCKING.window(4, lanes=6), V.SOURCE_WAITS, "workers=6)"),
    (
        BLOCKING.window(4, lanes=4),
        V.SOURCE_WAITS,
        "shards=",
        "Only 4 generators run at once",
        "cycle_length",
    ),
    (BLOCKING.in_process(lanes=2), V.TOO_FEW_WORKERS, "workers=2)"),
    (TINY.window(2), V.BATCH_OVERHEAD, "batch_size=128)"),
    (TINY.window(2, by_tf_data=True), V.BATCH_OVERHEAD, "for_keras"),
    (dataclasses.replace(TINY, sample_cpu_s=3e-6).in_process(), V.BATCH_OVERHEAD, "batch_fn="),
    (TINY.window(2, calls_of="batch"), V.BATCH_OVERHEAD, ""),
    (COMPUTING.window(16, **COPIES), V.COMPUTE_BOUND, None),
    (COMPUTING.window(16, **COPIES, copy_s=2.25), V.BATCHES_KEPT, None, "4.5 ms a step"),
    (START, V.START_UP, "", "25 s", "later steps take 75 ms"),
    (COMPUTING.window(4, **PAUSED), V.TOO_FEW_WORKERS, "workers=11)"),
    (COMPUTING.window(4, **UNKNOWN), V.INCOMPLETE, "", "!% of it computing"),
    (COMPUTING.window(16, **UNKNOWN), V.COMPUTE_BOUND, "", "!% of it computing"),
    (idle(seconds=0.0), V.WARM_UP, ""),
]


@pytest.mark.parametrize(
    ("window", "wanted", "change", "parts"), [(*each[:3], each[3:]) for each in EXPECTED]
)
def test_a_window_has_its_verdict(
    window: Window, wanted: Verdict, change: str | None, parts: tuple[str, ...]
) -> None:
    found = find_verdict(window)
    assert found.verdict is wanted
    assert change is None or (change in found.change and bool(change) is bool(found.change))
    text = f"{found.why} {found.expect}"
    assert [each for each in parts if (each.lstrip("!") in text) is each.startswith("!")] == []


@pytest.mark.parametrize("lacking", [{"room_bytes": 2 << 30}, {"items_to_cache": 0}, {"bytes": 0}])
def test_a_cache_is_told_only_where_it_fits(lacking: dict[str, Any]) -> None:
    for window in (
        FULL.window(4, **CACHED),
        dataclasses.replace(TYPICAL[Verdict.SOURCE_LIMIT], **CACHED),
    ):
        found = find_verdict(window)
        assert "cache" in found.change and "10,000 items take 1.4 GiB" in found.expect
        assert "cache" not in find_verdict(dataclasses.replace(window, **lacking)).change


def test_a_limit_of_the_source_shows_where_more_workers_were_tried_in_vain() -> None:
    """More workers were tried, by `workers="auto"` or by hand. Measurements with one number of
    workers show nothing.
    """
    waits = BLOCKING.window(4)
    rate = waits.samples_per_s
    assert verdict(dataclasses.replace(waits, paces=(Pace(8, 1.5 * rate),))) is Verdict.SOURCE_WAITS
    assert (
        verdict(dataclasses.replace(waits, paces=(Pace(8, 1.08 * rate),))) is Verdict.SOURCE_WAITS
    )
    assert (
        verdict(dataclasses.replace(waits, paces=(Pace(8, 1.04 * rate),))) is Verdict.SOURCE_LIMIT
    )
    assert (
        verdict(dataclasses.replace(waits, paces=(Pace(1, 0.96 * rate),))) is Verdict.SOURCE_LIMIT
    )
    found = find_verdict(dataclasses.replace(waits, paces=(Pace(4, rate), Pace(8, 1.03 * rate))))
    assert found.verdict is Verdict.SOURCE_LIMIT
    assert found.change == ""  # advice that has not helped is not repeated
    assert "samples/s with 4 workers" in found.why and "with 8, although CPUs are free" in found.why


def test_memory_bandwidth_shows_where_more_workers_were_tried_in_vain() -> None:
    few = WIDE.window(2)
    rate, cpu_s = few.samples_per_s, few.cpu_s / few.samples
    assert verdict(few) is Verdict.TOO_FEW_WORKERS
    assert find_verdict(few).expect.startswith("if memory bandwidth is not full, ")
    assert (
        verdict(dataclasses.replace(few, paces=(Pace(4, rate, 1.1 * cpu_s),)))
        is Verdict.TOO_FEW_WORKERS
    )
    assert (
        verdict(dataclasses.replace(few, paces=(Pace(4, 2 * rate, 1.5 * cpu_s),)))
        is Verdict.TOO_FEW_WORKERS
    )
    found = find_verdict(dataclasses.replace(few, paces=(Pace(4, rate, 1.5 * cpu_s),)))
    assert found.verdict is Verdict.MEMORY_BANDWIDTH
    assert "With 4 workers a sample costs 1.50 times the CPU time it costs with 2" in found.why


def test_no_change_is_told_that_brings_next_to_nothing() -> None:
    """Two thirds of the waiting cannot be avoided, because these workers use almost all CPUs."""
    slight = Training(step_s=70e-3, batch=32, sample_cpu_s=25e-3, step_cpu_s=1e-3, cpus=11.2)
    window = slight.window(11, ready_steps=0, ready_steps_s=0.0, cpus=13.0)
    assert 0.03 < 1 - slight.step_s / window.step_s < 0.05
    found = find_verdict(window, waits_above=0.02)
    assert (found.verdict, found.change, found.expected_step_s) == (
        Verdict.TOO_FEW_WORKERS,
        "",
        None,
    )
    assert "1.05 times" in found.expect
    assert find_verdict(slight.window(9)).change


@pytest.mark.parametrize(("seconds", "steps"), [(9.9, 500), (25.0, 24)])
def test_what_is_not_clear_yet_is_a_warm_up(seconds: float, steps: int) -> None:
    found = find_verdict(short_of(idle(), seconds, steps))
    assert found.verdict is Verdict.WARM_UP
    assert found.why.endswith(" so far, and 10 s and 200 calls are needed")
    assert verdict(short_of(idle(), 10.1, 500)) is Verdict.INCOMPLETE
    assert verdict(short_of(idle(), 31.0, 24)) is Verdict.INCOMPLETE


def short_of(window: Window, seconds: float, steps: int) -> Window:
    """Return the same shares in this number of seconds, in steps of eight samples."""
    times_s = ("wait_s", "busy_s", "idle_s", "cpu_s", "machine_cpu_s", "trainer_cpu_s")
    factor = seconds / window.seconds
    sums = {name: factor * getattr(window, name) for name in times_s}
    return dataclasses.replace(
        window, seconds=seconds, steps=steps, samples=8 * steps, made=0, ready_steps=0, **sums
    )


def test_slow_calls_are_told_whether_workers_find_time_to_be_idle_or_not() -> None:
    """The verdict does not depend on small changes of the busy share."""
    waits = dataclasses.replace(BLOCKING.window(2), calls=idle().calls)
    for share in (0.8, 0.84, 0.86, 0.95, 1.0):
        assert verdict(slowed(with_busy(waits, share), 0.5 * waits.busy_s)) is Verdict.STRAGGLERS
    assert verdict(slowed(waits, 0.1 * waits.busy_s)) is Verdict.SOURCE_WAITS


def with_busy(window: Window, share: float) -> Window:
    worked_s = window.busy_s + window.idle_s
    return dataclasses.replace(window, busy_s=share * worked_s, idle_s=(1 - share) * worked_s)


def test_tiny_batches_are_told_though_workers_are_busy_and_cpus_are_full() -> None:
    window = TINY.window(2)
    busy = dataclasses.replace(
        window, wait_s=0.6 * window.seconds, busy_s=2 * window.seconds, idle_s=0.0, queued_s=1.8 * window.seconds,
        cpu_s=0.2 * window.seconds, ready_steps=0, made=window.samples,
    )  # fmt: skip
    assert find_verdict(busy).verdict is Verdict.BATCH_OVERHEAD


# -- the change is valid code


def changed() -> list[Window]:
    """Return windows of all possible changes."""
    return [
        *TYPICAL.values(),
        COMPUTING.in_process(),
        COMPUTING.window(2, autotuned=Autotuned(8)),
        dataclasses.replace(TINY, sample_cpu_s=3e-6).in_process(),
        TINY.window(2, by_tf_data=True),
        FULL.window(4, **CACHED),
        idle(is_stream=True),
        idle(epochs=20, epoch_starts_s=35.0, by_tf_data=True),
    ]


CALLABLES: dict[str, Any] = {
    "lp.Loader": Loader, "lp.Loader.from_generator": Loader.from_generator,
    "lp.Limits": Limits, "loader.for_keras": Loader.for_keras,
    "loader.as_dataset": Loader.as_dataset,
}  # fmt: skip


@pytest.mark.parametrize(
    "code", sorted({find_verdict(window).change for window in changed()} - {""})
)
def test_a_change_is_code_with_arguments_that_there_are(code: str) -> None:
    calls = [node for node in ast.walk(ast.parse(code, mode="eval")) if isinstance(node, ast.Call)]
    assert calls
    for call in calls:
        name = ast.unparse(call.func)
        if name != "model.fit":  # Keras' own method, which only gets a dataset
            known = inspect.signature(CALLABLES[name]).parameters
            assert {keyword.arg for keyword in call.keywords} <= set(known)
        if name == "lp.Limits":
            eval(ast.unparse(call), {"lp": loaderpool})


# -- advice that fits the loader's order

LENGTHS = [1, 2, 3, 4]


class Pairs:
    """Like `torch.utils.data.BatchSampler`, it has a batch size."""

    batch_size, drop_last = 2, False

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])


LARGER: dict[str, tuple[dict[str, Any], str]] = {
    "batch size": ({"batch_size": 2}, "batch_size=8"),
    "single samples": ({"batch_size": None}, "batch_size=4"),
    "packed": ({"order": Packed(LENGTHS, 8), "batch_size": 2}, "batch_size=8"),
    "token budget": (
        {"order": TokenBudget(LENGTHS, 8)},
        "order=lp.TokenBudget(..., max_tokens=32)",
    ),
    "most rows": (
        {"order": TokenBudget(LENGTHS, 8, max_rows=2)},
        "order=lp.TokenBudget(..., max_tokens=32, max_rows=8)",
    ),
    "buckets": (
        {"buckets": Buckets(LENGTHS, [3], [2, 1])},
        "buckets=lp.Buckets(..., batch_sizes=[8, 4])",
    ),
    "batches": ({"order": [[0, 1], [2, 3]]}, ""),
    "batch sampler": ({"order": Pairs()}, ""),
}


@pytest.mark.parametrize("kind", LARGER)
def test_larger_batches_are_advised_where_they_are_set(kind: str) -> None:
    settings, advised = LARGER[kind]
    with Loader([*range(4)], math.sqrt, workers=0, **settings) as loader:
        seen = dataclasses.replace(TINY.window(2), **of_order(loader))
    found = find_verdict(seen)
    assert found.verdict is Verdict.BATCH_OVERHEAD
    assert found.change.partition("  #")[0] == (advised and f"lp.Loader(..., {advised})")
    assert bool(found.expect) is bool(advised)


@pytest.mark.parametrize(
    ("settings", "is_advised"),
    [({}, True), ({"order": Packed(LENGTHS, 8)}, False), ({"samples_per_item": 2}, False)],
)
def test_batch_fn_is_advised_only_where_it_is_possible(
    settings: dict[str, Any], is_advised: bool
) -> None:
    with Loader([*range(4)], math.sqrt, workers=0, **settings) as loader:
        cheap = dataclasses.replace(TINY, sample_cpu_s=3e-6).in_process(**of_order(loader))
    assert ("batch_fn" in find_verdict(cheap).change) is is_advised


def of_order(loader: Loader) -> dict[str, Any]:
    constants = loader._core.observer.constants
    return {name: constants[name] for name in ("batch_limit", "takes_batch_fn")}
