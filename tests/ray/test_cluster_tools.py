"""`loaderpool tune --ray` on a real cluster, and where there is none."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from loaderpool.tools.cli import main
from tests.support.ray_cluster import RayCluster

TRAIN = """
import time
import numpy as np
import loaderpool as lp

def sample(item):
    time.sleep(0.002)
    return np.full((50, 100), item, np.float32)

def make_loader():
    return lp.Loader(range(4000), sample, batch_size=8)
"""


@pytest.fixture(autouse=True)
def _target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train_on_ray.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loaderpool.core.failures.command_target", "")  # which a command sets


def test_tune_measures_numbers_of_nodes(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "train_on_ray:make_loader", "--ray", cluster.address, "--workers", "1,2,9", "--seconds", "1"]
    assert main([*arguments, "--json", "rates.json"]) == 0
    data: Any = json.loads((tmp_path / "rates.json").read_text())
    one, two = data["measurements"]  # there are no nine nodes
    assert [each["setting"]["workers"] for each in (one, two)] == [1, 2]
    assert two["samples_per_s"] > one["samples_per_s"] > 0
    assert one["bytes_per_s"] == pytest.approx(one["samples_per_s"] * 20_000)
    assert f"Use workers=lp.RayPool({cluster.address!r}, nodes=2)" in capsys.readouterr().out


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("ray", "status", "says"),
    [
        ("127.0.0.1:{port}", 1, "no Ray cluster answers at 127.0.0.1:{port}"),
        ("ray://127.0.0.1:1", 2, "Ray Client is not supported"),
        ("nowhere", 2, '"auto" or "host:port"'),
    ],
)
def test_an_address_of_no_cluster_is_said_in_a_line(
    ray: str, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert main(["tune", "train_on_ray:make_loader", "--ray", ray.format(port=port)]) == status
    assert says.format(port=port) in "".join(capsys.readouterr())
