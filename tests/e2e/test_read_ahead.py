"""Calls that a pass makes beyond its own batches. There are none in a prediction, which is a single
pass.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support import leaks

pytestmark = pytest.mark.may_leak(
    reason="a pool is shared by the tests; the fixture looks when the last has run"
)

WORKERS, ITEMS, BATCH_SIZE = 2, 640, 32
BATCHES = ITEMS // BATCH_SIZE
# Samples that a single pass makes ahead: an eighth of the epoch. These are no more batches than there
# are workers.
FEW = BATCHES // 8 * BATCH_SIZE
WAIT_S = 60.0


class Calls:
    """Counts the calls of `fn` in all workers, by the bytes of a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        path.touch()

    def fn(self, item: int) -> Any:
        with open(self.path, "ab") as file:
            file.write(b".")
        return np.full(3, item, np.float32)

    def pair(self, item: int) -> Any:
        return self.fn(item), np.zeros(3, np.float32)

    @property
    def count(self) -> int:
        return len(Path(self.path).read_bytes())

    def settled(self, at_least: int, pool: lp.Pool) -> int:
        """Return the number of calls, after the last one."""
        deadline_s = time.monotonic() + WAIT_S
        while self.count < at_least and time.monotonic() < deadline_s:
            time.sleep(0.005)
        # Loaders of a pool follow each other. While many batches of another loader are made, this
        # one gets all that it may have.
        with lp.Loader(range(40 * BATCHES), batch_size=1, workers=pool) as other:
            assert sum(1 for _ in other) == 40 * BATCHES
        return self.count


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls")


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[lp.Pool]:
    # its threads and files do not count as leaks of the pool
    if importlib.util.find_spec("tensorflow"):
        request.getfixturevalue("tf")
    with leaks.guard(), lp.Pool(workers=WORKERS) as pool:
        yield pool


def a_loop(loader: lp.Loader) -> None:
    assert sum(1 for _ in loader) == BATCHES


def a_loop_after_a_look(loader: lp.Loader) -> None:
    batches = iter(loader)
    assert next(batches)[0, 0] == 0
    for _ in batches:
        pass


def a_dataset(loader: lp.Loader) -> None:
    assert sum(1 for _ in loader.as_dataset()) == BATCHES


def a_prediction(loader: lp.Loader) -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert model.predict(loader.as_dataset(), verbose=0).shape == (ITEMS, 1)


@pytest.mark.parametrize("one_pass", [a_loop, a_loop_after_a_look, a_dataset, a_prediction])
def test_one_pass_makes_a_few_batches_ahead(
    one_pass: Callable[[lp.Loader], None],
    calls: Calls,
    pool: lp.Pool,
    request: pytest.FixtureRequest,
) -> None:
    if one_pass in (a_dataset, a_prediction):
        request.getfixturevalue("tf")
    with lp.Loader(range(ITEMS), calls.fn, batch_size=BATCH_SIZE, workers=pool) as loader:
        one_pass(loader)
        assert calls.settled(ITEMS + FEW, pool) == ITEMS + FEW
        # Batches made ahead are used. If passes follow each other, the batches of the next pass are
        # made during the present one.
        assert [int(x) for batch in loader for x in batch[:, 0]] == list(range(ITEMS))
        assert calls.settled(3 * ITEMS, pool) == 3 * ITEMS


def test_a_small_epoch_has_its_first_batch_ready(calls: Calls, pool: lp.Pool) -> None:
    with lp.Loader(range(3), calls.fn, batch_size=1, workers=pool) as loader:
        assert len(list(loader)) == 3
        assert calls.settled(4, pool) == 4


def test_no_more_batches_are_made_ahead_than_workers_and_one(calls: Calls, pool: lp.Pool) -> None:
    with lp.Loader(range(1000), calls.fn, batch_size=1, workers=pool) as loader:
        assert len(list(loader)) == 1000
        assert calls.settled(1000 + WORKERS + 1, pool) == 1000 + WORKERS + 1


@pytest.mark.parametrize(
    ("order", "is_made_ahead"),
    [
        (np.arange(ITEMS), True),
        (lp.Weighted(np.ones(ITEMS)), True),
        (lp.Weighted(lambda epoch: np.ones(ITEMS)), False),
        (lambda epoch: np.arange(ITEMS), False),
    ],
    ids=["array", "weights", "function of weights", "function"],
)
def test_orders_of_arrays_are_made_ahead(
    order: Any, is_made_ahead: bool, calls: Calls, pool: lp.Pool
) -> None:
    with lp.Loader(
        range(ITEMS), calls.fn, batch_size=BATCH_SIZE, order=order, workers=pool
    ) as loader:
        a_loop(loader)
        # One more call shows the form of a sample, because the order is not known before.
        expected = ITEMS + 1 + FEW * is_made_ahead
        assert calls.settled(expected, pool) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_arrays_that_change_between_epochs_are_read_again(workers: int) -> None:
    indices, weights = np.arange(ITEMS), np.ones(ITEMS)
    orders: list[Any] = [indices, lp.Weighted(weights)]
    for order in orders:
        with lp.Loader(range(ITEMS), batch_size=8, order=order, workers=workers) as loader:
            assert len({int(item) for batch in loader for item in batch}) > ITEMS / 2
            for item in (5, 6):
                indices[:] = item
                weights[:] = 0
                weights[item] = 1
                assert {int(item) for batch in loader for item in batch} == {item}
            weights[:] = 1
