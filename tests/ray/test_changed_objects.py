"""Nodes of a cluster get changed objects, as workers on this machine do."""

from __future__ import annotations

from typing import Any

import numpy as np

import loaderpool as lp
from tests.support.ray_cluster import RayCluster


class Staged:
    def __init__(self) -> None:
        self.stage, self.table = 0, np.zeros(100_000)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.array([self.stage, self.table[index]])


class Hooked(Staged):
    def on_epoch_end(self) -> None:
        self.stage += 1
        self.table[:] += 1


def shown(batches: Any) -> list[list[int]]:
    return (
        np.unique(np.concatenate([np.reshape(batch, (-1, 2)) for batch in batches]), axis=0)
        .astype(int)
        .tolist()
    )


def test_each_epoch_uses_the_objects_as_they_are(cluster: RayCluster) -> None:
    dataset = Staged()
    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(dataset, batch_size=4, workers=pool) as loader,
    ):
        for dataset.stage in range(3):
            dataset.table[:] = dataset.stage
            assert shown(loader) == [[dataset.stage, dataset.stage]]
        old = iter(loader)
        first = next(old)
        dataset.stage = 9
        assert shown(loader) == [[9, 2]]
        assert shown([first, *old]) == [[2, 2]]


def test_hooks_of_a_sequence_are_seen(cluster: RayCluster) -> None:
    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader.from_sequence(Hooked(), workers=pool) as loader,
    ):
        assert [shown(loader) for _ in range(3)] == [[[0, 0]], [[1, 1]], [[2, 2]]]
