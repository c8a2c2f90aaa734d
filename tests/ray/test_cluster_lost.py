"""A cluster that loses its head, for ten seconds or forever. `pytest -m long tests/ray`.

tests/property/test_state_nodes.py has the same without Ray.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read
from tests.support.ray_cluster import RayCluster
from tests.support.samples import noisy_image

pytestmark = pytest.mark.long

# Ray ends processes that have not reached the head for this time: a minute, except for the
# dispatchers here.
RECONNECT_S = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A cluster that can lose its head, and get it back."""
    with RayCluster(nodes=2, can_lose_head=True) as running:
        yield running


def loader_of(workers: int | lp.Pool, items: int = 1500) -> lp.Loader:
    return lp.Loader(
        range(items),
        functools.partial(noisy_image, wait_s=0.02),
        batch_size=6,
        shuffle=True,
        seed=3,
        workers=workers,
    )


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the expected batches. They do not depend on the duration of a sample."""
    with lp.Pool(8) as pool, loader_of(pool) as loader:
        return read(loader)


def test_a_head_that_is_away_for_ten_seconds_costs_nothing(
    cluster: RayCluster, expected: list[Any]
) -> None:
    with lp.RayPool(cluster.address) as pool, loader_of(pool) as loader:
        got, ended_s, was_back_at = [], 0.0, 0
        for number, batch in enumerate(loader):
            got += read([batch])
            if number == 20:
                cluster.end_head()
                ended_s = time.monotonic()
            elif number > 20 and not was_back_at and time.monotonic() > ended_s + 10:
                cluster.start_head()
                was_back_at = number
        assert 30 < was_back_at < len(expected) - 10, (
            "batches came while it was away, and when it was back"
        )
        assert_same(got, expected)
        told = loader.statistics()
        assert (told.nodes_lost, told.supervisor_restarts, told.notes) == (0, 0, ())


def test_when_it_does_not_come_back_the_error_says_so_and_the_place_is_saved(
    cluster: RayCluster, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_S))
    got: list[Any] = []
    with lp.RayPool(cluster.address) as pool, loader_of(pool) as loader:
        with pytest.raises(
            lp.ClusterError, match="the Ray cluster was lost: no Ray cluster answers at"
        ):
            for number, batch in enumerate(loader):
                got += read([batch])
                if number == 20:
                    cluster.end_head()
        state = json.loads(json.dumps(loader.state_dict()))
    assert 21 <= len(got) < len(expected)
    with lp.Pool(8) as pool, loader_of(pool) as loader:
        loader.load_state_dict(state)
        assert_same(got + read(loader), expected)
