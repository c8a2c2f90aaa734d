"""Errors for requests that a cluster cannot fulfil: they name the problem and the node, and come
soon.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import loaderpool as lp
from tests.support.batches import read, told_when
from tests.support.processes import strike
from tests.support.ray_cluster import RayCluster

# The goal is ten seconds. On a free machine four are enough, but other tests run on this one.
SOON_S = 40.0


@contextmanager
def soon() -> Iterator[None]:
    """Context that must not wait for one of Ray's own timeouts, which take minutes."""
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
    assert (
        f"Traceback in worker 0 on node {address}:" in str(error)
        and ", in fails\n" in error.remote_traceback
    )
    assert got == list(range(40))


def as_if(tmp_path: Path, **versions: str) -> dict[str, Any]:
    """Return options of an actor, in whose processes modules seem to have these versions."""
    lines = [
        f"import {name}; {name}.__version__ = {version!r}" for name, version in versions.items()
    ]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    return {
        "runtime_env": {"env_vars": {"PYTHONPATH": f"{tmp_path}:{Path(lp.__file__).parents[1]}"}}
    }


@pytest.mark.parametrize(
    "other", [{"loaderpool": "9.9.9"}, {"numpy": "2.99.0"}], ids=["loaderpool", "numpy"]
)
def test_another_version_is_an_error(
    cluster: RayCluster, tmp_path: Path, other: dict[str, str]
) -> None:
    said = rf"node .* has loaderpool .*{next(iter(other.values()))}.*, but the main process has loaderpool "
    with lp.RayPool(cluster.address, 1, actor_options=as_if(tmp_path, **other)) as pool:
        loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
        with loader, soon(), pytest.raises(lp.ClusterError, match=said):
            next(iter(loader))


def test_an_environment_that_cannot_be_is_an_error_at_once(
    cluster: RayCluster, tmp_path: Path
) -> None:
    pool = lp.RayPool(
        cluster.address, actor_options={"runtime_env": {"working_dir": str(tmp_path / "none")}}
    )
    loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
    with pool, loader, soon(), pytest.raises(lp.ClusterError, match="none"):
        next(iter(loader))


def tells(item: int) -> int:
    if item % 50 == 0:
        print(f"item {item} is made")
    time.sleep(0.002)
    return item


def test_a_lost_node_is_told(cluster: RayCluster, capfd: pytest.CaptureFixture[str]) -> None:
    out, until_s = "", time.monotonic() + 60
    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(range(300), tells, batch_size=4, workers=pool) as loader,
    ):
        told_when(loader, lambda told: [node.state for node in told.nodes] == ["running"] * 3)
        strike(cluster.actors)
        while (
            "loaderpool: lost the remote workers on node " not in out and time.monotonic() < until_s
        ):
            list(loader)
            out += "".join(capfd.readouterr())
    assert out.count("loaderpool: lost the remote workers on node ") == 1, out
    assert " is made" in out, "what the function prints comes from the nodes"


