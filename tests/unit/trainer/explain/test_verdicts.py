"""Which verdict a window gives: each once as it would really look, and its neighbours just across each threshold."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import loaderpool
from loaderpool import Limits, Loader
from loaderpool.trainer.explain import verdicts
from loaderpool.trainer.explain.observed import Observed, Pace
from loaderpool.trainer.explain.verdicts import Finding, Verdict, find_verdict
from tests.support.trainings import BLOCKING, COMPUTING, MIXED, Training, idle, slowed, times

FULL = Training(sample_cpu_s=24e-3, cpus=4)  # of four CPUs, none is free
CACHED: dict[str, Any] = {
    "can_have_cache": True,
    "items": 10_000,
    "room_bytes": 4 << 30,
}  # 1.5 GB, a second epoch comes
TINY = Training(step_s=150e-6, batch=32, sample_cpu_s=1e-6, step_cpu_s=100e-6)
WIDE = Training(step_s=2e-3, batch=256, sample_cpu_s=60e-6, step_cpu_s=0.5e-3)


def with_waits(window: Observed, share: float) -> Observed:
    """The same window, in which the consumer waited so much and its own time was less."""
    return dataclasses.replace(window, wait_s=share * window.seconds, ready_steps=0, ready_steps_s=0.0)


def verdict(window: Observed) -> Verdict:
    return find_verdict(window).verdict


# -- each verdict, as it would look

TYPICAL: dict[Verdict, Observed] = {
    Verdict.WARM_UP: COMPUTING.window(4, steps=19),
    Verdict.COMPUTE_BOUND: COMPUTING.window(16),
    Verdict.TOO_FEW_WORKERS: COMPUTING.window(4),
    Verdict.CPUS_FULL: FULL.window(4),
    Verdict.SOURCE_WAITS: BLOCKING.window(4),
    Verdict.SOURCE_LIMIT: MIXED.window(8, paces=(Pace(4, 320.0), Pace(8, 320.0)), samples=16_000, seconds=50.0),
    Verdict.MEMORY_BANDWIDTH: WIDE.window(6, paces=(Pace(2, 33_000.0, 30e-6), Pace(6, 80_000.0, 60e-6))),
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
def test_each_verdict_is_told_by_its_evidence(wanted: Verdict) -> None:
    found = find_verdict(TYPICAL[wanted])
    assert found.verdict is wanted
    assert found.why


@pytest.mark.parametrize("wanted", Verdict, ids=lambda wanted: wanted.name)
def test_a_verdict_is_of_rates_and_equal_numbers_give_an_equal_one(wanted: Verdict) -> None:
    window = TYPICAL[wanted]
    found = find_verdict(window)
    assert found == find_verdict(dataclasses.replace(window))
    if wanted is not Verdict.WARM_UP:  # which ends as the window grows
        longer = find_verdict(times(window, 3))
        assert (longer.verdict, longer.change) == (wanted, found.change)


@pytest.mark.parametrize("wanted", Verdict, ids=lambda wanted: wanted.name)
@pytest.mark.parametrize("noise", [0.98, 1.02])
def test_a_little_noise_changes_no_typical_verdict(wanted: Verdict, noise: float) -> None:
    window = TYPICAL[wanted]
    noisy = {"wait_s": noise * window.wait_s, "cpu_s": noise * window.cpu_s, "busy_s": noise * window.busy_s}
    assert verdict(dataclasses.replace(window, **noisy)) is wanted


# -- across each threshold

ACROSS: dict[str, tuple[Callable[[float], Observed], float, Verdict, float, Verdict]] = {
    "steps": (
        lambda steps: COMPUTING.window(4, steps=int(steps)), 19, Verdict.WARM_UP, 20, Verdict.TOO_FEW_WORKERS,
    ),
    "waiting": (
        lambda share: with_waits(COMPUTING.window(4), share), 0.049, Verdict.COMPUTE_BOUND, 0.051,
        Verdict.TOO_FEW_WORKERS,
    ),
    "the thread's wait for a CPU": (
        lambda share: COMPUTING.window(16, trainer_queued_s=share * 37.5), 0.149, Verdict.COMPUTE_BOUND, 0.151,
        Verdict.NOISY_NEIGHBOUR,
    ),
    "a short step": (
        lambda step_s: Training(step_s=step_s, sample_cpu_s=1e-6, step_cpu_s=1e-4).window(2), 299e-6,
        Verdict.BATCH_OVERHEAD, 301e-6, Verdict.COMPUTE_BOUND,
    ),
    "a short step, workers=0": (
        lambda step_s: Training(step_s / 2, 1, sample_cpu_s=step_s / 2, step_cpu_s=1e-5).in_process(), 299e-6,
        Verdict.BATCH_OVERHEAD, 301e-6, Verdict.TOO_FEW_WORKERS,
    ),
    "busy workers": (
        lambda share: with_waits(
            COMPUTING.window(16, busy_s=share * 600, idle_s=(1 - share) * 600, cpu_s=share * 600, cpus=64.0), 0.06
        ), 0.84, Verdict.INCOMPLETE, 0.86, Verdict.TOO_FEW_WORKERS,
    ),
    "idle workers that are too slow anyhow": (
        lambda factor: idle(busy_s=factor * 150, cpu_s=factor * 150, cpus=64.0), 1.04, Verdict.INCOMPLETE, 1.06,
        Verdict.TOO_FEW_WORKERS,
    ),
    "used CPUs": (
        lambda used: COMPUTING.window(4, cpus=COMPUTING.window(4).cpus_used / used, machine_cpus=8.0), 0.84,
        Verdict.TOO_FEW_WORKERS, 0.86, Verdict.CPUS_FULL,
    ),
    "the workers' wait for a CPU": (
        lambda share: COMPUTING.window(4, queued_s=share * COMPUTING.window(4).busy_s), 0.14,
        Verdict.TOO_FEW_WORKERS, 0.16, Verdict.CPUS_FULL,
    ),
    "computing": (
        lambda share: Training(sample_cpu_s=share * 25e-3, sample_blocked_s=(1 - share) * 25e-3).window(4), 0.74,
        Verdict.SOURCE_WAITS, 0.76, Verdict.TOO_FEW_WORKERS,
    ),
    "fewer workers as fast": (
        lambda rate: MIXED.window(8, paces=(Pace(4, rate * MIXED.batch / MIXED.length(8)),), seconds=500 * 0.1), 0.70,
        Verdict.SOURCE_WAITS, 0.99, Verdict.SOURCE_LIMIT,
    ),
    "so few that they should have been slower": (
        lambda workers: MIXED.window(6, paces=(Pace(int(workers), 999.0),)), 5, Verdict.SOURCE_LIMIT, 6,
        Verdict.SOURCE_WAITS,
    ),
    "growth of CPU time": (
        lambda growth: WIDE.window(6, paces=(Pace(2, 33_000.0, 60e-6 / growth),)), 1.24, Verdict.TOO_FEW_WORKERS,
        1.26, Verdict.MEMORY_BANDWIDTH,
    ),
    "bytes": (
        lambda gb: WIDE.window(
            6, paces=(Pace(2, 33_000.0, 40e-6),), bytes=int(gb * 1e9 * WIDE.window(6).seconds)
        ), 0.49, Verdict.TOO_FEW_WORKERS, 0.51, Verdict.MEMORY_BANDWIDTH,
    ),
    "few slots": (
        lambda slots: idle(slots=int(slots), slots_wanted=32), 27, Verdict.INCOMPLETE, 26, Verdict.MEMORY_LIMIT,
    ),
    "slow calls": (
        lambda share: slowed(idle(), share * idle().wait_s), 0.32, Verdict.INCOMPLETE, 0.34, Verdict.STRAGGLERS,
    ),
    "copies": (
        lambda share: idle(slots_lent=10, copied=int(share * 500)), 0.09, Verdict.INCOMPLETE, 0.11,
        Verdict.BATCHES_KEPT,
    ),
    "lent slots": (
        lambda lent: idle(slots_lent=int(lent), copied=100), 4, Verdict.INCOMPLETE, 5, Verdict.BATCHES_KEPT,
    ),
    "first batches of epochs": (
        lambda share: idle(epochs=9, epoch_starts_s=share * idle().wait_s), 0.49, Verdict.INCOMPLETE, 0.51,
        Verdict.EPOCH_START,
    ),
    "waits behind the first batch": (
        lambda share: COMPUTING.window(16, seconds=125.0, start_s=25.0, wait_s=25.0 + share * 100.0), 0.049,
        Verdict.START_UP, 0.06, Verdict.INCOMPLETE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_the_neighbours_of_a_threshold_differ(name: str) -> None:
    window, before, one, behind, other = ACROSS[name]
    assert (verdict(window(before)), verdict(window(behind))) == (one, other)


# -- what is told of each


def test_nothing_else_is_told_while_it_warms_up() -> None:
    found = find_verdict(TYPICAL[Verdict.WARM_UP])
    assert found == Finding(Verdict.WARM_UP, "19 steps so far, and 20 are needed")
    assert verdict(dataclasses.replace(TYPICAL[Verdict.INCOMPLETE], seconds=0.0)) is Verdict.WARM_UP


def test_workers_that_do_nothing_can_be_given_back_with_some_to_spare() -> None:
    found = find_verdict(COMPUTING.window(16))
    assert found.change == "lp.Loader(..., workers=13)"  # 1.15 times the 10.7 that make 32 samples of 25 ms in 75 ms
    assert find_verdict(COMPUTING.window(13)).change == ""
    assert find_verdict(slowed(COMPUTING.window(16), 3.0)).change == ""  # slow calls are hidden by those that wait
    assert find_verdict(Training(sample_cpu_s=1e-6).window(1)).change == ""


def test_a_thread_that_lacks_a_cpu_is_helped_by_fewer_workers_only_where_these_have_it() -> None:
    few = Training(sample_cpu_s=6e-3, cpus=8)
    assert find_verdict(few.window(8, trainer_queued_s=8.0)).change == "lp.Loader(..., workers=4)"
    busy = dataclasses.replace(few, others=5.0)
    found = find_verdict(busy.window(8, trainer_queued_s=8.0))
    assert (found.verdict, found.change) == (Verdict.NOISY_NEIGHBOUR, "")
    assert "other programs 5.0" in found.why


def test_a_thread_that_lacks_a_cpu_is_told_from_data_that_lack() -> None:
    window = idle(trainer_queued_s=20.0)
    assert verdict(window) is Verdict.NOISY_NEIGHBOUR
    assert verdict(dataclasses.replace(window, trainer_queued_s=18.0)) is Verdict.INCOMPLETE


def test_a_number_that_is_found_by_itself_is_not_told_to_be_set() -> None:
    few = find_verdict(COMPUTING.window(2, most_workers=32))
    assert (few.verdict, few.change) == (Verdict.TOO_FEW_WORKERS, "")
    assert few.expect.startswith('workers="auto" tries 11 workers by itself: about 75 ms a step')
    assert find_verdict(COMPUTING.window(2, most_workers=8)).change == "lp.Loader(..., workers=(1, 11))"
    assert find_verdict(Training(sample_cpu_s=1e-3).window(16, most_workers=32)).change == ""


def test_threads_are_for_what_hardly_computes() -> None:
    assert find_verdict(BLOCKING.window(4)).change == "lp.Loader(..., threads=6)"
    assert find_verdict(BLOCKING.window(4, can_have_threads=False)).change == "lp.Loader(..., workers=21)"
    assert find_verdict(MIXED.window(4)).change == "lp.Loader(..., workers=11)"


def test_a_cache_is_named_only_where_one_may_be_given() -> None:
    assert find_verdict(FULL.window(4)).change == ""
    assert "cache" in find_verdict(FULL.window(4, **CACHED)).change
    assert find_verdict(FULL.window(4, calls_of="batch")).change == ""
    for window in (FULL.window(4), FULL.window(4, **CACHED), FULL.window(4, calls_of="batch")):
        assert "`loaderpool profile` shows which lines" in find_verdict(window).expect
    assert find_verdict(dataclasses.replace(FULL, others=2.5).window(4)).change == ""  # which would have what is freed


@pytest.mark.parametrize(
    "lacking",
    [
        {"room_bytes": 2 << 30},  # half of it is 1 GiB
        {"room_bytes": 0},  # no epoch comes that would read it
        {"items": 0},
        {"items": 16_000_000},  # 2.4 TB
        {"bytes": 0},
    ],
)
def test_a_cache_is_told_only_where_it_fits_and_another_epoch_can_come(lacking: dict[str, Any]) -> None:
    for window in (FULL.window(4, **CACHED), dataclasses.replace(TYPICAL[Verdict.SOURCE_LIMIT], **CACHED)):
        assert "cache" in find_verdict(window).change
        assert "cache" not in find_verdict(dataclasses.replace(window, **lacking)).change


def test_what_a_cache_brings_is_told_with_both_sizes() -> None:
    expect = find_verdict(FULL.window(4, **CACHED)).expect
    assert expect.startswith("after the first epoch, at best 75 ms a step")
    assert "10,000 items take 1.4 GiB, and half of the free memory is 2.0 GiB" in expect


def test_a_function_of_batches_is_told_only_where_a_sample_takes_no_longer_than_its_call() -> None:
    short = Training(step_s=10e-6, batch=256, sample_cpu_s=19e-6, step_cpu_s=10e-6, cpus=1)
    assert "batch_fn" in find_verdict(short.in_process()).change
    assert find_verdict(dataclasses.replace(short, sample_cpu_s=21e-6).in_process()).change == ""


def test_who_has_the_cpus_is_told() -> None:
    busy = dataclasses.replace(FULL, others=1.5).window(4, throttled_s=12.0)
    found = find_verdict(busy)
    assert found.verdict is Verdict.CPUS_FULL
    assert "of 4 usable CPUs, other programs 1.5. Stop these programs first" in found.why
    assert "Stop" not in find_verdict(dataclasses.replace(FULL, others=0.3).window(4)).why
    assert "held processes back for 12 s" in found.why


def test_cpus_that_we_may_not_use_are_not_those_that_others_take_from_us() -> None:
    here = Training(sample_cpu_s=24e-3, cpus=8)
    crowded = here.window(4, machine_cpus=64.0, machine_cpu_s=here.window(4).seconds * 50)
    assert verdict(crowded) is Verdict.TOO_FEW_WORKERS
    assert "other programs" not in find_verdict(crowded).why


def test_one_cpu_is_no_reason_for_workers() -> None:
    assert verdict(Training(sample_cpu_s=24e-3, step_cpu_s=75e-3, cpus=1).in_process()) is Verdict.CPUS_FULL


def test_a_limit_of_the_source_gives_back_workers_that_bring_nothing() -> None:
    found = find_verdict(TYPICAL[Verdict.SOURCE_LIMIT])
    assert found.change == "lp.Loader(..., workers=4)"
    read = dataclasses.replace(TYPICAL[Verdict.SOURCE_LIMIT], read_bytes=50 * (120 << 20))
    assert "120 MiB a second" in find_verdict(read).why


def test_a_limit_of_the_source_shows_where_more_workers_were_tried_in_vain() -> None:
    """By `workers="auto"`, or by hand: the one number that there is now tells nothing."""
    waits = BLOCKING.window(4)
    rate = waits.samples_per_s
    assert verdict(dataclasses.replace(waits, paces=(Pace(8, 1.5 * rate),))) is Verdict.SOURCE_WAITS
    assert verdict(dataclasses.replace(waits, paces=(Pace(8, 1.08 * rate),))) is Verdict.SOURCE_WAITS
    assert verdict(dataclasses.replace(waits, paces=(Pace(12, 1.08 * rate),))) is Verdict.SOURCE_LIMIT  # of 200 %
    assert verdict(dataclasses.replace(waits, paces=(Pace(1, 0.9 * rate),))) is Verdict.SOURCE_LIMIT
    found = find_verdict(dataclasses.replace(waits, paces=(Pace(4, rate), Pace(8, 1.03 * rate))))
    assert found.verdict is Verdict.SOURCE_LIMIT
    assert found.change == ""  # what was tried in vain is not told again
    assert "samples/s with 4 workers" in found.why and "with 8, although CPUs are free" in found.why


def test_what_auto_tried_in_vain_long_ago_is_not_told_to_be_tried() -> None:
    waits = BLOCKING.window(4, most_workers=32, in_vain=8)
    found = find_verdict(waits)
    assert (found.verdict, found.change, found.expect) == (Verdict.SOURCE_LIMIT, "", "")
    assert 'no more with the 8 that workers="auto" tried' in found.why
    assert verdict(dataclasses.replace(waits, in_vain=0)) is Verdict.SOURCE_WAITS
    assert verdict(COMPUTING.window(4, most_workers=32, in_vain=8)) is Verdict.TOO_FEW_WORKERS  # CPUs may be free again


def test_memory_bandwidth_shows_where_more_workers_were_tried_in_vain() -> None:
    few = WIDE.window(2)
    rate, cpu_s = few.samples_per_s, few.cpu_s / few.samples
    assert verdict(few) is Verdict.TOO_FEW_WORKERS
    assert find_verdict(few).expect.startswith("if memory bandwidth is not full, ")
    assert verdict(dataclasses.replace(few, paces=(Pace(4, rate, 1.1 * cpu_s),))) is Verdict.TOO_FEW_WORKERS
    assert verdict(dataclasses.replace(few, paces=(Pace(4, 2 * rate, 1.5 * cpu_s),))) is Verdict.TOO_FEW_WORKERS
    found = find_verdict(dataclasses.replace(few, paces=(Pace(4, rate, 1.5 * cpu_s),)))
    assert found.verdict is Verdict.MEMORY_BANDWIDTH
    assert "With 4 workers a sample costs 1.50 times the CPU time it costs with 2" in found.why


def test_what_is_waited_for_may_serve_no_more_calls_and_that_is_said_of_workers_and_threads() -> None:
    for threads in (True, False):
        found = find_verdict(BLOCKING.window(4, can_have_threads=threads))
        assert ("threads=" in found.change, "workers=" in found.change) == (threads, not threads)
        assert found.expect.startswith("if the source can serve more calls at once, ")


def test_a_streams_reader_is_told_with_the_reading_itself() -> None:
    """It reads for 80 ms, and two workers make for 40: when both is theirs, each step is half of that."""
    window = idle(workers=2, is_stream=True, cpus=2.0, machine_cpu_s=22.5, busy_s=20.0, cpu_s=20.0, idle_s=60.0)
    window = dataclasses.replace(window, seconds=40.0, steps=500, wait_s=30.0, ready_steps=0, ready_steps_s=0.0)
    found = find_verdict(window)
    assert found.verdict is Verdict.STREAM_READER
    assert found.step_s == pytest.approx((80e-3 + 40e-3) / 2)
    assert "120 ms of reading and processing for a batch; at best 60 ms a step" in found.expect
    alone = find_verdict(dataclasses.replace(window, workers=1))
    assert "workers=2)" in alone.change  # one would be slower than the reader


def test_no_change_is_told_that_brings_next_to_nothing() -> None:
    """Two thirds of the waiting are of no use: CPUs are nearly full with as many workers as there are."""
    slight = Training(step_s=70e-3, batch=32, sample_cpu_s=25e-3, step_cpu_s=1e-3, cpus=11.2)
    window = slight.window(11, ready_steps=0, ready_steps_s=0.0, cpus=13.0)
    assert 0.03 < 1 - slight.step_s / window.step_s < 0.05
    found = find_verdict(window, waits_above=0.02)
    assert (found.verdict, found.change, found.step_s) == (Verdict.TOO_FEW_WORKERS, "", None)
    assert "1.05 times" in found.expect
    assert find_verdict(slight.window(9)).change


@pytest.mark.parametrize(("seconds", "steps"), [(9.9, 500), (25.0, 24)])
def test_what_is_not_clear_yet_is_a_warm_up(seconds: float, steps: int) -> None:
    found = find_verdict(short_of(idle(), seconds, steps))
    assert found.verdict is Verdict.WARM_UP
    assert found.why.endswith(" so far, and 10 s and 200 calls are needed")
    assert verdict(short_of(idle(), 10.1, 500)) is Verdict.INCOMPLETE
    assert verdict(short_of(idle(), 31.0, 24)) is Verdict.INCOMPLETE


def short_of(window: Observed, seconds: float, steps: int) -> Observed:
    """The same shares in so many seconds, in steps of eight samples."""
    times_s = ("wait_s", "busy_s", "idle_s", "cpu_s", "machine_cpu_s", "trainer_cpu_s")
    factor = seconds / window.seconds
    sums = {name: factor * getattr(window, name) for name in times_s}
    return dataclasses.replace(window, seconds=seconds, steps=steps, samples=8 * steps, made=0, ready_steps=0, **sums)


def test_slow_calls_are_told_whether_workers_find_time_to_be_idle_or_not() -> None:
    """Advice goes by what helps; the verdict does not waver as the share of busy time does."""
    waits = dataclasses.replace(BLOCKING.window(2), calls=idle().calls)
    for share in (0.8, 0.84, 0.86, 0.95, 1.0):
        window = slowed(with_busy(waits, share), 0.5 * waits.busy_s)
        assert verdict(window) is Verdict.STRAGGLERS
        found = find_verdict(window)
        assert "threads=" in found.change
        assert found.expect.endswith("a step, because slow calls still delay later batches")
    assert verdict(slowed(waits, 0.1 * waits.busy_s)) is Verdict.SOURCE_WAITS


def with_busy(window: Observed, share: float) -> Observed:
    worked_s = window.busy_s + window.idle_s
    return dataclasses.replace(window, busy_s=share * worked_s, idle_s=(1 - share) * worked_s)


def test_a_memory_limit_is_raised_to_what_slots_need() -> None:
    assert find_verdict(idle(slots=4, slots_wanted=19, slot_bytes=400 << 20)).change == (
        'lp.Loader(..., limits=lp.Limits(memory="7600MiB"))'
    )
    assert '"16GiB"' in find_verdict(idle(slots=4, slots_wanted=32, slot_bytes=500 << 20)).change


@pytest.mark.parametrize(("slots_wanted", "wanted"), [(32, Verdict.MEMORY_LIMIT), (20, Verdict.STRAGGLERS)])
def test_slots_are_lacking_where_they_would_hide_the_slowest_call(slots_wanted: int, wanted: Verdict) -> None:
    """It takes 1.9 s, in which 25 batches are consumed."""
    assert verdict(slowed(idle(slots=4, slots_wanted=slots_wanted), 30.0)) is wanted


def test_an_order_that_is_given_up_already_is_not_to_be_given_up() -> None:
    found = find_verdict(slowed(idle(deterministic=False), 30.0))
    assert (found.verdict, found.change) == (Verdict.STRAGGLERS, "")


@pytest.mark.parametrize(
    "window",
    [
        slowed(idle(), 30.0),
        idle(slots=4, slots_wanted=19, slot_bytes=400 << 20),
    ],
    ids=["stragglers", "memory limit"],
)
def test_no_step_is_expected_that_is_longer_than_it_is(window: Observed) -> None:
    """Workers make batches between passes, too, and what they did there is no part of these steps."""
    usual = find_verdict(window)
    assert "at best" in usual.expect
    worked_s = 1.5 * window.workers * window.seconds
    found = find_verdict(dataclasses.replace(window, elapsed_s=3 * window.seconds, busy_s=worked_s, idle_s=worked_s))
    assert found.verdict is usual.verdict
    assert found.expect and "at best" not in found.expect


def test_no_more_workers_are_advised_than_there_are_generators() -> None:
    generators = {"can_have_threads": False, "can_have_cache": False}
    assert "workers=6)" in find_verdict(BLOCKING.window(4, lanes=6, **generators)).change
    found = find_verdict(BLOCKING.window(4, lanes=4, **generators))
    assert found.verdict is Verdict.SOURCE_WAITS
    assert "Only 4 generators run at once, so more workers" in found.why
    assert "shards=" in found.change and "cycle_length" in found.expect
    assert "workers=2)" in find_verdict(BLOCKING.in_process(lanes=2, **generators)).change


def test_tiny_batches_go_another_way_or_are_made_larger() -> None:
    assert find_verdict(TINY.window(2)).change.startswith("lp.Loader(..., batch_size=64)")
    assert find_verdict(dataclasses.replace(TINY, step_s=10e-6).window(8)).change.startswith(
        "lp.Loader(..., batch_size=128)"
    )
    assert "for_keras" in find_verdict(TINY.window(2, by_tf_data=True)).change
    assert "batch_fn" in find_verdict(dataclasses.replace(TINY, sample_cpu_s=3e-6).in_process()).change
    assert find_verdict(TINY.window(2, calls_of="batch")).change == ""


def test_copies_are_told_of_where_they_take_the_time_though_data_are_ready() -> None:
    window = COMPUTING.window(16, slots_lent=27, copied=500)
    assert find_verdict(window).verdict is Verdict.COMPUTE_BOUND
    slow = dataclasses.replace(window, copy_s=0.06 * window.seconds)
    assert find_verdict(slow).verdict is Verdict.BATCHES_KEPT
    assert "4.5 ms a step" in find_verdict(slow).why


def test_tiny_batches_are_told_though_workers_are_busy_and_cpus_are_full() -> None:
    window = TINY.window(2)
    busy = dataclasses.replace(
        window, wait_s=0.6 * window.seconds, busy_s=2 * window.seconds, idle_s=0.0, queued_s=1.8 * window.seconds,
        cpu_s=0.2 * window.seconds, ready_steps=0, made=window.samples,
    )  # fmt: skip
    assert find_verdict(busy).verdict is Verdict.BATCH_OVERHEAD


def test_calls_that_had_no_cpu_are_no_stragglers() -> None:
    window = slowed(idle(), 30.0)
    assert find_verdict(window).verdict is Verdict.STRAGGLERS
    assert find_verdict(dataclasses.replace(window, queued_s=25.0)).verdict is not Verdict.STRAGGLERS


def test_a_start_is_told_to_be_paid_once() -> None:
    found = find_verdict(TYPICAL[Verdict.START_UP])
    assert (found.change, found.step_s) == ("", pytest.approx(75e-3))
    assert "25 s" in found.why


def test_what_a_start_took_its_time_for_is_told_where_it_was_measured() -> None:
    start = TYPICAL[Verdict.START_UP]
    told = find_verdict(dataclasses.replace(start, load_s=24.0)).why
    assert "Loading the function and its imports took 24 s. Then" in told
    assert "Loading the function" not in find_verdict(dataclasses.replace(start, load_s=0.1)).why


def test_time_between_passes_is_no_step_and_yet_cpu_time_is_of_it() -> None:
    """A validation of as long as the training: workers are idle in it, and other programs use no more CPUs."""
    window = COMPUTING.window(4)
    paused = dataclasses.replace(
        window, elapsed_s=2 * window.seconds, idle_s=4 * window.seconds, machine_cpu_s=window.machine_cpu_s
    )
    found = find_verdict(paused)
    assert (found.verdict, found.change) == (Verdict.TOO_FEW_WORKERS, "lp.Loader(..., workers=11)")


@pytest.mark.parametrize("workers", [4, 16])
def test_without_cpu_times_nothing_is_said_of_computing(workers: int) -> None:
    found = find_verdict(COMPUTING.window(workers, cpu_s=0.0, queued_s=0.0))
    assert found.verdict is (Verdict.INCOMPLETE if workers == 4 else Verdict.COMPUTE_BOUND)
    assert "% of it computing" not in found.why
    assert found.change == ""


# -- changes are code


def changed() -> list[Observed]:
    """Windows of all changes that there are."""
    return [
        *TYPICAL.values(),
        COMPUTING.in_process(),
        COMPUTING.window(2, most_workers=8),
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


@pytest.mark.parametrize("code", sorted({find_verdict(window).change for window in changed()} - {""}))
def test_a_change_is_code_with_arguments_that_there_are(code: str) -> None:
    calls = [node for node in ast.walk(ast.parse(code, mode="eval")) if isinstance(node, ast.Call)]
    assert calls
    for call in calls:
        name = ast.unparse(call.func)
        if name != "model.fit":  # Keras' own, which is given a dataset alone
            known = inspect.signature(CALLABLES[name]).parameters
            assert {keyword.arg for keyword in call.keywords} <= set(known)
        if name == "lp.Limits":
            eval(ast.unparse(call), {"lp": loaderpool})


def test_every_change_that_there_is_comes_in_these_tests() -> None:
    said = {find_verdict(window).change.split("=")[0] for window in changed()}
    code = r"""["'](lp\.Loader.*?=|model\.fit\([^"]*?=|loader\.as_dataset\([^"]*?=)"""
    made = {found.rstrip("=") for found in re.findall(code, inspect.getsource(verdicts))}
    assert len(made) >= 9
    assert made - {each.rstrip("=") for each in said} == set()
