"""Measuring and recommending numbers of workers and threads, on a loader and a clock that only count."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest

import loaderpool
from loaderpool.config import LoaderConfig
from loaderpool.errors import ArgumentError
from loaderpool.settings.groups import WorkerOptions
from loaderpool.system import capacity
from loaderpool.tools.cli.report import tune_data, tune_table
from loaderpool.tools.tuning import (
    Measurement,
    Setting,
    Watcher,
    Window,
    cpu_budget,
    default_counts,
    measure,
    measure_settings,
    recommend,
    settings_of,
)
from loaderpool.tools.tuning.ideal import compute_in_turns, cpu_share, ideal_speedup
from loaderpool.tools.tuning.measure import _differences
from loaderpool.trainer.engine.engine_statistics import WorkerStatistics
from loaderpool.trainer.epochs.statistics import Statistics
from loaderpool.trainer.loader import Loader


class Machine:
    """A clock that only the fake loaders move, and their CPU time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu_s = 0.0
        self.order: list[tuple[int, int]] = []  # workers and threads of each loader that was made
        self.open = 0


def config_with(**options: Any) -> LoaderConfig:
    return Loader(range(3), workers=0, worker_options=WorkerOptions(**options)).config


class FakeLoader:
    """Workers in lock step: each `batch_s` a burst of one batch from each; the first comes after `startup_s`."""

    def __init__(
        self, machine_: Machine, workers: int = 0, *, batch_s: float = 0.1, rows: int = 4, batches: int = 5,
        startup_s: float = 0.0, cpu_share: float = 1.0, chunk: int = 1,
    ) -> None:  # fmt: skip
        self.config = config_with()
        self.machine, self.workers, self.rows, self.per_pass = machine_, workers, rows, batches
        self.settings = {"batch_s": batch_s, "rows": rows, "batches": batches, "startup_s": startup_s,
                         "cpu_share": cpu_share, "chunk": chunk}  # fmt: skip
        self.batch_s, self.startup_s, self.cpu_share, self.chunk = batch_s, startup_s, cpu_share, chunk
        self.made = self.passes = self.slots = 0
        machine_.open += 1

    def replace(self, **changes: Any) -> FakeLoader:
        self.machine.order.append((changes["workers"], changes["worker_options"].threads))
        return FakeLoader(self.machine, changes["workers"], **self.settings)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        for number in range(self.per_pass):
            if self.made == 0:
                self.machine.now += self.startup_s
            if self.made % (max(1, self.workers) * self.chunk) == 0:
                self.machine.now += self.batch_s * self.chunk
                if self.workers == 0:
                    self.machine.cpu_s += self.batch_s * self.cpu_share
            self.made += 1
            yield number

    def statistics(self) -> Statistics:
        each = -(-self.made // max(1, self.workers))
        zero = {field.name: 0 for field in dataclasses.fields(Statistics)}
        workers = tuple(
            WorkerStatistics(n, 1000 + n, each, each * self.rows, each * self.batch_s, 0.0, each * self.batch_s / 2)
            for n in range(self.workers)
        )
        changes = {"batches": self.made, "samples": self.made * self.rows, "bytes": self.made * self.rows * 10,
                   "consumer_wait_s": self.made * 0.01, "slots": self.slots, "workers": workers, "skipped_indices": (),
                   "replaced_indices": ()}  # fmt: skip
        return Statistics(**{**zero, **changes})  # type: ignore[arg-type]

    def close(self) -> None:
        self.machine.open -= 1


def run_measure(loader: FakeLoader, seconds: float, **more: Any) -> Window:
    fake = loader.machine
    return measure(
        loader,
        seconds,
        now_s=lambda: fake.now,
        own_cpu_ns=lambda: int(fake.cpu_s * 1e9),
        queued_s=lambda pid: 0.0,
        **more,
    )


# -- one window


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("batch_s", [0.01, 0.1, 0.7, 5.0])
@pytest.mark.parametrize("chunk", [1, 5])
def test_the_rate_is_exact_although_batches_come_in_bursts(workers: int, batch_s: float, chunk: int) -> None:
    window = run_measure(FakeLoader(Machine(), workers, batch_s=batch_s, rows=4, chunk=chunk), 1.0)
    assert window.samples_per_s == pytest.approx(4 * max(1, workers) / batch_s)
    assert window.elapsed_s >= 1.0
    assert window.batches >= max(1, workers)


def test_the_start_is_not_counted() -> None:
    window = run_measure(FakeLoader(Machine(), 2, batch_s=0.1, startup_s=30.0), 1.0)
    assert window.elapsed_s < 2.0


class Unsteady(FakeLoader):
    """One worker makes 20 batches a second; for a second 10 of them are handed over, and in the next second 30."""

    def __iter__(self) -> Iterator[int]:
        while True:
            for _ in range(40):
                self.machine.now += 0.1 if self.made % 40 < 10 else 1 / 30
                self.made += 1
                yield self.made

    def statistics(self) -> Statistics:
        made = round((self.machine.now - 100.0) * 20)
        worker = WorkerStatistics(0, 1000, made, made * self.rows, 0.0, 0.0, 0.0)
        return dataclasses.replace(super().statistics(), workers=(worker,))


@pytest.mark.parametrize("warm_up", [1, 12, 20, 35])
def test_what_was_made_before_the_window_is_not_counted_as_made_in_it(warm_up: int) -> None:
    loader = Unsteady(Machine(), 1, rows=4)
    loader.slots = warm_up
    assert run_measure(loader, 1.1).samples_per_s == pytest.approx(80, rel=0.06)


def test_short_epochs_follow_each_other() -> None:
    loader = FakeLoader(Machine(), 0, batch_s=0.1, batches=1)
    window = run_measure(loader, 2.0)
    assert window.batches >= 20 and loader.passes >= 20


def test_a_loader_without_batches_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ArgumentError, match="no batch"):
        run_measure(FakeLoader(Machine(), 0, batches=0), 1.0)


