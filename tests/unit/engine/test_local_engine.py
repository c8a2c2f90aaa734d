"""Batches made in the main process: each when it is requested, with little overhead even for tiny
ones.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.engine import local_engine
from loaderpool.plan.permutation import Permutation
from loaderpool.worker.own_process import SavedGlobals


def test_tiny_batches_pay_for_the_order_and_for_the_global_generators_once_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def count(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def counted(*args: Any) -> Any:
            calls.append(name)
            return method(*args)

        monkeypatch.setattr(cls, name, counted)

    count(Permutation, "take")
    count(SavedGlobals, "__init__")
    count(SavedGlobals, "restore")
    loader = lp.Loader(range(100_000), batch_size=8, shuffle=True, workers=0)
    batches = iter(loader)
    next(batches)
    calls.clear()
    for _ in range(500):
        next(batches)
    assert calls == ["take"] * 3  # 4000 rows, 1024 at a time; those of the first batch were known


def test_the_function_is_called_for_no_batch_that_was_not_asked_for() -> None:
    called: list[int] = []
    loader = lp.Loader(
        range(10_000), lambda index: called.append(index) or index, batch_size=4, workers=0
    )
    for asked, _ in zip(range(1, 20), loader, strict=False):
        assert called == list(range(asked * 4))


def test_a_function_that_reads_its_own_loader_leaves_the_callers_generators_alone() -> None:
    def draws(index: int) -> tuple[float, float]:
        drawn = random.random(), np.random.rand()
        if index == 5:
            inner = next(iter(loader))
            assert inner[0].shape == (4,)
        return (drawn[0] + random.random(), drawn[1] + np.random.rand())

    def noise(index: int) -> tuple[float, float]:
        drawn = random.random(), np.random.rand()
        return (drawn[0] + random.random(), drawn[1] + np.random.rand())

    expected = list(lp.Loader(range(8), noise, batch_size=4, workers=0))
    before = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    loader = lp.Loader(range(8), draws, batch_size=4, workers=0)
    batches = list(loader)
    assert pickle.dumps((random.getstate(), np.random.get_state(legacy=False))) == before
    for batch, wanted in zip(batches, expected, strict=True):
        assert np.array_equal(batch, wanted)


def test_a_pass_that_could_not_begin_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise lp.MemoryLimitError("no slot")

    with lp.Loader(range(6), batch_size=2, workers=0) as loader:
        with monkeypatch.context() as refusing, pytest.raises(lp.MemoryLimitError):
            refusing.setattr(local_engine.LocalEngine, "begin", refuse)
            next(iter(loader))
        assert loader.epoch == 0
        assert len(list(loader)) == 3
        assert loader.epoch == 1
