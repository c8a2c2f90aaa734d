"""What a node must have as the trainer has it, and what it should have."""

from __future__ import annotations

import importlib.util

import pytest

from loaderpool.ray.actor import differences, versions
from loaderpool.ray.cluster_address import check_raylet

HERE = {"loaderpool": "0.1.0", "Python": "3.11", "byte order": "little", "NumPy": "2.4.6"}


@pytest.mark.parametrize(
    ("there", "kind", "said"),
    [
        ({"Python": "3.12"}, "over", "has Python 3.12, the trainer has 3.11: they must be the same"),
        ({"loaderpool": "0.2.0"}, "over", "has loaderpool 0.2.0, the trainer has 0.1.0: they must be the same"),
        ({"byte order": "big"}, "over", "has byte order big, the trainer has little: they must be the same"),
        (
            {"NumPy": "2.1.0"},
            "warning",
            "has NumPy 2.1.0, the trainer has 2.4.6: what it computes, and draws at random,",
        ),
    ],
)
def test_each_difference_is_told_with_the_node(there: dict[str, str], kind: str, said: str) -> None:
    ((told, text),) = differences("10.0.0.7", {**HERE, **there}, HERE)
    assert told == kind and text.startswith(f"node 10.0.0.7 {said}")


def test_a_node_that_has_the_same_is_passed_over() -> None:
    assert versions().keys() == HERE.keys()
    assert differences("10.0.0.7", versions(), versions()) == []


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_machine_without_a_raylet_is_told_how_to_be_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_node_ids", lambda: {"5d0f"})
    check_raylet("10.0.0.1:6379")
    monkeypatch.setattr("ray._private.services.find_node_ids", set)
    said = r"this machine is no node of the Ray cluster at 10\.0\.0\.1:6379: .* ray start --address=10\.0\.0\.1:6379"
    with pytest.raises(ConnectionError, match=said):
        check_raylet("10.0.0.1:6379")