def test_counts_are_differences_over_the_window() -> None:
    loader = FakeLoader(Machine(), 2, batch_s=0.1, rows=4)
    window = run_measure(loader, 1.0)
    assert window.samples == window.batches * 4 and window.nbytes == window.samples * 10
    assert window.batches < loader.made  # the warm-up's are not among them
    assert window.consumer_wait_s == pytest.approx(window.batches * 0.01)
    assert [worker.index for worker in window.workers] == [0, 1]
    assert sum(worker.batches for worker in window.workers) == window.batches
    assert window.workers_cpu_s == pytest.approx(window.elapsed_s)  # two workers that compute half of the time


def test_the_cpu_time_of_this_process_counts_for_0_workers() -> None:
    window = run_measure(FakeLoader(Machine(), 0, batch_s=0.1, cpu_share=0.4), 2.0)
    assert window.cpu_use == pytest.approx(0.4)


def test_a_replaced_workers_cpu_time_begins_anew() -> None:
    start = WorkerStatistics(0, 10, 5, 20, 1.0, 0.0, cpu_s=9.0)
    end = WorkerStatistics(0, 11, 8, 32, 2.0, 0.5, cpu_s=0.5)
    (difference,) = _differences([start], [end])
    assert (difference.samples, difference.cpu_s, difference.pid) == (12, 0.5, 11)


def test_progress_never_passes_the_end() -> None:
    seen: list[float] = []
    run_measure(FakeLoader(Machine(), 0, batch_s=0.3), 2.0, on_progress=seen.append)
    assert seen == sorted(seen) and seen and seen[0] > 0 and seen[-1] <= 1.0


# -- all counts


class Seen(Watcher):
    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.skipped: list[tuple[str, int]] = []

    def begin(self, setting: Setting, round_number: int) -> None:
        self.begun.append((setting.label, round_number))

    def skip(self, setting: Setting, round_number: int) -> None:
        self.skipped.append((setting.label, round_number))


