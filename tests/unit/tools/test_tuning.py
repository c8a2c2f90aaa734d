"""The setting that `tune` recommends, and its measurements, on loaders with known rates."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

import loaderpool as lp

pytest.importorskip("click")
pytest.importorskip("rich")

from loaderpool.tools.tune import (
    Measurement,
    Setting,
    bursts_of,
    choose,
    default_counts,
    is_clear,
    measure_all,
)


def measurement(workers: int, rate: float, cpus: float = 1.0, threads: int = 1) -> Measurement:
    return Measurement(Setting(workers, threads), rate, 4 * rate, cpus, 0.0)


@pytest.mark.parametrize(
    ("rates", "cpus", "chosen", "says"),
    [
        (
            {0: 100, 1: 98, 2: 190, 4: 195},
            2.0,
            2,
            "it has 1.90 times the rate of workers=0, and no setting is more than 5% faster",
        ),
        ({0: 100, 1: 98, 2: 190, 4: 195}, 2.0, 2, "because all CPUs are in use (2 CPUs)"),
        ({0: 100, 1: 100, 2: 190, 4: 195}, 0.2, 2, "with 0.2 of 2 CPUs in use"),
        ({0: 100, 1: 98, 2: 102, 4: 101}, 1.0, 0, "no setting is more than 5% faster: tr"),
        ({1: 100, 2: 200, 4: 400}, 0.2, 4, "the largest setting and the fastest (4.00 times"),
        ({2: 100}, 1.0, 2, "the only setting"),
    ],
)
def test_the_fewest_workers_within_5_percent_are_recommended(
    rates: dict[int, float], cpus: float, chosen: int, says: str
) -> None:
    found, reason = choose([measurement(workers, rate, cpus) for workers, rate in rates.items()], 2)
    assert found.setting.workers == chosen and says in reason


def test_busy_other_programs_are_no_limit_of_the_source() -> None:
    """A part of their CPU time may not be counted, so that the CPUs do not seem full."""
    found = [
        dataclasses.replace(measurement(workers, rate, 0.1), other_cpus=1.6)
        for workers, rate in {0: 50, 1: 100, 2: 102}.items()
    ]
    reason = choose(found, 2)[1]
    assert "while other programs use 1.6 of 2 CPUs. Stop them" in reason
    assert "disk" not in reason


def with_spread(workers: int, rate: float, spread: float) -> Measurement:
    return dataclasses.replace(measurement(workers, rate), spread=spread)


@pytest.mark.parametrize(
    ("rates", "clear"),
    [
        ({0: (100, 0.1), 2: (190, 0.1)}, True),
        ({0: (100, 0.25), 2: (190, 0.25)}, True),  # faster even in its slower round
        ({0: (100, 0.25), 2: (120, 0.25)}, False),
        ({0: (100, 0.25), 2: (99, 0.1)}, False),  # there is no smaller setting
        ({0: (100, 0.0), 2: (190, 0.0), 4: (195, 0.3)}, False),
    ],
)
def test_a_recommendation_is_clear_if_rounds_differ_less_than_settings(
    rates: dict[int, tuple[float, float]], clear: bool
) -> None:
    measured = [with_spread(workers, *how) for workers, how in rates.items()]
    assert is_clear(measured, choose(measured, 2)[0]) == clear


def test_other_programs_are_named_where_they_use_the_cpus() -> None:
    measured = [
        dataclasses.replace(measurement(workers, rate, 0.25), other_cpus=1.7)
        for workers, rate in {0: 100, 2: 190, 4: 192}.items()
    ]
    assert "because all CPUs are in use (2 CPUs, 1.7 by other programs)" in choose(measured, 2)[1]


def test_fewer_workers_come_before_fewer_threads() -> None:
    measured = [
        measurement(1, 100),
        measurement(1, 390, threads=4),
        measurement(2, 200),
        measurement(2, 400, threads=4),
    ]
    found, _ = choose(measured, 2)
    assert str(found.setting) == "workers=1, threads=4"


@pytest.mark.parametrize(
    ("cpus", "counts"), [(1, [0, 1, 2]), (2, [0, 1, 2, 4]), (6, [0, 1, 2, 4, 6, 8, 12])]
)
def test_default_counts_double_up_to_twice_the_cpus(cpus: int, counts: list[int]) -> None:
    assert default_counts(cpus) == counts


def _wait(item: int) -> np.float32:
    time.sleep(0.004)
    return np.float32(item)


def test_rounds_go_forth_and_back_and_no_rate_is_above_what_can_be() -> None:
    order: list[tuple[int, int]] = []
    loader = lp.Loader(range(40), _wait, batch_size=4, workers=0)
    settings = [Setting(0), Setting(2)]
    found = measure_all(
        lambda: loader,
        settings,
        0.3,
        lambda done, number: order.append((number, done.setting.workers)),
    )
    assert order == [(1, 2), (1, 0), (2, 0), (2, 2)]  # 0 workers last
    none, two = found
    assert none.samples_per_s < 250 and none.samples_per_s < two.samples_per_s < 2 * 250 * 1.1
    assert two.bytes_per_s == pytest.approx(4 * two.samples_per_s)
    assert all(0 <= each.spread < 1 for each in found)


def test_passes_without_batches_are_an_error_and_no_endless_loop() -> None:
    with pytest.raises(lp.ArgumentError, match="no batch"):
        next(bursts_of([]))  # type: ignore[arg-type]
