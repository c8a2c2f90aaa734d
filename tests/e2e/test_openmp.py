"""If OpenMP is set to bind threads, it binds the main process to one CPU. A message reports that,
and workers are not bound.
"""

from __future__ import annotations

import os

import pytest

from tests.support.child import run_child

needs_two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="there is only one CPU"
)
BOUND = """
import os, warnings
import numpy as np
import loaderpool as lp
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as libgomp does when torch is imported
"""


@needs_two_cpus
def test_a_process_that_openmp_bound_is_warned_of() -> None:
    run_child(
        BOUND
        + """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with lp.Loader(range(64), np.float32, batch_size=8, workers=1) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        told = loader.explain().why
texts = [str(each.message) for each in caught if issubclass(each.category, lp.LoaderpoolWarning)]
assert len(texts) == 1 and "OMP_PROC_BIND=true" in texts[0] and "1 of " in texts[0], texts
assert "OMP_PROC_BIND=true" in told, told
""",
        env={"OMP_PROC_BIND": "true"},
    ).check()


@needs_two_cpus
def test_a_process_that_was_bound_otherwise_is_not() -> None:
    run_child(
        BOUND
        + """
warnings.simplefilter("error")
with lp.Loader(range(64), np.float32, batch_size=8, workers=1) as loader:
    list(loader)
    assert "OMP" not in loader.explain().why
""",
        env=dict.fromkeys(["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"]),
    ).check()


@needs_two_cpus
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_openmp_binds_no_worker(start: str) -> None:
    """A library that the function imports would bind all of them to the same CPU."""
    pytest.importorskip("torch", reason="a library with OpenMP")
    run_child(
        f"""
        import os
        import loaderpool as lp

        def cpus(item):
            import torch
            return len(os.sched_getaffinity(0))

        count = len(os.sched_getaffinity(0))
        with lp.Pool(1, start={start!r}) as pool, lp.Loader(range(4), cpus, batch_size=4, workers=pool) as loader:
            assert next(iter(loader)).tolist() == [count] * 4
        """,
        env={"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"},
    ).check()
