"""scripts/bench: rows, goals, tables and verification, without a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="Pillow is not installed: scripts/test installs it")
pytest.importorskip("psutil", reason="psutil is not installed: scripts/test installs it")

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


class Modules:
    """Modules of scripts/bench, by attribute."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"bench.{name}")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield Modules()
    sys.path.remove(str(SCRIPTS))


def result_of(bench: Any, key: str, **figures: float) -> Any:
    """Return a row with one round of each contestant."""
    row = next(row for row in bench.rows.ROWS if row.key == key)
    return bench.harness.Result(row, {side: [value] for side, value in figures.items()})


def test_each_row_is_measured_by_a_function_and_its_goals_are_against_its_sides(bench: Any) -> None:
    others = {"loop", "shuffle", "three batches"}  # figures from loaderpool's own run
    for row in bench.rows.ROWS:
        module, function = row.measure.split(":")
        assert f"\ndef {function}(row: Row, contestant: str, window: Window)" in (
            SCRIPTS / "bench" / f"{module}.py"
        ).read_text(encoding="utf-8")
        for goal in row.goals:
            assert goal.against in (
                None,
                bench.rows.BEST_PEER,
                *row.contestants,
                *row.peers,
                *others,
            ), row.key
    assert len({row.key for row in bench.rows.ROWS}) == len(bench.rows.ROWS)


def test_a_goal_is_held_against_medians(bench: Any) -> None:
    result = result_of(bench, "cpu/own", loaderpool=9.8, bare=10.0)
    result.figures["loaderpool"] += [1.0, 20.0]
    (goal,) = result.row.goals
    assert (result.ratio(goal), result.ratio(goal, result.best)) == (
        pytest.approx(0.98),
        pytest.approx(2.0),
    )
    ((key, line),) = bench.report.shortfalls([result])
    assert key == "cpu/own" and "0.98 of bare" in line and "≥ 0.99" in line
    assert bench.report.shortfalls([result], is_gross=True) == []


def test_a_goal_without_an_opponent_is_not_missed_but_one_without_loaderpool_is(bench: Any) -> None:
    assert bench.report.shortfalls([result_of(bench, "io32/own", loaderpool=40.0)]) == []
    failed = result_of(bench, "io32/own", ideal=100.0)
    failed.failures["loaderpool"] = "io32/own: loaderpool ended with 1: Error: no"
    assert bench.report.shortfalls([failed]) == [("io32/own", failed.failures["loaderpool"])]


@pytest.mark.parametrize("positions", [(0, 2, 1), (0, 2), (0, 0)])
def test_batches_out_of_order_missing_or_twice_are_noticed(
    bench: Any, positions: tuple[int, ...]
) -> None:
    work = bench.works.WORKS["tiny32"]

    def ends(*positions: int) -> list[tuple[int, float, float]]:
        batches = [bench.works.make_batch(work, position) for position in positions]
        return [(number, batch.item(0), batch[-1].item(0)) for number, batch in enumerate(batches)]

    bench.works.check_ends(work, ends(0, 1, 2))
    with pytest.raises(ValueError, match="begins and ends with"):
        bench.works.check_ends(work, ends(*positions))


def test_wrong_numbers_and_wrong_dtypes_are_noticed(bench: Any) -> None:
    work = bench.works.WORKS["tiny32"]
    batch = bench.works.make_batch(work, 5)
    bench.works.check_batch(work, 5, batch)
    with pytest.raises(ValueError, match="batch 5 is wrong: float64"):
        bench.works.check_batch(work, 5, batch.astype(np.float64))
    batch[7, 3] += 1
    with pytest.raises(ValueError, match="batch 5 is wrong"):
        bench.works.check_batch(work, 5, batch)
