"""Fault points are silent unless a test lays a fault, and then one process meets it, once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderpool.system import fault_points


@pytest.fixture
def laid(tmp_path: Path) -> Iterator[Path]:
    fault_points.arm(str(tmp_path))
    yield tmp_path
    fault_points.arm(None)


def test_nothing_happens_where_nothing_is_armed(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("raise")
    fault_points.reach("here")
    assert fault_points.setting("stopped_s", 5.0) == 5.0
    assert (tmp_path / "here").exists()


def test_a_fault_is_met_once_and_only_at_its_place(laid: Path) -> None:
    (laid / "here").write_text("raise\n")
    fault_points.reach("elsewhere")
    with pytest.raises(RuntimeError, match="laid at here"):
        fault_points.reach("here")
    fault_points.reach("here")
    assert (laid / "here.met").exists()


@pytest.mark.parametrize(
    ("how", "error"),
    [("sys.exit", SystemExit), ("MemoryError", MemoryError), ("ENOMEM", OSError), ("unpicklable", RuntimeError)],
)
def test_ways_that_can_be_caught(laid: Path, how: str, error: type[BaseException]) -> None:
    (laid / "here").write_text(how)
    with pytest.raises(error) as raised:
        fault_points.reach("here")
    if how == "unpicklable":
        with pytest.raises(TypeError):
            pickle.dumps(raised.value)


def test_a_setting_is_replaced(laid: Path) -> None:
    (laid / "stopped_s").write_text("0.25")
    assert fault_points.setting("stopped_s", 5.0) == 0.25
    assert fault_points.setting("other_s", 5.0) == 5.0
