"""Processes of one training on this machine divide its CPUs and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import loaderpool as lp
from loaderpool.system import capacity
from tests.support.child import run_child
from tests.support.interpreters import Interpreter

RANK = """
import os, sys
import loaderpool as lp
from loaderpool.supervisor.forms import memory_limit
from loaderpool.system import capacity

def start():
    global loader
    free = capacity.available_memory_bytes()
    loader = lp.Loader(range(64), lambda i: i, batch_size=8, workers="auto")
    workers, limit = loader.workers, memory_limit(loader.config)
    assert next(iter(loader)).tolist() == list(range(8))
    return workers, limit, max(free, capacity.available_memory_bytes())

print(os.getpid(), flush=True)
for line in sys.stdin:
    print(*eval(line), flush=True)
"""


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


def test_eight_ranks_take_a_quarter_of_the_memory(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANK)
    launcher = {"TORCHELASTIC_RUN_ID": str(tmp_path), "LOCAL_WORLD_SIZE": "8"}
    ranks = list[Interpreter]()
    try:
        ranks += [Interpreter(tmp_path / "script.py", **launcher) for _ in range(8)]
        for rank in ranks:
            rank.begin("start()")
        answers = [[int(word) for word in rank.answer().split()] for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    workers, limits, free = zip(*answers, strict=True)
    print(f"{sum(workers)} workers, {sum(limits) / max(free):.3f} of the free memory")
    assert sum(workers) == 8 * max(1, capacity.usable_cpu_count() // 8)
    # The default for each rank is at most 2 GiB.
    assert 0.1 * min(*free, 64 << 30) < sum(limits) <= 0.25 * max(free)