def settings(*counts: int, threads: int = 1) -> list[Setting]:
    return [Setting(count, threads if count else 1) for count in counts]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose clock `measure_settings` reads, too."""
    fake = Machine()
    defaults = measure.__kwdefaults__
    monkeypatch.setitem(defaults, "now_s", lambda: fake.now)
    monkeypatch.setitem(defaults, "own_cpu_ns", lambda: int(fake.cpu_s * 1e9))
    monkeypatch.setitem(defaults, "queued_s", lambda pid: 0.0)
    return fake


def test_rounds_go_forth_and_back_on_loaders_of_their_own_that_are_closed(fake: Machine) -> None:
    loader = FakeLoader(fake)
    measurements = measure_settings(loader, settings(0, 1, 2), 2.0, rounds=2)
    assert fake.order == [(1, 1), (2, 1), (0, 1), (0, 1), (2, 1), (1, 1)]
    assert [each.workers for each in measurements] == [0, 1, 2]
    assert [len(each.windows) for each in measurements] == [2, 2, 2]
    assert all(window.wanted_s == 1.0 for each in measurements for window in each.windows)
    assert (loader.made, fake.open) == (0, 1)


def test_a_loader_that_fails_is_closed(fake: Machine) -> None:
    with pytest.raises(ArgumentError):
        measure_settings(FakeLoader(fake, batches=0), settings(0, 1), 2.0)
    assert fake.open == 1


def test_slow_batches_are_not_measured_again(fake: Machine) -> None:
    seen = Seen()
    (measurement, _) = measure_settings(FakeLoader(fake, batch_s=20.0), settings(0, 1), 3.0, watcher=seen)
    assert len(measurement.windows) == 1
    assert seen.begun == [("1 worker", 1), ("0 workers", 1)]
    assert seen.skipped == [("0 workers", 2), ("1 worker", 2)]


CONFIG = config_with(threads=8)


def test_workers_have_the_loaders_threads_where_none_are_asked_for() -> None:
    found = settings_of((0, 2), None, CONFIG)
    assert found == (Setting(0, 1), Setting(2, 8))
    assert [each.label for each in found] == ["0 workers", "2 workers"]
    assert found[1].arguments == "workers=2"


def test_each_number_of_workers_is_measured_with_each_number_of_threads(fake: Machine) -> None:
    found = settings_of((0, 1, 2), (1, 16), CONFIG)
    assert [(each.workers, each.threads) for each in found] == [(0, 1), (1, 1), (1, 16), (2, 1), (2, 16)]
    assert [each.label for each in found] == [
        "0 workers", "1 worker with 1 thread", "1 worker with 16 threads", "2 workers with 1 thread each",
        "2 workers with 16 threads each",
    ]  # fmt: skip
    assert [found[0].arguments, found[2].arguments] == [
        "workers=0",
        "workers=1, worker_options=lp.WorkerOptions(threads=16)",
    ]
    measured = measure_settings(FakeLoader(fake), found, 2.0, rounds=2)
    there = [(1, 1), (1, 16), (2, 1), (2, 16), (0, 1)]
    assert fake.order == there + there[::-1]
    assert [each.setting for each in measured] == list(found)


@pytest.mark.parametrize("seed_globals", [False, "auto"])
def test_what_to_write_keeps_the_worker_options_that_are_not_varied(seed_globals: Any) -> None:
    options = WorkerOptions(seed_globals=seed_globals)
    (found,) = settings_of((2,), (4,), dataclasses.replace(CONFIG, worker_options=options))
    written = eval(f"dict({found.arguments})", {"lp": loaderpool})
    assert written == {"workers": 2, "worker_options": dataclasses.replace(options, threads=4)}


def test_0_workers_come_once_however_many_threads_there_are() -> None:
    assert settings_of((0,), (2, 4), CONFIG) == (Setting(0),)


@pytest.mark.parametrize(
    ("cpus", "counts"),
    [(1, (0, 1, 2)), (2, (0, 1, 2, 4)), (6, (0, 1, 2, 4, 6, 8, 12)), (64, (0, 1, 2, 4, 8, 16, 32, 64, 128))],
)
def test_default_counts_double_up_to_twice_the_cpus(cpus: int, counts: tuple[int, ...]) -> None:
    assert default_counts(cpus) == counts


def test_the_faster_window_counts_and_the_slower_one_is_the_spread() -> None:
    both = Measurement(Setting(1), (window(1, 80.0), window(1, 100.0)))
    assert both.samples_per_s == 100.0
    assert both.spread == pytest.approx(0.2)
    assert Measurement(Setting(1), (window(1, 80.0),)).spread == 0.0


# -- what is recommended


def window(
    workers: int, rate: float, *, share: float = 1.0, batch: int = 8, wanted_s: float = 10.0, elapsed_s: float = 10.0,
    own: float = 0.02, row_bytes: int = 100, queued: float = 0.0, cpus: int = 1 << 20,
) -> Window:  # fmt: skip
    """A window at `rate` samples/s, whose makers of samples compute for `share` of the time, on `cpus` CPUs at most.

    `queued`: share of the time that each waits for a CPU; `own`: CPUs that this process uses.
    """
    samples = max(1, round(rate * elapsed_s))
    cpu_s = share * elapsed_s * min(1.0, cpus / max(1, workers))
    each = tuple(WorkerStatistics(n, 100 + n, samples // batch, samples, elapsed_s, 0.0, cpu_s) for n in range(workers))
    return Window(
        wanted_s=wanted_s,
        elapsed_s=elapsed_s,
        batches=max(1, samples // batch),
        samples=samples,
        nbytes=samples * row_bytes,
        consumer_wait_s=elapsed_s,
        own_cpu_s=own * elapsed_s if workers else share * elapsed_s,
        queued_s=queued * elapsed_s * max(1, workers),
        workers=each,
    )


def measured(rates: dict[int, float], threads: int = 1, **more: Any) -> list[Measurement]:
    return [
        Measurement(setting, (window(setting.workers, rate, **more),))
        for setting, rate in zip(settings(*rates, threads=threads), rates.values(), strict=True)
    ]


def test_cpu_bound_work_gets_a_worker_for_each_cpu() -> None:
    found = recommend(measured({0: 100, 1: 98, 2: 196, 4: 385, 8: 390}, cpus=4), cpus=4)
    assert found.setting.workers == 4
    assert "full" in found.reason and "1.96 times the rate of 2 workers" in found.reason
    assert "CPU-bound" in found.ideal and "min(workers, CPUs)" in found.ideal
    assert found.notes == ()
    by_count = {each.measurement.workers: each for each in found.comparisons}
    assert by_count[8].ideal_speedup == 4.0
    assert by_count[4].share_of_ideal == pytest.approx(0.9625)


def test_blocking_work_gets_more_workers_than_cpus_and_another_ideal() -> None:
    found = recommend(measured({0: 10, 1: 10, 2: 20, 4: 40}, share=0.02), cpus=2)
    assert found.setting.workers == 4
    assert "more workers than the 2 CPUs help" in found.reason and "98%" in found.reason
    assert "blocks" in found.ideal
    assert found.comparisons[-1].share_of_ideal == pytest.approx(1.0)
    assert any("still grows at 4 workers: --workers 0,4,8,16" in note for note in found.notes)


def test_the_smallest_count_within_5_percent_wins() -> None:
    assert recommend(measured({0: 10, 1: 96, 2: 100, 4: 99}, cpus=2), cpus=2).setting.workers == 1
    assert recommend(measured({0: 10, 1: 94, 2: 100, 4: 99}, cpus=2), cpus=2).setting.workers == 2


def test_the_order_of_measurements_does_not_matter() -> None:
    some = measured({0: 100, 1: 98, 2: 190}, cpus=2)
    assert recommend(some, cpus=2) == recommend(some[::-1], cpus=2)


def test_a_cheap_function_stays_in_this_process() -> None:
    found = recommend(measured({0: 500_000, 1: 300_000, 2: 350_000}), cpus=2)
    assert found.setting.workers == 0
    assert "so cheap (16 µs a batch)" in found.reason
    assert any("2 workers reached 70%" in note and "beside the steps" in note for note in found.notes)


def test_a_function_with_threads_of_its_own_is_noticed() -> None:
    threaded = [Measurement(Setting(0), (window(0, 400, share=3.9),)), *measured({1: 100, 2: 200, 4: 380}, cpus=4)]
    found = recommend(threaded, cpus=4)
    assert found.setting.workers == 0
    assert "3.9 CPUs by itself" in found.reason


def test_a_single_sample_that_outlasts_the_measuring_is_named() -> None:
    rates = {0: 0.05, 1: 0.05, 2: 0.1}
    found = recommend(measured(rates, share=0.0, batch=1, wanted_s=3.0, elapsed_s=20.0), cpus=2)
    assert any(note.startswith("A single sample takes 20 s, longer than the 3 s") for note in found.notes)


def test_a_batch_that_outlasts_the_measuring_is_named() -> None:
    found = recommend(measured({0: 2, 1: 2, 2: 4}, batch=20, wanted_s=3.0, elapsed_s=10.0, cpus=2), cpus=2)
    assert any(note.startswith("A batch takes 10 s, longer than the 3 s") for note in found.notes)


def test_workers_that_compute_more_for_the_same_samples_share_the_memory() -> None:
    heavy = recommend(measured({0: 1000, 1: 1000, 2: 1300, 4: 1300}, row_bytes=4_000_000, cpus=4), cpus=4)
    assert any("3.08 times the CPU time" in note and "memory bandwidth is full" in note for note in heavy.notes)
    light = recommend(measured({0: 1000, 1: 1000, 2: 1300, 4: 1300}, row_bytes=4, cpus=4), cpus=4)
    assert any("slow each other down" in note for note in light.notes)
    assert not any("GB/s" in note for note in light.notes)


def test_a_limit_that_leaves_the_cpus_idle_is_told_from_full_cpus() -> None:
    found = recommend(measured({0: 10, 1: 10, 2: 20, 4: 20}, share=0.1), cpus=8)
    assert found.setting.workers == 2
    assert "0.2 of 8 CPUs are in use" in found.reason and "disk, network, a lock" in found.reason


def test_a_process_that_is_busy_handing_over_is_named() -> None:
    found = recommend(measured({0: 10, 1: 10, 2: 20, 4: 20}, share=0.3, own=0.97), cpus=8)
    assert "busy handing over" in found.reason


def test_a_busy_machine_does_not_make_work_look_blocking() -> None:
    robbed = measured({0: 100, 1: 100, 2: 102}, share=0.5, queued=0.5)
    assert cpu_share(robbed[0]) == pytest.approx(1.0)
    found = recommend(robbed, cpus=4)
    assert "CPU-bound" in found.ideal
    assert "other processes kept busy" in found.reason and "50%" in found.reason


def test_noisy_rounds_are_said() -> None:
    noisy = [Measurement(Setting(n), (window(n, 50.0 * max(1, n)), window(n, 100.0 * max(1, n)))) for n in (0, 1, 2)]
    assert any("differ by 50%" in note for note in recommend(noisy, cpus=2).notes)


def test_a_rate_that_still_grows_asks_for_more_counts() -> None:
    found = recommend(measured({0: 10, 1: 10, 2: 20}, cpus=8), cpus=8)
    assert any("there are 8 CPUs" in note for note in found.notes)


def test_without_0_workers_the_smallest_count_is_the_base() -> None:
    found = recommend(measured({2: 200, 4: 400}, cpus=4), cpus=4)
    assert found.comparisons[0].ideal_speedup == 1.0
    assert (found.comparisons[1].speedup, found.comparisons[1].ideal_speedup) == (2.0, 2.0)


def test_no_share_is_above_the_ideal_because_0_workers_are_slow() -> None:
    found = recommend(measured({0: 40, 1: 100, 2: 190}), cpus=2)
    assert [each.share_of_ideal for each in found.comparisons] == pytest.approx([0.4, 1.0, 0.95])
    assert [each.speedup for each in found.comparisons] == pytest.approx([1.0, 2.5, 4.75])
    assert "one process counts as 1 worker, 2.50 times as fast as 0 workers" in found.ideal
    assert not found.excess


def test_what_one_process_does_is_that_of_a_thread_of_a_worker_with_threads() -> None:
    found = recommend(measured({0: 10, 1: 160, 2: 310}, threads=16, share=0.01), cpus=2)
    assert [each.share_of_ideal for each in found.comparisons] == pytest.approx([1.0, 1.0, 0.97], abs=0.005)
    found = recommend(measured({0: 8, 1: 160, 2: 310}, threads=16, share=0.01), cpus=2)
    assert found.comparisons[0].share_of_ideal == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("one", "two", "says"),
    [
        ([window(1, 100.0), window(1, 90.0)], [window(2, 210.0)], "rounds differ by 10%"),
        ([window(1, 100.0, queued=0.2)], [window(2, 230.0)], "other processes had the CPUs for 20% of its time"),
        ([window(1, 100.0)], [window(2, 300.0)], "a sample cost 33% less CPU time"),
        ([window(1, 100.0, share=0.5)], [window(2, 300.0, share=0.8)], "a sample waited less"),
    ],
    ids=["chance", "others", "cheaper", "waited less"],
)
def test_a_share_above_100_percent_has_its_reason_and_a_mark(one: list[Window], two: list[Window], says: str) -> None:
    found = recommend([Measurement(Setting(1), tuple(one)), Measurement(Setting(2), tuple(two))], cpus=2)
    assert found.comparisons[1].share_of_ideal > 1.005
    assert [each.is_above_ideal for each in found.comparisons] == [False, True]
    assert found.excess.startswith("above 100 % because the ideal rests on the rate of 1 worker, which was low: ")
    assert says in found.excess


def test_tune_prints_the_mark_beside_the_number() -> None:
    found = recommend(measured({1: 100, 2: 300}), cpus=2)
    table = tune_table(found, "samples", is_terminal=False)
    assert list(table.columns[5].cells) == ["100%", "150%*"]


def test_a_share_that_prints_as_100_percent_needs_no_reason() -> None:
    found = recommend(measured({1: 1000, 2: 2009}), cpus=2)
    assert found.comparisons[1].share_of_ideal > 1 and not found.excess


def test_no_measurement_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="at least one"):
        recommend([], cpus=2)


@pytest.mark.parametrize(
    ("workers", "share", "ideal"),
    [(0, 1.0, 1), (1, 1.0, 1), (4, 1.0, 2), (4, 0.9, 2), (4, 0.0, 4), (3, 0.5, 3), (8, 0.5, 4)],
)
def test_the_ideal_ends_where_the_computing_fills_the_cpus(workers: int, share: float, ideal: float) -> None:
    assert ideal_speedup(Setting(workers), 2, share) == pytest.approx(ideal)


@pytest.mark.parametrize(
    ("workers", "share", "threads", "ideal"),
    [(0, 0.0, 16, 1), (1, 0.0, 16, 16), (2, 0.01, 16, 32), (1, 0.1, 16, 10), (2, 0.1, 16, 20), (4, 0.1, 16, 20),
     (4, 1.0, 16, 2)],
)  # fmt: skip
def test_threads_of_workers_wait_at_once_and_compute_in_turns(
    workers: int, share: float, threads: int, ideal: float
) -> None:
    assert ideal_speedup(Setting(workers, threads if workers else 1), 2, share) == pytest.approx(ideal)


@pytest.mark.parametrize("fewest", [0, 1])
def test_threads_of_workers_are_no_riddle(fewest: int) -> None:
    rates = {0: 50, 1: 780, 2: 1550}
    measurements = [
        Measurement(Setting(count, 16 if count else 1), (window(count, rates[count], share=0.16 if count else 0.01),))
        for count in range(fewest, 3)
    ]
    found = recommend(measurements, cpus=2)
    assert found.setting.workers == 2
    assert "workers times their 16 threads" in found.ideal and "1% of the time" in found.ideal
    assert found.comparisons[-1].share_of_ideal == pytest.approx(0.97 if not fewest else 0.994, abs=0.01)
    assert not found.excess


# -- workers and threads


def crossed(rates: dict[tuple[int, int], float], share: float = 0.01, **more: Any) -> list[Measurement]:
    """Measurements of workers with threads, whose calls compute in turns for `share` of the time that each takes."""
    return [
        Measurement(
            Setting(workers, threads, WorkerOptions()),
            (window(workers, rate, share=min(1.0, threads * share), **more),),
        )
        for (workers, threads), rate in rates.items()
    ]


WAITS = {(0, 1): 100, (1, 1): 99, (1, 4): 390, (1, 16): 1500, (2, 1): 198, (2, 4): 780, (2, 16): 1510}


def test_blocking_work_gets_threads_before_it_gets_workers() -> None:
    found = recommend(crossed(WAITS), cpus=2)
    assert found.setting == Setting(1, 16)
    assert found.setting.arguments == "workers=1, worker_options=lp.WorkerOptions(threads=16)"
    assert "15.00 times the rate of 0 workers and 3.85 times that of 1 worker with 4 threads" in found.reason
    assert "more workers or threads bring less than 5 %" in found.reason
    assert found.ideal.startswith("workers times their threads, as the function blocks")
    shares = {each.measurement.setting: each.share_of_ideal for each in found.comparisons}
    assert shares[Setting(2, 16)] == pytest.approx(1510 / 3200, abs=0.01)


def test_threads_that_still_gain_are_tried_further_before_workers_are() -> None:
    found = recommend(crossed({**WAITS, (2, 16): 3000}), cpus=2)
    assert found.setting == Setting(2, 16)
    assert found.reason.startswith("the largest setting measured is the fastest: 2.00 times the rate of 1 worker with")
    assert any("2 workers with 16 threads each: --threads 16,32,64 looks further" in note for note in found.notes)
    most = recommend(crossed({(1, 64): 100, (1, 256): 200, (2, 64): 200, (2, 256): 400}), cpus=4)
    assert any("--workers 1,2,4,8 looks further" in note for note in most.notes)


def test_work_that_computes_gets_workers_and_no_threads() -> None:
    rates = {(0, 1): 100, (1, 1): 100, (1, 4): 98, (2, 1): 198, (2, 4): 196}
    found = recommend(crossed(rates, share=1.0, cpus=2), cpus=2)
    assert found.setting == Setting(2, 1)
    assert "1.98 times the rate of 1 worker with 1 thread" in found.reason and "full" in found.reason
    assert any(note.startswith("Threads gain nothing here") for note in found.notes)
    assert [each.ideal_speedup for each in found.comparisons] == [1, 1, 1, 2, 2]


def test_threads_that_disturb_each_other_are_not_said_to_be_short_of_memory() -> None:
    rates = {(0, 1): 100, (1, 1): 100, (1, 4): 50, (2, 1): 198, (2, 4): 90}
    found = recommend(crossed(rates, share=1.0, cpus=2), cpus=2)
    assert not any("CPU time it costs" in note for note in found.notes)


def test_threads_that_compute_at_the_same_time_have_another_ideal() -> None:
    """As of an image library or zlib, whose code in C lets go of the interpreter's lock."""
    rates = {(1, 1): 100, (1, 4): 380, (4, 1): 390, (4, 4): 392}
    measurements = [
        Measurement(Setting(workers, threads, WorkerOptions()), (window(workers, rate, share=rate / 100 / workers),))
        for (workers, threads), rate in rates.items()
    ]
    assert not compute_in_turns(measurements) and compute_in_turns(measurements[::2])
    found = recommend(measurements, cpus=4)
    assert found.setting == Setting(1, 4)
    assert [each.ideal_speedup for each in found.comparisons] == [1, 4, 4, 4]
    assert "outside of Python's lock" in found.ideal and not any("gain nothing" in note for note in found.notes)


