"""SIGTERM to every process of a job in mid-epoch: the pool works on, an emergency checkpoint is right, all goes on."""

from __future__ import annotations

from tests.support.child import run_child

_JOB = """
import json, os, signal, sys, time
import numpy as np
import loaderpool as lp

told = []

def sample(item, rng):
    time.sleep(0.001)
    return item + rng.random()

def loader(workers):
    return lp.Loader(range(400), sample, batch_size=8, shuffle=True, seed=3, workers=workers)

def descendants(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in file.read().split():
                found += [int(child), *descendants(child)]
    return found

if __name__ == "__main__":
    assert os.getpgrp() == os.getpid()  # a group of its own, as a job has
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    with loader(2) as whole:
        expected = [batch.tolist() for batch in whole]
    for stop in (1, 17):
        told.clear()
        with loader(2) as first:
            batches, got = iter(first), []
            for batch in batches:
                got.append(batch.tolist())
                if len(got) == stop:
                    for pid in descendants(os.getpid()):
                        os.kill(pid, signal.SIGTERM)
                    os.killpg(0, signal.SIGTERM)
                if told:
                    break
            saved = json.dumps(batches.state_dict())
            assert [*got, *(batch.tolist() for batch in batches)] == expected  # what the signal ended is replaced
        with loader(1) as second:
            second.load_state_dict(json.loads(saved))
            assert [*got, *(batch.tolist() for batch in second)] == expected, stop
        assert len(got) == stop
"""


def test_sigterm_to_all_processes_of_a_job_leaves_the_pool_working() -> None:
    run_child(_JOB, timeout_s=60).check()
