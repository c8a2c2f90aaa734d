"""What is said of how much data alone can bring."""

from __future__ import annotations

import dataclasses

import pytest

from loaderpool.trainer.explain.headspace import Headspace, headspace_of
from tests.support.trainings import BLOCKING, COMPUTING, times


def test_steps_that_found_data_ready_are_the_bound() -> None:
    found = headspace_of(COMPUTING.window(2))
    assert found.ready_step_s == pytest.approx(75e-3)
    assert found.speedup == pytest.approx(COMPUTING.window(2).step_s / 75e-3)
    assert str(found).startswith("HEADSPACE: at best 5.2")
    assert str(found).endswith("75 ms with data ready")


def test_a_pause_test_may_find_a_shorter_one() -> None:
    found = headspace_of(COMPUTING.window(2), quiet_s=0.6, quiet_steps=12)
    assert (found.quiet_step_s, found.bound_s) == (pytest.approx(0.05), pytest.approx(0.05))
    assert "50 ms with data ready and workers at rest (of 12 steps)" in str(found)


def test_a_longer_one_is_no_bound() -> None:
    """The pause test met a hiccup."""
    found = headspace_of(BLOCKING.window(2), quiet_s=6.0, quiet_steps=12)
    assert found.bound_s == pytest.approx(75e-3)


def test_what_was_not_measured_is_not_told() -> None:
    never = dataclasses.replace(BLOCKING.window(2), ready_steps=0, ready_steps_s=0.0)
    found = headspace_of(never)
    assert (found.ready_step_s, found.speedup) == (None, None)
    assert "none found data ready" in str(found)
    assert str(headspace_of(times(never, 0))) == "HEADSPACE: no step has been taken yet"


def test_it_never_promises_slower_steps() -> None:
    assert "at best 1.00 times" in str(Headspace(0.05, 0.06, None, 0))
