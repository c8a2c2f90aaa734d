"""`loaderpool tune --ray` and `loaderpool doctor --ray` on a real cluster, and where there is none."""

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


def test_tune_says_what_hosts_would_bring_and_measures_them(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "train_on_ray:make_loader", "--ray", cluster.address, "--hosts", "2,9", "--seconds", "0.6"]
    assert main([*arguments, "--json", "rates.json"]) == 0
    output = capsys.readouterr().out
    assert output.index("would bring") < output.index("Measured on the cluster")
    assert "more are not measured" in output
    data: Any = json.loads((tmp_path / "rates.json").read_text())
    assert [(each["hosts"], each["workers"]) for each in data["forecasts"]] == [(2, 2), (9, 9)]
    assert [(each["hosts"], each["workers"]) for each in data["measurements"]] == [(2, 2)]
    assert data["recommendation"] == {"hosts": 2}
    (found,) = data["measurements"]
    assert found["samples_per_s"] > 0
    assert found["bytes_per_s"] == pytest.approx(found["samples_per_s"] * 20_000)
    assert found["trainer_cpus"] > 0
    assert found["share_of_ideal"] == pytest.approx(found["samples_per_s"] / found["ideal_per_s"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("command", [["tune", "train_on_ray:make_loader"], ["doctor"]])
@pytest.mark.parametrize(
    ("ray", "status", "says"),
    [
        ("127.0.0.1:{port}", 1, "no Ray cluster answers at 127.0.0.1:{port}"),
        ("ray://127.0.0.1:1", 2, "a cluster of which this machine is a node"),
        ("nowhere", 2, '"auto" or "host:port"'),
    ],
)
def test_an_address_of_no_cluster_is_said_in_a_line(
    command: list[str], ray: str, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    assert main([*command, "--ray", ray.format(port=port)]) == status
    assert says.format(port=port) in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--hosts", "0", "--ray", "{address}"], 2, "leave out the 0"),
        (["--hosts", "a,b", "--ray", "{address}"], 2, "'a,b' is not a list of numbers of hosts"),
        (["--hosts", "1,2"], 2, "name it by --ray"),
        (["--workers", "1,2", "--ray", "{address}"], 2, "with --ray give --hosts"),
    ],
)
def test_wrong_options_are_said_in_a_line(
    options: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each.format(address="127.0.0.1:1") for each in options]
    assert main(["tune", "train_on_ray:make_loader", *given]) == status
    assert says in capsys.readouterr().err


def test_the_doctor_asks_each_node_and_kills_a_host(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--ray", cluster.address, "--json", "doctor.json"]) == 0
    data: Any = json.loads((tmp_path / "doctor.json").read_text())
    checks = [check for check in data["checks"] if check["group"] == "cluster"]
    assert [check["name"].split()[0] for check in checks] == ["nodes", *4 * ["node"], "niceness", "host"]
    assert "3 with CPUs free for a host (3 CPUs)" in checks[0]["found"]
    for check in checks[1:5]:
        assert "there and back" in check["found"]
        assert (check["status"], "object-store-memory" in check["change"]) == ("warn", True), "of 200 MiB only"
    assert checks[-1]["status"] == "ok"
    assert "and replaced; all " in checks[-1]["found"]
    assert "host drill" in capsys.readouterr().out
