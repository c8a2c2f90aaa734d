"""Shared objects: an iterator of several threads, a sequence of several loaders, and an exit while
a thread waits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.engine.session import Session


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_that_share_an_iterator_get_each_batch_once(workers: int) -> None:
    with lp.Loader(range(20_000), lambda item: item, batch_size=4, workers=workers) as loader:
        batches = iter(loader)
        seen: list[list[int]] = [[] for _ in range(4)]
        failed: list[BaseException] = []

        def take(mine: list[int]) -> None:
            try:
                for batch in batches:
                    mine += batch.tolist()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=take, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert sorted(item for mine in seen for item in mine) == list(range(20_000))


def test_an_iterator_that_is_closed_while_its_first_batch_is_awaited_gives_none() -> None:
    """Before a fix, it returned all batches, and kept its slots until the loader was closed."""
    is_making = threading.Event()

    def slow(item: int) -> Any:
        time.sleep(0.5 * (item == 0))
        return np.int64(item)

    with lp.Loader(range(400), slow, batch_size=10, workers=2) as loader:
        batches, seen = iter(loader), list[Any]()

        def take() -> None:
            is_making.set()
            seen.extend(batches)

        thread = threading.Thread(target=take)
        thread.start()
        is_making.wait()
        time.sleep(0.1)
        batches.close()
        thread.join()
        assert not seen and not loader._core.engine.runs.by_number  # type: ignore[union-attr]
        assert np.concatenate(list(loader)).tolist() == list(range(400))
        assert loader.statistics().epoch == 1  # the iterator without batches does not count


def test_a_run_that_is_ended_while_it_begins_again_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end was sent before the beginning, so the run kept its slots forever, and other runs
    waited for them.
    """
    with lp.Loader(range(400), np.int64, batch_size=10, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        engine: Any = loader._core.engine
        (run,) = engine.runs.by_number.values()
        with monkeypatch.context() as patch, engine.pool.lock:
            # for example, called by a finalizer
            patch.setattr(Session, "catch_up", lambda session: batches.close())
            run._begin_again()
        assert not engine.runs.by_number
        assert np.concatenate(list(loader)).tolist() == list(range(400))


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_sample_that_takes_the_supervisor_along_does_not_go_on_for_ever(action: str) -> None:
    def fn(item: int) -> int:
        if item == 9:
            os.killpg(0, signal.SIGKILL)
        return item

    loader = lp.Loader(range(40), fn, batch_size=4, workers=1, on_error=action)
    told = r"in a row without a batch in between.*source index [89] or shortly after"
    with loader, pytest.raises(lp.PoolBrokenError, match=told):
        list(loader)


class Growing:
    by = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.full(2, self.by + index)

    def on_epoch_end(self) -> None:
        self.by = 100  # changes once


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_made_by_replace_is_told_of_changes_itself(workers: int) -> None:
    with (
        lp.Loader.from_sequence(Growing(), workers=1) as one,
        one.replace(workers=workers) as other,
    ):
        assert [int(batch[0]) for _ in range(2) for batch in one] == [0, 1, 2, 100, 101, 102]
        list(other)
        assert [int(batch[0]) for batch in other] == [100, 101, 102]


def ragged(item: int) -> Any:
    return np.arange(item % 4, dtype=np.int32), "é" * (item % 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fn": lambda item: (np.float32(item), np.zeros(3, np.int16)), "batch_size": 3}, 40 * (4 + 6)),
        # Each batch has six int32 and five row splits. Text also has its characters.
        ({"fn": ragged, "batch_size": 4, "ragged": True}, 10 * (6 * 4 + 5 * 8) + sum(i % 3 for i in range(40))),
        ({"fn": lambda item: item if item % 2 else 1 / 0, "batch_size": 4, "on_error": "skip"}, 20 * 8),
    ],
    ids=["fixed", "ragged and text", "skip"],
)  # fmt: skip
def test_bytes_are_those_of_the_batches_handed_over(
    settings: dict[str, Any], expected: int
) -> None:
    for workers in (0, 2):
        with lp.Loader(range(40), workers=workers, **settings) as loader:
            list(loader)
            assert loader.statistics().bytes == expected
            assert loader.statistics().batches == len(list(loader))
