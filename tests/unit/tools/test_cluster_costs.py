"""What more hosts would bring, and cost, from what one worker needs for a sample."""

from __future__ import annotations

import pytest

from loaderpool.system.readable import readable_size
from loaderpool.tools.cli.tune_hosts import default_hosts
from loaderpool.tools.tuning.cluster_costs import (
    COSTS,
    SampleCost,
    describe_forecast,
    describe_sample,
    find_limits,
    forecast,
    sample_cost,
)
from loaderpool.tools.tuning.hosts import HostComparison, HostSetting, recommend_hosts
from loaderpool.tools.tuning.window import Measurement, Window
from loaderpool.trainer.engine.engine_statistics import WorkerStatistics

JPEG = SampleCost(seconds=0.009, nbytes=150e3, rows=256)
WIDE = SampleCost(seconds=0.0003, nbytes=4.8e6, rows=1)  # hardly any work


def test_more_workers_bring_more_in_proportion() -> None:
    one, many = forecast(JPEG, 1, 2), forecast(JPEG, 4, 64)
    assert one.samples_per_s == pytest.approx(2 / 0.009)
    assert many.samples_per_s == pytest.approx(32 * one.samples_per_s)
    assert many.bytes_per_s == pytest.approx(many.samples_per_s * 150e3)
    assert many.share_of(10) == pytest.approx(many.bytes_per_s * 8 / 10e9)


def test_the_cost_here_is_that_of_the_bytes_the_tickets_and_the_batches() -> None:
    many = forecast(JPEG, 4, 64)
    batches = many.samples_per_s / 256
    expected = sum(
        each.cpus + (each.ms_per_mb * many.bytes_per_s / 1e6 + (each.ms_per_ticket + each.ms_per_batch) * batches) / 1e3
        for each in COSTS
    )
    assert many.trainer_cpus == pytest.approx(expected)


def test_tiny_batches_travel_many_a_ticket() -> None:
    tiny = SampleCost(seconds=1e-6, nbytes=100, rows=10)
    per_batch_s = forecast(tiny, 1, 1).trainer_cpus / (1e6 / 10)
    assert per_batch_s < max(each.ms_per_ticket for each in COSTS) / 1e3 / 10


def test_what_is_said_beforehand() -> None:
    assert describe_sample(JPEG) == "a sample takes 9 ms of a worker and 150 kB"
    said = describe_forecast(forecast(JPEG, 4, 64))
    assert said.startswith("64 workers on 4 hosts would bring 7,111 samples/s, 1.07 GB/s, which take ")
    assert said.endswith(" CPUs here")
    assert find_limits([forecast(JPEG, 4, 64)], cpus=16) == ()


def test_what_is_in_the_way_is_named() -> None:
    network, machine = find_limits([forecast(JPEG, 1, 2), forecast(JPEG, 16, 256)], cpus=2)
    assert network == "10 Gbit/s carry what 75 workers make, 25 Gbit/s carry what 187 workers make"
    assert "keep 2 CPUs here busy" in machine
    *_, why = find_limits([forecast(WIDE, 1, 1)], cpus=100)
    assert "workers of this machine" in why


@pytest.mark.parametrize(
    ("nbytes", "words"), [(999, "999 bytes"), (1500, "1.5 kB"), (4.8e6, "4.8 MB"), (2e9, "2 GB"), (2.5e12, "2,500 GB")]
)
def test_sizes_in_powers_of_ten(nbytes: float, words: str) -> None:
    assert readable_size(nbytes) == words


def window(samples_per_s: float, busy_s: float = 0.9, queued_s: float = 0.0, cpu_s: float = 0.5) -> Window:
    worker = WorkerStatistics(0, 1, 10, int(samples_per_s), busy_s, 0.1, cpu_s)
    return Window(1.0, 1.0, 10, int(samples_per_s), int(1000 * samples_per_s), 0.0, 0.1, queued_s, (worker,))


def test_a_samples_cost_leaves_out_what_others_took_of_the_cpu() -> None:
    calm, busy = sample_cost(window(100)), sample_cost(window(100, busy_s=0.9, queued_s=0.3))
    assert (calm.seconds, calm.nbytes, calm.rows) == (pytest.approx(0.009), 1000.0, 10.0)
    assert busy.seconds == pytest.approx(0.006)
    assert sample_cost(window(100, queued_s=5.0)).seconds == pytest.approx(0.005), "no less than its CPU time"


def compared(hosts: int, samples_per_s: float) -> HostComparison:
    setting = HostSetting(hosts, hosts=hosts)
    return HostComparison(Measurement(setting, (window(samples_per_s),)), hosts, hosts, hosts * 100.0)


def test_the_fewest_hosts_that_are_as_good_are_recommended() -> None:
    chosen, why = recommend_hosts([compared(1, 100), compared(2, 196), compared(4, 200)])
    assert (chosen.hosts, chosen.share_of_ideal) == (2, pytest.approx(0.98))
    assert "less than 5%" in why
    assert chosen.measurement.setting.arguments == "workers=lp.RayPool(hosts=2)"
    chosen, why = recommend_hosts([compared(1, 100), compared(2, 190)])
    assert chosen.hosts == 2
    assert why == "1.90 times the rate of 1 host; more may bring more"


@pytest.mark.parametrize(("nodes", "counts"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_numbers_of_hosts_double_up_to_all(nodes: int, counts: tuple[int, ...]) -> None:
    assert default_hosts(nodes) == counts
