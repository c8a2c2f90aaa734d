"""Several trainers on one cluster, each with its own pool and shard: together they have the batches
of one loader.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import assert_same, read, read_while
from tests.support.ray_cluster import RayCluster
from tests.support.samples import noisy_image

_ROOT = Path(__file__).resolve().parents[2]
_BATCH, _TRAINERS = 4, 2


# By name, because the trainers are other programs.


def make_loader(workers: int | lp.Pool, trainers: int = 1, index: int = 0) -> lp.Loader:
    return lp.Loader(
        range(160), noisy_image, batch_size=_BATCH * _TRAINERS // trainers, shuffle=True, seed=7,
        shard=lp.Shard(trainers, index), workers=workers,
    )  # fmt: skip


def read_shard(address: str, folder: str, index: int) -> bytes:
    """Return two passes of a trainer with one node. In the first pass, it waits until all trainers
    have a batch.

    Args:
        address: address of the cluster.
        folder: folder in which each trainer creates a file after its first batch.
        index: index of the shard.
    """

    def meet() -> None:
        Path(folder, str(index)).touch()
        deadline_s = time.monotonic() + 60
        while len(list(Path(folder).iterdir())) < _TRAINERS:
            assert time.monotonic() < deadline_s, "the other trainer has no batch: it has no node"
            time.sleep(0.05)

    with lp.RayPool(address, nodes=1) as pool, make_loader(pool, _TRAINERS, index) as loader:
        return pickle.dumps(read_while(loader, {0: meet}) + read(loader))


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Batches of one loader with twice the batch size."""
    with make_loader(0) as loader:
        return read(loader, passes=2)


def assert_are_shards_of(shards: list[list[Any]], expected: list[Any]) -> None:
    """Check that the rows of all shards' batch k are those of batch k."""
    together = [{key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
                for parts in zip(*shards, strict=True)]  # fmt: skip
    assert_same(together, expected)


def test_two_trainers_at_once(cluster: RayCluster, tmp_path: Path, expected: list[Any]) -> None:
    code = """
        import sys
        from tests.ray.test_several_trainers import read_shard
        sys.stdout.buffer.write(read_shard(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), cluster.address, str(tmp_path)]
    trainers = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, cwd=_ROOT)
        for index in range(_TRAINERS)
    ]
    output = [trainer.communicate(timeout=100)[0] for trainer in trainers]
    assert [trainer.returncode for trainer in trainers] == [0, 0]
    assert_are_shards_of([pickle.loads(each) for each in output], expected)


def test_trainers_that_are_actors_as_under_ray_train(
    cluster: RayCluster, tmp_path: Path, expected: list[Any]
) -> None:
    """The user's program is itself a driver, and its trainers are actors on nodes of the
    cluster.
    """
    code = """
        import pickle, sys
        import ray
        from tests.ray.test_several_trainers import read_shard

        class Trainer:
            def train(self, address, folder, index):
                return read_shard(address, folder, index)

        address, folder = sys.argv[1:]
        ray.init(address=address, log_to_driver=False)
        trainers = [ray.remote(num_cpus=0)(Trainer).remote() for _ in range(2)]
        shards = ray.get([trainer.train.remote(address, folder, index) for index, trainer in enumerate(trainers)])
        sys.stdout.buffer.write(pickle.dumps([pickle.loads(shard) for shard in shards]))
        ray.get(trainers[0].__ray_ready__.remote())  # this program's Ray is its own still
        ray.shutdown()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), cluster.address, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=100, cwd=_ROOT, check=True)
    assert_are_shards_of(pickle.loads(done.stdout), expected)
