"""The pace of a dispatcher and of hosts, by the simulation of scripts/bench: no process, and a clock of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from loaderpool.ray import exchange_pace, host_record, waiting_answers

SCRIPTS = str(Path(__file__).parents[3] / "scripts")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The simulation, whose clock is taken back afterwards."""
    monkeypatch.syspath_prepend(SCRIPTS)
    for module in (exchange_pace, host_record, waiting_answers):
        monkeypatch.setattr(module, "clock", module.clock)
    yield importlib.import_module("bench.hosts_simulated")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bench", "benchlib")]:
        del sys.modules[name]


@pytest.mark.parametrize("hosts", [1, 3])
def test_workers_of_a_few_hosts_have_always_something_to_do(bench: ModuleType, hosts: int) -> None:
    for kind in bench.KINDS[::2]:
        found = bench.simulate(bench.World(kind, hosts, gbits=100, counts_state=False))
        assert found.workers > 0.97
        assert found.megabytes_a_call >= 7 * kind.nbytes / 1e6  # and many batches travel together


def test_many_hosts_do_not_make_many_small_calls(bench: ModuleType) -> None:
    """Slots are short for them: each has few tickets, and would answer each in a call."""
    jpeg = bench.KINDS[0]
    ten, hundred = (bench.simulate(bench.World(jpeg, hosts, 100, counts_state=False)) for hosts in (10, 100))
    assert hundred.megabytes_a_call > jpeg.nbytes / 1e6 * 1.5
    assert hundred.rate > 0.5 * ten.rate


def test_a_narrow_network_is_full(bench: ModuleType) -> None:
    found = bench.simulate(bench.World(bench.KINDS[1], 3, 10, counts_state=False))
    assert found.ends_by == "network" and found.network > 0.97
