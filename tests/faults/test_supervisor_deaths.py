"""The supervisor dies, at any moment and in any way. Another one continues, and the bits stay the
same.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import ClosedError, PoolBrokenError
from tests.support.batches import kill_supervisor, supervisor_of, told_when
from tests.support.processes import wait_gone
from tests.support.samples import noisy_image

ITEMS, BATCH = 240, 4


def tiny(item: int, rng: np.random.Generator) -> Any:
    return {"item": np.float32(item), "noise": rng.random()}


def of_varied_length(item: int, rng: np.random.Generator) -> Any:
    return {"item": np.full((1 + item % 5,), item, np.float32), "noise": rng.random()}


def slow_batch(item: int, rng: np.random.Generator) -> Any:
    time.sleep(0.07)
    return tiny(item, rng)


def bits(batch: Any) -> tuple[bytes, bytes]:
    return batch["item"].tobytes(), batch["noise"].tobytes()


SHAPES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "single batches": (noisy_image, {}),
    "chunks": (tiny, {}),
    "varying": (of_varied_length, {"pad": True}),
    "row ranges": (slow_batch, {}),
}


@pytest.mark.parametrize(
    ("shape", "deterministic"), [*((shape, True) for shape in SHAPES), ("single batches", False)]
)
def test_a_killed_supervisor_changes_no_bit(shape: str, deterministic: bool) -> None:
    fn, settings = SHAPES[shape]
    items = 20 if shape == "row ranges" else ITEMS
    settings = {"batch_size": BATCH, "shuffle": True, "seed": 3, **settings}
    with lp.Loader(range(items), tiny if fn is slow_batch else fn, workers=0, **settings) as loader:
        expected = [[bits(batch) for batch in loader] for _ in range(2)]
    killed = set()
    with lp.Loader(range(items), fn, workers=2, deterministic=deterministic, **settings) as loader:
        for epoch in range(2):
            got, held = [], []
            for number, batch in enumerate(loader):
                got.append(bits(batch))
                held.append((batch, batch["item"].copy()))
                if number in ((1, 3) if shape == "row ranges" else (3, 7)):
                    killed.add(kill_supervisor(loader))
            assert (
                (got == expected[epoch])
                if deterministic
                else (sorted(got) == sorted(expected[epoch]))
            )
            assert all((batch["item"] == copy).all() for batch, copy in held), (
                "somebody wrote into a lent slot"
            )
        told_when(loader, lambda told: told.supervisor_restarts == len(killed) >= 1)


def test_what_hooks_changed_is_known_to_the_next_one() -> None:
    class Growing:
        def __init__(self) -> None:
            self.base = np.zeros(70_000)  # large enough to be stored beside the pickle
            self.small = 0

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return np.array([self.base[index], self.small, index])

        def on_epoch_end(self) -> None:
            self.base = self.base + 1
            self.small += 10

    with lp.Loader.from_sequence(Growing(), workers=1) as loader:
        for epoch in range(4):
            rows = []
            for number, batch in enumerate(loader):
                rows.append(batch.tolist())
                if number == 2 and epoch in (1, 2):
                    kill_supervisor(loader)
            assert rows == [[epoch, 10 * epoch, index] for index in range(6)]
        told_when(loader, lambda told: told.supervisor_restarts == 2)


def test_a_worker_that_is_stopped_for_a_moment_is_left_alone() -> None:
    with lp.Loader(range(ITEMS), noisy_image, batch_size=BATCH, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        pid = loader.statistics().workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        assert len(list(batches)) == ITEMS // BATCH - 1
        assert loader.statistics().restarts == 0


def test_batches_that_had_come_are_handed_out_where_none_takes_its_place() -> None:
    with lp.Pool(workers=2, restarts=0) as pool:
        first, second = (
            lp.Loader(range(4000), fn, batch_size=BATCH, workers=pool)
            for fn in (slow_batch, noisy_image)
        )
        came = iter(second)
        got = next(came)["item"][:, 0, 0].tolist()
        time.sleep(0.2)  # so that more arrive
        got += next(came)["item"][:, 0, 0].tolist()
        kill_supervisor(second)
        with pytest.raises(PoolBrokenError, match="SIGKILL"):
            list(first)
        with pytest.raises(PoolBrokenError, match="SIGKILL"):
            for batch in came:
                got += batch["item"][:, 0, 0].tolist()
    assert got == list(range(len(got)))
    assert len(got) > 2 * BATCH


def test_closing_while_it_is_dead() -> None:
    loader = lp.Loader(range(ITEMS), noisy_image, batch_size=BATCH, workers=2)
    batches = iter(loader)
    first = next(batches)
    processes = [supervisor_of(loader), *(worker.pid for worker in loader.statistics().workers)]
    os.kill(processes[0], signal.SIGKILL)
    loader.close()
    loader.close()
    for one_pass in (batches, loader):  # the pass that has started, and another one
        with pytest.raises(ClosedError, match="closed"):
            next(iter(one_pass))
    assert wait_gone(processes, 5.0) == []
    assert loader.statistics().supervisor_restarts == 0  # none was started only to be closed
    assert first["item"][:, 0, 0].tolist() == [0, 1, 2, 3]
