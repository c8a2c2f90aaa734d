"""What is said where no node can have a host, and whether nodes may come by themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loaderpool.ray.offers import can_have, describe_needs, describe_offers, is_scaled

GIB = 2**30


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    ours = {"node:10.0.0.7": 1.0, "object_store_memory": 2.0 * GIB, **resources}
    return {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Alive": alive, "Resources": ours}


NODES = [
    node("7", CPU=16.0, memory=64.0 * GIB),
    node("8", CPU=4.0, memory=8.0 * GIB, loader=2.0),
    node("9", False, CPU=9),
]


@pytest.mark.parametrize(
    ("needs", "able"),
    [
        ({"CPU": 4}, ["7", "8"]),
        ({"CPU": 5}, ["7"]),
        ({"CPU": 1, "loader": 1}, ["8"]),
        ({"CPU": 1, "memory": 9 * GIB}, ["7"]),
        ({"CPU": 17}, []),
    ],
)
def test_a_node_can_have_a_host_where_it_has_enough_in_all(needs: dict[str, float], able: list[str]) -> None:
    assert [each["NodeID"] for each in NODES if can_have(each, needs)] == able


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"CPU": 1}, "1 CPU"),
        ({"CPU": 4, "memory": 8 * GIB}, "4 CPUs and 8.0 GiB of memory"),
        ({"CPU": 4, "memory": 8 * GIB, "loader": 0.5}, "4 CPUs, 8.0 GiB of memory and 0.5 of 'loader'"),
    ],
)
def test_needs_are_said_in_words(needs: dict[str, float], said: str) -> None:
    assert describe_needs(needs) == said


def test_each_node_that_lives_is_said_with_what_is_free_of_it() -> None:
    free = {"7": {"CPU": 2.5, "memory": 1.5 * GIB}}
    assert describe_offers(NODES, free, trainers="8") == (
        "10.0.0.7 has 2.5 of 16 CPUs free, 1.5 of 64.0 GiB of memory; 10.0.0.8 (the trainer's, where none may be: "
        "trainer_node=False) has 0 of 4 CPUs free, 0.0 of 8.0 GiB of memory, 0 of 2 'loader'"
    )
    assert describe_offers([], {}) == "there is none"


def status(**report: Any) -> bytes:
    return json.dumps({"load_metrics_report": {}, "autoscaler_report": report}).encode()


@pytest.mark.parametrize(
    ("noted", "is_second", "scaled"),
    [
        (None, False, False),
        (None, True, True),
        (status(active_nodes={"node_5d0f": 1}, pending_nodes=[]), False, False),  # by hand: each of a type of its own
        (status(active_nodes={"ray.head.default": 1}, pending_nodes=[]), False, True),
        (status(active_nodes={}, pending_nodes=[["10.0.0.9", "workers", "setting-up"]]), False, True),
        (json.dumps({"load_metrics_report": {}}), False, False),
    ],
)
def test_whether_nodes_come_by_themselves(noted: Any, is_second: bool, scaled: bool) -> None:
    assert is_scaled(noted, is_second) == scaled