def test_a_node_that_sees_no_files_is_an_error_under_skip(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Otherwise it would leave out samples that other nodes could make."""
    files = [tmp_path / f"{number}.txt" for number in range(60)]
    for number, file in enumerate(files):
        file.write_text(str(number))

    def load(number: int) -> int:
        place = tmp_path / "blind"  # the second node that comes here
        for each in (tmp_path / "sees", place):
            with suppress(FileExistsError):
                each.symlink_to(os.environ["RAY_RAYLET_PID"])
            if os.readlink(each) == os.environ["RAY_RAYLET_PID"]:
                break
        is_blind = each == place and os.readlink(place) == os.environ["RAY_RAYLET_PID"]
        time.sleep(0.01)
        if is_blind:
            raise FileNotFoundError(2, "No such file or directory", f"{tmp_path}/{number}.txt")
        return int(Path(f"{tmp_path}/{number}.txt").read_text())

    pool, got = lp.RayPool(cluster.address, nodes=3), []
    loader = lp.Loader(range(60), load, batch_size=4, workers=pool, on_error="skip")
    said = r"node .* cannot open /.*/\d+\.txt, but this machine can\. "
    with pool, loader, soon(), pytest.raises(lp.SourceError, match=said):
        for _ in range(20):  # until all three nodes have started
            got = [number for batch in loader for number in batch.tolist()]
            assert got == list(range(60))


def test_cpus_that_others_have_are_waited_for_with_a_warning(cluster: RayCluster) -> None:
    said = (
        r"No node has had room for remote workers for 1 s, and the loader waits: each node needs 1 CPU; "
        r"`ray status` shows more\. Ask for less \(workers_per_node=, actor_options=\), or stop other programs"
    )
    waiting = lp.RayPool(cluster.address)
    waiting._settings["no_room_s"] = 1.0
    with (
        lp.RayPool(cluster.address) as pool,
        lp.Loader(range(80), abs, batch_size=4, workers=pool) as loader,
    ):
        read(loader)
        told_when(loader, lambda _: pool.workers == 3)
        with waiting, lp.Loader(range(80), abs, batch_size=4, workers=waiting) as other:
            with warnings.catch_warnings(), soon():
                warnings.simplefilter("error", lp.LoaderpoolWarning)
                with pytest.raises(lp.LoaderpoolWarning, match=said):
                    next(iter(other))
            assert [node.state for node in other.statistics().nodes] == ["starting"] * 3
            pool.close()
            assert len(read(other)) == 20


def test_a_raylets_port_is_no_heads(cluster: RayCluster) -> None:
    """Ray itself would try to connect for minutes."""
    (raylet,) = cluster.pids(1)["raylet"]
    ports = [
        each.laddr.port
        for each in psutil.Process(raylet).net_connections("tcp")
        if each.status == "LISTEN"
    ]
    address = f"{cluster.address.partition(':')[0]}:{ports[0]}"
    said = (
        f"no Ray cluster answers at {address}: a gRPC or HTTP/2 server listens there, but no head"
    )
    pool = lp.RayPool(address)
    loader = lp.Loader(range(8), abs, batch_size=4, workers=pool)
    with pool, loader, soon(), pytest.raises(lp.ClusterError, match=said):
        next(iter(loader))


def in_own_folder(tmp_path: Path) -> dict[str, Any]:
    """Return options of an actor, whose processes start in a folder of the cluster."""
    (tmp_path / "code").mkdir()
    environment = {
        "working_dir": str(tmp_path / "code"),
        "env_vars": {"PYTHONPATH": str(Path(lp.__file__).parents[1])},
    }
    return {"runtime_env": environment}


def reads(item: int) -> int:
    return int(Path(f"data/{item}.txt").read_text())


@pytest.mark.parametrize("hook", [False, True], ids=["fn", "setup"])
def test_a_relative_path_is_told_with_the_nodes_directory(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for item in range(8):
        Path(f"data/{item}.txt").write_text(str(item))
    address = cluster.address.partition(":")[0]
    said = (
        r"No such file or directory: 'data/0\.txt'\n"
        rf"The path data/0\.txt is relative, and node {address} looked for it in (/.+)\. "
        r"Pass an absolute path that exists on all nodes\."
    )
    with lp.RayPool(cluster.address, nodes=1, actor_options=in_own_folder(tmp_path)) as pool:
        calls: dict[str, Any] = {"fn": abs, "setup": lambda: reads(0)} if hook else {"fn": reads}
        loader = lp.Loader(range(8), **calls, batch_size=4, workers=pool)
        expected = lp.SetupError if hook else FileNotFoundError
        with loader, soon(), pytest.raises(expected, match=said) as caught:
            next(iter(loader))
    assert (
        str(tmp_path)
        not in str(caught.value).partition("looked for it in ")[2].partition("Pass an")[0]
    )


def test_a_relative_path_under_skip_is_told_with_the_directory(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for item in range(8):
        Path(f"data/{item}.txt").write_text(str(item))
    said = r"cannot open data/\d\.txt in /.+, because the path is relative, but this machine can\. "
    with lp.RayPool(cluster.address, nodes=1, actor_options=in_own_folder(tmp_path)) as pool:
        loader = lp.Loader(
            range(8), lambda item: item and reads(item), batch_size=4, workers=pool, on_error="skip"
        )
        with loader, soon(), pytest.raises(lp.SourceError, match=said):
            next(iter(loader))
