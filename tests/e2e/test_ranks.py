"""Several processes of one training on this machine: they divide its CPUs and memory."""

from __future__ import annotations

import os

import pytest

import loaderpool as lp
from tests.support.child import run_child


def test_processes_of_a_training_divide_the_workers() -> None:
    run_child(
        """
        import os
        import numpy as np
        import loaderpool as lp
        from loaderpool.system import capacity

        cpus = capacity.usable_cpu_count()
        for processes, workers in ((None, cpus), ("8", max(1, cpus // 8))):
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            if processes:
                os.environ["LOCAL_WORLD_SIZE"] = processes
            with lp.Loader(range(64), np.float32, batch_size=8) as loader:
                assert loader.workers == workers, (processes, loader.workers)
                assert len(list(loader)) == 8
                notes = [note for note in loader.statistics().notes if "8 processes" in note]
                assert len(notes) == bool(processes), notes
        """
    ).check()


def test_a_given_number_of_workers_is_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(8 * (os.cpu_count() or 1)))
    for workers, count in (("auto", 1), (3, 3), ((2, 5), 2)):
        with lp.Pool(workers) as pool:
            assert pool.workers == count