def test_a_worker_whose_threads_fill_its_time_is_not_called_short_of_a_disk() -> None:
    found = recommend(crossed({(1, 1): 100, (1, 16): 950, (1, 64): 960}, share=0.1), cpus=8)
    assert found.setting == Setting(1, 16)
    assert "the threads of a worker compute in turns, which takes all of its time" in found.reason


def test_the_table_and_the_data_name_threads_where_they_were_asked_for() -> None:
    table = tune_table(recommend(crossed(WAITS), cpus=2), "samples", is_terminal=False)
    assert [column.header for column in table.columns][:3] == ["workers", "threads", "samples/s"]
    assert list(table.columns[1].cells) == ["-", "1", "4", "16", "1", "4", "16"]
    assert list(table.columns[-1].cells).index("<- use") == 3
    data = tune_data("a:b", 8, cpu_budget(), 3.0, recommend(crossed(WAITS), cpus=2))
    assert (data["recommendation"]["workers"], data["recommendation"]["threads"]) == (1, 16)
    assert [each["threads"] for each in data["measurements"]] == [1, 1, 4, 16, 1, 4, 16]


def test_the_table_and_the_data_say_nothing_of_threads_otherwise() -> None:
    found = recommend(measured({0: 10, 1: 160, 2: 310}, threads=16, share=0.01), cpus=2)
    assert [column.header for column in tune_table(found, "samples", is_terminal=False).columns][1] == "samples/s"
    data = tune_data("a:b", 8, cpu_budget(), 3.0, found)
    assert "threads" not in data["recommendation"] and "threads" not in data["measurements"][0]
    assert "thread" not in found.reason


# -- CPUs


@pytest.mark.parametrize(
    ("cpus", "mask", "quota", "decided_by"),
    [
        (8, 8, None, "os.cpu_count()"),
        (8, 3, None, "the affinity mask"),
        (8, 8, 2.5, "the cgroup's CPU quota"),
        (8, 3, 0.4, "the cgroup's CPU quota"),
        (4, 2, 6.0, "the affinity mask"),
    ],
)
def test_the_count_that_decided_is_named(
    monkeypatch: pytest.MonkeyPatch, cpus: int, mask: int, quota: float | None, decided_by: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(mask)), raising=False)
    monkeypatch.setattr(capacity, "cgroup_cpu_quota", lambda: quota)
    budget = cpu_budget()
    assert budget.usable == capacity.usable_cpu_count()
    assert budget.decided_by == decided_by
    assert f"decided by {decided_by}" in str(budget)
