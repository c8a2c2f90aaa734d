"""`LocalEngine` and `PoolEngine` keep the contract of engines."""

from __future__ import annotations

import pytest

import loaderpool as lp
from tests.support.batches import Place
from tests.support.engine_contract import EngineContract, PoolEngineContract


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def workers(self) -> int:
        return 0


class TestPoolEngine(PoolEngineContract):
    @pytest.fixture
    def workers(self, on: Place) -> lp.Pool:
        pool: lp.Pool = on(2)["workers"]
        return pool
