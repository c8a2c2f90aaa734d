"""For any training: the predicted effect of advice comes true, and following it ends the advice in
a few rounds.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderpool.config import MAX_WORKERS
from loaderpool.trainer.explain.verdicts import Finding, Verdict, find_verdict
from tests.support.trainings import Training

ADVISED = {Verdict.TOO_FEW_WORKERS, Verdict.SOURCE_WAITS}


def told(found: Finding) -> int:
    """Return the number in a change."""
    return int(re.search(r"(?:workers|threads)=(\d+)", found.change)[1])  # type: ignore[index]


trainings = st.builds(
    Training,
    step_s=st.floats(2e-3, 0.5),
    batch=st.integers(1, 256),
    sample_cpu_s=st.floats(10e-6, 50e-3),
    sample_blocked_s=st.floats(0.0, 50e-3),
    cpus=st.sampled_from([4.0, 16.0, 64.0]),
    step_cpu_s=st.floats(0.1e-3, 2e-3),
)


@given(trainings, st.integers(1, 16), st.booleans())
def test_what_is_expected_comes_true(
    training: Training, workers: int, are_generators: bool
) -> None:
    """For any training, a change of workers or threads makes steps as long as predicted, within 10
    %.
    """
    window = training.window(workers, lanes=are_generators * MAX_WORKERS)
    found = find_verdict(window)
    if found.verdict not in ADVISED:
        return
    is_of_threads = "threads" in found.change
    length = (
        training.length(workers, told(found)) if is_of_threads else training.length(told(found))
    )
    assert found.expected_step_s == pytest.approx(length, rel=0.1)
    assert length < 0.97 * window.step_s
    if not is_of_threads and told(found) > workers + 1:  # one worker less would not be enough
        assert training.length(told(found) - 1) > training.length(1 << 20)


@given(trainings, st.integers(1, 64))
def test_a_training_that_is_told_to_be_compute_bound_stays_so(
    training: Training, workers: int
) -> None:
    found = find_verdict(training.window(workers))
    if found.verdict is Verdict.COMPUTE_BOUND and found.change:
        assert training.length(told(found)) <= 1.001 * training.length(workers)
        assert find_verdict(training.window(told(found))).verdict is Verdict.COMPUTE_BOUND
