"""Verdicts of the doctor on clusters that are only described."""

from __future__ import annotations

from typing import Any

import pytest

from loaderpool.ray.cluster_view import ClusterNode
from loaderpool.tools.doctor.checks import Check
from loaderpool.tools.doctor.cluster_checks import here, node_checks

MINE = {"Python": "3.11.7", "loaderpool": "0.1.0", "NumPy": "2.4.6", "byte order": "little"}
NODE = ClusterNode("abcdef0123", "10.0.0.7", False, 16.0, 16.0, 8 << 30, 0)
FOUND = {
    **MINE,
    "Ray": "2.60.0",
    "why_no_loaderpool": "",
    "shm_bytes": 32 << 30,
    "nice": 15,
    "round_trip_s": 0.0008,
}


def checked(node: ClusterNode = NODE, **changes: Any) -> list[Check]:
    return node_checks("10.0.0.1:6379", [node], {node.id: {**FOUND, **changes}}, MINE)


def test_nothing_is_to_be_changed_on_a_good_cluster() -> None:
    checks = checked()
    assert [check.status for check in checks] == ["ok", "ok", "ok"]
    assert not any(check.change for check in checks)
    nodes, node, niceness = checks
    assert nodes.found == "10.0.0.1:6379: 1 node, 1 with CPUs free for a host (16 CPUs)"
    assert node.name == "node 10.0.0.7"
    assert "loaderpool 0.1.0" in node.found and "0.8 ms there and back" in node.found
    assert niceness.found.startswith("15: whatever else runs there comes first")


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"loaderpool": "0.2.0"}, "fail", "this machine has loaderpool 0.1.0"),
        ({"loaderpool": "", "why_no_loaderpool": "No module named 'loaderpool'"}, "fail", "install loaderpool 0.1.0"),
        ({"Python": "3.12.1"}, "fail", "the first two numbers"),
        ({"Python": "3.11.9"}, "ok", ""),
        ({"byte order": "big"}, "fail", "big-endian"),
        ({"NumPy": "2.3.0"}, "warn", "random numbers may differ"),
        ({"shm_bytes": 64 << 20}, "warn", "--shm-size"),
        ({"round_trip_s": 0.2}, "warn", "far away"),
        ({"NumPy": "2.3.0", "loaderpool": "0.2.0"}, "fail", "; "),
        ({"failed": "GetTimeoutError: no answer\nand more"}, "fail", "raylet's log"),
    ],
)
def test_what_is_wrong_with_a_node_is_said_with_what_to_change(changes: dict[str, Any], status: str, says: str) -> None:
    (_, node, *_) = checked(**changes)
    assert node.status == status
    assert says in node.change
    assert bool(node.change) == (status != "ok")
    assert "\n" not in node.found


def test_a_small_store_is_said() -> None:
    (_, node, *_) = checked(NODE._replace(store_bytes=200 << 20))
    assert node.status == "warn"
    assert "--object-store-memory=268435456" in node.change


def test_a_cluster_that_can_have_no_host_fails() -> None:
    (nodes, *_) = checked(NODE._replace(cpus_free=0.5))
    assert nodes.status == "fail"
    assert "0 with CPUs free" in nodes.found


def test_nodes_of_one_address_are_told_apart() -> None:
    nodes = [NODE, NODE._replace(id="bcdefa4567")]
    names = [check.name for check in node_checks("h:1", nodes, {node.id: FOUND for node in nodes}, MINE)]
    assert names == ["nodes", "node 10.0.0.7 (abcdef)", "node 10.0.0.7 (bcdefa)", "niceness of hosts"]


def test_what_this_machine_has_is_what_is_compared() -> None:
    assert set(here()) == set(MINE)
