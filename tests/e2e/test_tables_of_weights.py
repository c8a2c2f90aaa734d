"""Alias tables of weights: they are built in shared memory, and stay there while they are used."""

from __future__ import annotations

import gc
import os
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer import draws
from tests.support.batches import assert_same, read
from tests.support.child import run_child
from tests.support.processes import status_of_fork

ITEMS = 50_000


def loader(weights: Any, workers: Any = 1) -> lp.Loader:
    order = lp.Weighted(weights, num_samples=96)
    return lp.Loader(range(ITEMS), batch_size=16, order=order, workers=workers)


def of_epoch(epoch: int) -> Any:
    return np.random.default_rng(epoch).random(ITEMS)


def taken_bytes(there: lp.Loader) -> int:
    taken: int = there._core.engine.pool.arena.extents.taken_bytes  # type: ignore[union-attr]
    return taken


def test_a_table_is_in_memory_once() -> None:
    code = """
        import numpy as np
        import loaderpool as lp

        def private_bytes():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) << 10 for line in file if "RssAnon" in line)

        for count in (10, 4_000_000):
            weights = np.random.default_rng(0).random(count)
            with lp.Loader(range(count), order=lp.Weighted(weights), workers=1) as loader:
                before = private_bytes()
                next(iter(loader))
                more = private_bytes() - before
        # A copy of the weights, with which the next epoch compares them.
        assert weights.nbytes < more < 1.5 * weights.nbytes, more
    """
    run_child(textwrap.dedent(code)).check()


def test_tables_of_changed_weights_are_released() -> None:
    with loader(of_epoch, 0) as here, loader(of_epoch) as there:
        assert_same(read(there), read(here))
        taken = taken_bytes(there)
        assert_same(read(there, passes=5), read(here, passes=5))
        assert taken_bytes(there) <= taken + 8 * ITEMS + 4096


def test_the_table_of_a_closed_loader_is_released() -> None:
    with lp.Pool(1) as pool:
        with loader(of_epoch(0), pool) as one:
            read(one)
            before = taken_bytes(one)
        del one
        gc.collect()
        order = np.arange(8)[::-1]
        with lp.Loader(range(8), batch_size=8, order=order, workers=pool) as other:
            assert_same(read(other), [order])
            assert taken_bytes(other) < before


def test_an_interrupted_table_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(weights: Any, empty: Callable[..., Any]) -> None:
        empty(len(weights), np.int64)[: ITEMS // 2] = 3
        raise KeyboardInterrupt

    with loader(of_epoch, 0) as here, loader(of_epoch) as there:
        with monkeypatch.context() as patched:
            patched.setattr(draws, "alias_table", interrupted)
            for _ in range(3):
                with pytest.raises(KeyboardInterrupt):
                    next(iter(there))
        assert_same(read(there), read(here))
        assert taken_bytes(there) < 16 * ITEMS


def test_a_fork_reads_a_table_until_it_is_released() -> None:
    weights = of_epoch(0)
    with loader(weights) as there:
        batches = iter(there)
        next(batches)
        state, indices = there.state_dict(), there.indices(0, 1).tolist()

        def reads_the_same() -> None:
            assert there.state_dict() == state and there.indices(0, 1).tolist() == indices

        assert status_of_fork(reads_the_same) == 0
        readable, writable = os.pipe()
        pid = os.fork()
        if not pid:
            os.read(readable, 1)
            for reads in (there.state_dict, lambda: there.indices(0, 1)):
                try:
                    reads()
                except lp.ClosedError:
                    continue
                os._exit(1)
            os._exit(0)
        del batches
        for item in range(3):  # a released table leaves the memory with a later pass
            weights[item] = 0
            read(there)
        os.write(writable, b"-")
        assert os.waitpid(pid, 0)[1] == 0
        os.close(readable)
        os.close(writable)
