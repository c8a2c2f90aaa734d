"""scripts/bench: rows, goals, tables and verification, without a run."""

from __future__ import annotations

import dataclasses
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
    """The modules of scripts/bench, by attribute."""

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(f"bench.{name}")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield Modules()
    sys.path.remove(str(SCRIPTS))


def result_of(bench: Any, key: str, **figures: float) -> Any:
    """A row with one round of each side."""
    row = next(row for row in bench.rows.ROWS if row.key == key)
    return bench.harness.Result(row, {side: [value] for side, value in figures.items()})


def test_each_row_is_measured_by_a_function_and_its_goals_are_against_its_sides(bench: Any) -> None:
    others = {"loop", "three batches"}  # figures that loaderpool's own run gives
    for row in bench.rows.ROWS:
        module, function = row.measure.split(":")
        assert f"\ndef {function}(row: Row, contestant: str, window: Window)" in (
            SCRIPTS / "bench" / f"{module}.py"
        ).read_text(encoding="utf-8")
        for goal in row.goals:
            assert goal.against in (None, bench.rows.BEST_PEER, *row.contestants, *row.peers, *others), row.key
    assert len({row.key for row in bench.rows.ROWS}) == len(bench.rows.ROWS)


def test_a_goal_is_held_against_medians(bench: Any) -> None:
    result = result_of(bench, "cpu/own", loaderpool=9.8, bare=10.0)
    result.figures["loaderpool"] += [1.0, 20.0]
    (goal,) = result.row.goals
    assert (result.ratio(goal), result.ratio(goal, result.best)) == (pytest.approx(0.98), pytest.approx(2.0))
    ((key, line),) = bench.report.shortfalls([result])
    assert key == "cpu/own" and "0.98 of bare" in line and "≥ 0.99" in line
    assert bench.report.shortfalls([result], is_gross=True) == []


def test_the_best_peer_is_that_with_the_best_median(bench: Any) -> None:
    result = result_of(bench, "tiny1/tf", loaderpool=900.0, torch=100.0, joblib=200.0, serial=300.0)
    goal = next(goal for goal in result.row.goals if goal.against == bench.rows.BEST_PEER)
    assert (result.opponent(goal), result.ratio(goal)) == ("serial", pytest.approx(3.0))
    times = result_of(bench, "gap/tf", loaderpool=10.0, torch=20.0, joblib=15.0)
    assert times.peers() == ["joblib", "torch"], "less is better"


def test_a_goal_may_be_a_number_and_where_less_is_better_half_of_it_is_its_double(bench: Any) -> None:
    for value, is_short in ((61.0, False), (121.0, True)):
        result = result_of(bench, "memory/array", loaderpool=value, forked=30.0)
        assert len(bench.report.shortfalls([result])) == 1
        assert bool(bench.report.shortfalls([result], is_gross=True)) == is_short


def test_a_goal_without_an_opponent_is_not_missed_but_one_without_loaderpool_is(bench: Any) -> None:
    assert bench.report.shortfalls([result_of(bench, "io32/own", loaderpool=40.0)]) == []
    failed = result_of(bench, "io32/own", ideal=100.0)
    failed.failures["loaderpool"] = "io32/own: loaderpool ended with 1: Error: no"
    assert bench.report.shortfalls([failed]) == [("io32/own", failed.failures["loaderpool"])]


def test_tables_have_the_same_cells_in_each_line(bench: Any) -> None:
    results = []
    for row in bench.rows.ROWS:
        sides = (*row.contestants, *row.peers, *(goal.of for goal in row.goals), *(goal.against for goal in row.goals))
        results.append(bench.harness.Result(row, {side: [2.0, 2.5] for side in sides if side}))
    speed, limits = bench.report.speed_table(results), bench.report.limits_table(results)
    times, sizes = bench.report.costs_table(results, "ms"), bench.report.costs_table(results, "MB")
    for table in (bench.report.goals_table(results), speed, limits, times, sizes):
        assert len({line.count("|") for line in table.splitlines()}) == 1
        assert len(table.splitlines()) > 3
    assert len(bench.report.goals_table(results).splitlines()) == 2 + sum(len(row.goals) for row in bench.rows.ROWS)
    assert bench.report.limits_table([result_of(bench, "tiny32/own", rows=2.0)]).count("\n") == 1, (
        "no line for a failure"
    )


def test_rates_are_shown_as_time_for_a_batch(bench: Any) -> None:
    result = result_of(bench, "tiny32/own", loaderpool=10_000.0)
    assert bench.report.value_text(result, "loaderpool") == "100 us"
    for milliseconds, text in ((0.0241, "24.1 us"), (3.0, "3 ms"), (250.0, "250 ms"), (2000.0, "2 s")):
        assert bench.report.value_text(result_of(bench, "gap/own", loaderpool=milliseconds), "loaderpool") == text


@pytest.mark.parametrize("positions", [(0, 2, 1), (0, 2), (0, 0)])
def test_batches_out_of_order_missing_or_twice_are_noticed(bench: Any, positions: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize("name", ["cpu", "jpeg", "tiny32", "tiny1", "wide", "straggler", "step"])
def test_a_sample_tells_its_item(bench: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.works, "JPEG_FILES", 2)
    monkeypatch.setenv(bench.works.IMAGES_VARIABLE, str(tmp_path))
    bench.works.render_images(tmp_path)
    work = bench.works.WORKS[name]
    for item in (0, 301):
        sample = work.fn(item)
        assert (sample.shape, sample.dtype) == (work.shape, np.dtype(work.dtype))
        assert sample.item(0) == work.token(item)
        if work.write is not None:
            out = np.zeros_like(sample)
            work.write(item, out)
            assert np.array_equal(out, sample)


def test_every_peer_has_a_pinned_package(bench: Any) -> None:
    lines = (SCRIPTS / "bench" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    packages = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert all("==" in line for line in lines if not line.startswith("#"))
    assert set(bench.rows.PEERS) - packages == {"pool_imap"}, "the standard library's"


def test_rounds_go_forth_and_back_and_of_the_peers_only_the_best_is_run_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"loaderpool": 10.0, "bare": 11.0, "torch": 8.0, "joblib": 9.0}
    runs = []

    def run(command: list[str], timeout_s: float, name: str) -> dict[str, float]:
        runs.append(command[-2])
        if command[-2] == "keras":
            raise bench.harness.RunError("cpu/own: keras ended with 1\nTraceback\nKeyError: 'sample'\nmore at exit")
        return {command[-2]: rates[command[-2]]}

    monkeypatch.setattr(bench.harness, "run_fresh", run)
    monkeypatch.setattr(bench.harness, "_BUSY_LOOK_S", 0.01)
    row = dataclasses.replace(next(row for row in bench.rows.ROWS if row.key == "cpu/own"), rounds=2)
    result = bench.harness.run_row(row, {"torch", "keras", "joblib"}, None, 1.0, lambda event: None)
    assert runs == ["loaderpool", "bare", "torch", "keras", "joblib", "joblib", "bare", "loaderpool"]
    assert result.failures == {"keras": "cpu/own: keras ended with 1: KeyError: 'sample'"}
