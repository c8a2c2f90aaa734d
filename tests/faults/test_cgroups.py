"""Real cgroups with little memory or few processes: the kernel's OOM killer, and a fork that
fails.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.support.cgroups import JOIN, small_cgroup
from tests.support.child import ChildResult, run_child

LITTLE_BYTES = 400 * 1024 * 1024

START = """
import os
import numpy as np
import loaderpool as lp

def fn(item):
    if item == 11 and not os.path.exists(once):
        if once != "always":
            open(once, "w").close()
        np.ones(1 << 30, np.uint8)  # more than the cgroup has
    return np.full(1000, item)
"""


def run_in(controller: str, limit: int, code: str) -> ChildResult:
    with small_cgroup(controller, limit) as env:
        env["OPENBLAS_NUM_THREADS"] = "1"
        return run_child(JOIN + START + textwrap.dedent(code), env=env, timeout_s=90).check()


def test_a_worker_that_the_oom_killer_took_once_changes_no_bit() -> None:
    result = run_in("memory", LITTLE_BYTES, """
        once = os.path.abspath("killed")
        with lp.Loader(range(40), fn, batch_size=4, workers=2, shuffle=True) as loader:
            got = np.concatenate([*loader, *loader])[:, 0].tolist()
            print(loader.statistics().restarts)
        with loader.replace(workers=0) as serial:
            assert got == np.concatenate([*serial, *serial])[:, 0].tolist()
    """)  # fmt: skip
    assert result.stdout == "1\n"


def test_a_sample_that_the_oom_killer_always_takes_is_named_with_the_cause() -> None:
    result = run_in("memory", LITTLE_BYTES, """
        once = "always"
        with lp.Loader(range(40), fn, batch_size=4, workers=2) as loader:
            batches = iter(loader)
            assert [int(next(batches)[0, 0]) for _ in range(2)] == [0, 4]
            try:
                next(batches)
            except lp.WorkerLostError as error:
                print(error.index, "The kernel killed it because memory ran out" in str(error))
        with loader.replace(on_error="skip") as loader:
            print(sum(map(len, loader)), loader.statistics().skipped_indices)
    """)  # fmt: skip
    assert result.stdout == "11 True\n39 (11,)\n"


def test_buffers_keep_within_what_the_cgroup_has() -> None:
    result = run_in("memory", LITTLE_BYTES, """
        def large(item):
            return np.full(1_000_000, item, np.float32)  # batches of 32 MB
        with lp.Loader(range(160), large, batch_size=8, workers=2) as loader:
            for epoch in range(3):
                assert [float(batch[0, 0]) for batch in loader] == list(range(0, 160, 8))
            print(loader.statistics().restarts)
    """)  # fmt: skip
    assert result.stdout == "0\n"


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (0, "Could not start the supervisor process"),
        (1, "no worker could be started"),
        (2, ""),
        (3, ""),
    ],
)
def test_where_few_processes_are_allowed_it_works_or_says_so(left: int, told: str) -> None:
    """The limit is the main process's only thread, and this number of processes."""
    result = run_in("pids", 1 + left, """
        once = "never"
        try:
            with lp.Loader(range(40), lambda item: np.full(1000, item), batch_size=4, workers=4) as loader:
                assert [int(batch[0, 0]) for batch in loader] == list(range(0, 40, 4))
        except lp.LoaderpoolError as error:
            print(error)
    """)  # fmt: skip
    assert told in result.stdout
    assert result.stdout.count("\n") <= 2
    assert not told or "processes" in result.stdout
