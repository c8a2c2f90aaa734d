"""What a user is told where a cluster cannot do what is asked of it: by name, with the node, and soon."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import loaderpool as lp
from tests.support.batches import read
from tests.support.ray_cluster import RayCluster

# Ten seconds is what is meant: that is met within four on a machine with nothing beside, and these share theirs.
SOON_S = 40.0


@contextmanager
def soon() -> Iterator[None]:
    """What is in it must not wait for one of Ray's own timeouts, which are of minutes."""
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < SOON_S


def fails(item: int) -> int:
    if item == 41:
        raise KeyError("no such frame")
    return item


def test_an_exception_is_the_users_own_with_index_traceback_and_node(cluster: RayCluster) -> None:
    pool, got = lp.RayPool(cluster.address), []
    loader = lp.Loader(range(60), fails, batch_size=4, workers=pool)
    with pool, loader, soon(), pytest.raises(KeyError, match="no such frame") as caught:
        for batch in loader:
            got += batch.tolist()
    error, address = caught.value, cluster.address.partition(":")[0]
    assert isinstance(error, lp.SampleError) and (error.index, error.node) == (41, address)
    assert f"source index 41, epoch 0, in worker 0 on node {address}." in str(error)
    assert f"Traceback in worker 0 on node {address}:" in str(error) and ", in fails\n" in error.remote_traceback
    assert got == list(range(40))


def as_if(tmp_path: Path, **versions: str) -> dict[str, dict[str, str]]:
    """An environment in which processes take modules for having these versions."""
    lines = [f"import {name}; {name}.__version__ = {version!r}" for name, version in versions.items()]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    return {"env_vars": {"PYTHONPATH": f"{tmp_path}:{Path(lp.__file__).parents[1]}"}}


def test_another_loaderpool_is_an_error_and_another_numpy_a_warning(cluster: RayCluster, tmp_path: Path) -> None:
    with lp.RayPool(cluster.address, hosts=1, runtime_env=as_if(tmp_path, loaderpool="9.9.9")) as pool:
        loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
        with loader, soon(), pytest.raises(lp.ClusterError, match=r"node .* has loaderpool 9\.9\.9, the trainer has "):
            next(iter(loader))
    pool = lp.RayPool(cluster.address, runtime_env=as_if(tmp_path, numpy="2.99.0"))
    with pool, lp.Loader(range(8), abs, batch_size=4, workers=pool) as loader:
        with pytest.warns(lp.ClusterWarning, match=r"node .* has NumPy 2\.99\.0, the trainer has ") as caught:
            list(loader)
        assert len(caught) == 1 and caught[0].filename == __file__


def test_an_environment_that_cannot_be_is_an_error_at_once(cluster: RayCluster, tmp_path: Path) -> None:
    pool = lp.RayPool(cluster.address, runtime_env={"working_dir": str(tmp_path / "none")})
    loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
    with (
        pool,
        loader,
        soon(),
        pytest.raises(lp.ClusterError, match=r"no host can be started as is asked: .*none"),
    ):
        next(iter(loader))


def test_a_resource_that_no_node_has_is_an_error_at_once(cluster: RayCluster) -> None:
    said = (
        r"no node of the cluster can have a host: each needs 2 CPUs, 1\.0 GiB of memory and 1 of 'loader', and of the "
        r"nodes (?=.* has 0 of 0 CPUs free, .* GiB of memory).* has \d of 1 CPUs free, .* GiB of memory"
    )
    pool = lp.RayPool(cluster.address, hosts=2, workers_per_host=2, resources={"loader": 1}, memory_per_host="1GiB")
    loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
    with pool, loader, soon(), pytest.raises(lp.ClusterError, match=said):
        next(iter(loader))


def test_cpus_that_others_have_are_waited_for_with_a_warning(cluster: RayCluster) -> None:
    said = (
        r"there has been no host for 1 s: each needs 1 CPU, and of the nodes .* has 0 of 1 CPUs free, .* Ask for less "
        r"\(workers_per_host=, resources=, memory_per_host=\), or end what has the rest"
    )
    waiting = lp.RayPool(cluster.address)
    waiting._settings["no_host_s"] = 1.0
    with lp.RayPool(cluster.address) as pool, lp.Loader(range(80), abs, batch_size=4, workers=pool) as loader:
        read(loader)
        assert pool.workers == 3
        with waiting, lp.Loader(range(80), abs, batch_size=4, workers=waiting) as other:
            with warnings.catch_warnings(), soon():
                warnings.simplefilter("error", lp.ClusterWarning)
                with pytest.raises(lp.ClusterWarning, match=said):
                    next(iter(other))
            assert [host.state for host in other.statistics().hosts] == ["starting"] * 3
            pool.close()
            assert len(read(other)) == 20
