"""scripts/bench/peers: goals, tables and verification, without a run."""

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

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


class Modules:
    """The modules of scripts/bench_peers and scripts/benchlib, by attribute."""

    def __getattr__(self, name: str) -> Any:
        package = "benchlib" if (SCRIPTS / f"benchlib/{name}.py").exists() else "bench_peers"
        return importlib.import_module(f"{package}.{name}")

    @property
    def rounds(self) -> Any:  # of which both have one
        return importlib.import_module("bench_peers.rounds")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    yield Modules()
    sys.path.remove(str(SCRIPTS))


def results_of(bench: Any, key: str, **medians: float | None) -> Any:
    """Results of one row: each contestant with one round of this figure, or a failure."""
    row = next(row for row in bench.rows.ROWS if row.key == key)
    results = {}
    for name, value in medians.items():
        result = bench.rounds.Result(row, name)
        if value is None:
            result.failure = f"{key}: {name} ended with 1: Error: no"
        else:
            result.rounds.append({row.figure: value})
        results[key, name] = result
    return results


# ---- goals ----


def test_each_goal_is_of_a_row_and_against_a_contestant_of_it(bench: Any) -> None:
    rows = {row.key: row for row in bench.rows.ROWS}
    for goal in bench.goals.GOALS:
        assert goal.row in rows
        against = rows[goal.against_row or goal.row]
        assert goal.against in (None, bench.goals.BEST_PEER, *against.contestants), goal
        assert (goal.at_least is None) != (goal.at_most is None), goal


def test_each_row_that_can_be_compared_has_a_goal(bench: Any) -> None:
    without = {row.key for row in bench.rows.ROWS} - {goal.row for goal in bench.goals.GOALS}
    assert without == {key for key in without if key.startswith("growth/")} | {"first/tf", "busystep/tf"}


def test_a_goal_is_held_against_medians(bench: Any) -> None:
    results = results_of(bench, "cpu/own", loaderpool=9.8, bare=10.0)
    results["cpu/own", "loaderpool"].rounds += [{"rate": 1.0}, {"rate": 20.0}]
    (verdict,) = bench.goals.judge(results)
    assert verdict.ratio == pytest.approx(0.98)
    assert verdict.ratio_of_best == pytest.approx(2.0)
    assert not verdict.is_met()
    assert verdict.is_met(is_gross=True)


def test_the_best_peer_is_that_with_the_best_median(bench: Any) -> None:
    goals = [goal for goal in bench.goals.GOALS if goal.row == "tiny1/tf" and goal.against == bench.goals.BEST_PEER]
    results = results_of(bench, "tiny1/tf", loaderpool=900.0, torch=100.0, joblib=200.0, serial=300.0, grain=None)
    (verdict,) = bench.goals.judge(results, goals)
    assert verdict.against == "serial", "the serial loop counts in this row"
    assert verdict.ratio == pytest.approx(3.0)
    assert verdict.is_met()
    uncounted = [dataclasses.replace(goal, counts_serial=False) for goal in goals]
    assert bench.goals.judge(results, uncounted)[0].against == "joblib"


def test_the_best_peer_has_the_shortest_time_where_time_is_measured(bench: Any) -> None:
    results = results_of(bench, "gap/tf", loaderpool=10.0, torch=20.0, joblib=15.0)
    (verdict,) = bench.goals.judge(results)
    assert (verdict.against, verdict.is_met()) == ("joblib", True)


def test_a_goal_may_be_a_number_by_itself(bench: Any) -> None:
    (verdict,) = bench.goals.judge(results_of(bench, "array/memory", loaderpool=61.0, forked=30.0))
    assert (verdict.ratio, verdict.is_met(), verdict.is_met(is_gross=True)) == (61.0, False, True)


def test_half_of_a_goal_is_its_double_where_less_is_better(bench: Any) -> None:
    goal = bench.goals.Goal("cpu/own", "bare", at_least=0.8)
    assert [goal.is_met(ratio, is_gross=True) for ratio in (0.39, 0.41)] == [False, True]
    goal = bench.goals.Goal("first/own", "interpreter", at_most=2.0)
    assert [goal.is_met(ratio, is_gross=True) for ratio in (3.9, 4.1)] == [True, False]


# ---- what falls short ----


def test_what_is_missed_is_named_with_its_figure(bench: Any) -> None:
    results = results_of(bench, "io32/own", loaderpool=40.0, ideal=100.0)
    (line,) = bench.table.shortfalls(bench.goals.judge(results))
    assert "io32/own" in line and "0.4 of ideal" in line and "≥ 0.99" in line
    assert "half of it 0.495" in bench.table.shortfalls(bench.goals.judge(results), is_gross=True)[0]


def test_a_goal_without_an_opponent_is_not_missed_but_one_without_loaderpool_is(bench: Any) -> None:
    alone = results_of(bench, "io32/own", loaderpool=40.0)
    assert bench.table.shortfalls(bench.goals.judge(alone)) == []
    failed = results_of(bench, "io32/own", loaderpool=None, ideal=100.0)
    (line,) = bench.table.shortfalls(bench.goals.judge(failed))
    assert "no figure" in line and "Error: no" in line


# ---- tables ----


def test_a_table_has_a_line_for_each_row_and_the_same_cells_in_each(bench: Any) -> None:
    results: Any = {}
    for row in bench.rows.ROWS:
        results |= results_of(bench, row.key, **dict.fromkeys(row.contestants, 2.0))
        for result in results.values():
            result.rounds[0]["cpu_us"] = 5.0
    lines = bench.table.summary_table(results).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert sum("2 GB array" in line for line in lines) == 1
    full = bench.table.full_table(results).splitlines()
    assert len(full) == 2 + len(results)
    assert len({line.count("|") for line in full}) == 1


def test_a_table_is_made_of_failures_too(bench: Any) -> None:
    results = results_of(bench, "tiny32/own", loaderpool=None, rows=None, torch=None)
    assert "16 floats" in bench.table.summary_table(results)
    assert len(bench.table.left_out(results)) == 3


def test_rates_are_shown_as_time_for_a_batch_with_their_range(bench: Any) -> None:
    results = results_of(bench, "tiny32/own", loaderpool=10_000.0)
    result = results["tiny32/own", "loaderpool"]
    assert bench.table.value_text(result) == "100 us"
    result.rounds += [{"rate": 5_000.0}, {"rate": 20_000.0}]
    assert bench.table.value_text(result) == "100 us [50 us .. 200 us]"


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5e-7, "0.25 us"), (24.1e-6, "24.1 us"), (3e-3, "3 ms"), (0.25, "250 ms"), (2.0, "2 s")]
)
def test_durations_have_three_digits(bench: Any, seconds: float, text: str) -> None:
    assert bench.table.duration(seconds) == text


# ---- verification ----


def tiny_batches(bench: Any, *positions: int) -> list[Any]:
    return [bench.work.make_batch(bench.works.WORKS["tiny32"], position) for position in positions]


def ends(batches: list[Any]) -> list[tuple[int, float, float]]:
    return [(number, batch.item(0), batch[-1].item(0)) for number, batch in enumerate(batches)]


@pytest.mark.parametrize("positions", [(0, 2, 1), (0, 2), (0, 0)])
def test_batches_out_of_order_missing_or_twice_are_noticed(bench: Any, positions: tuple[int, ...]) -> None:
    work = bench.works.WORKS["tiny32"]
    bench.work.check_tokens(work, ends(tiny_batches(bench, 0, 1, 2)))
    with pytest.raises(AssertionError, match="begins and ends with"):
        bench.work.check_tokens(work, ends(tiny_batches(bench, *positions)))


def test_samples_that_come_twice_or_not_are_noticed_in_any_order(bench: Any) -> None:
    work = bench.works.WORKS["tiny32"].with_batches(3)
    items = [bench.work.items_of(work, batch) for batch in tiny_batches(bench, 2, 0, 1)]
    bench.work.check_items(work, items, is_whole=True)
    bench.work.check_items(work, items[:2], is_whole=False)  # the other one is on its way
    with pytest.raises(AssertionError, match="32 of 128 samples came twice"):
        bench.work.check_items(work, [*items, items[0]], is_whole=True)
    with pytest.raises(AssertionError, match="64 samples came, not 96"):
        bench.work.check_items(work, items[:2], is_whole=True)
    late = [*items, np.array([10**6])]
    with pytest.raises(AssertionError, match="are missing"):
        bench.work.check_items(work, late, is_whole=False)


def test_wrong_numbers_and_wrong_dtypes_are_noticed(bench: Any) -> None:
    work = bench.works.WORKS["tiny32"]
    (batch,) = tiny_batches(bench, 5)
    bench.work.check_batches(work, [batch])
    with pytest.raises(AssertionError, match="float64"):
        bench.work.check_batches(work, [batch.astype(np.float64)])
    batch[7, 3] += 1
    with pytest.raises(AssertionError, match="item 167 is wrong"):
        bench.work.check_batches(work, [batch])


@pytest.mark.parametrize("name", ["cpu", "jpeg", "tiny32", "tiny1", "wide", "straggler", "busystep"])
def test_a_sample_tells_its_item(bench: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.images, "JPEG_FILES", 2)
    monkeypatch.setenv(bench.images.IMAGES_VARIABLE, str(tmp_path))
    bench.images.render_images(tmp_path)
    work = bench.works.WORKS[name]
    bench.images._jpeg_files.cache_clear()
    for item in (0, 301):
        sample = work.fn(item)
        assert (sample.shape, sample.dtype) == (work.shape, np.dtype(work.dtype))
        assert sample.item(0) == work.token(item)
        assert bench.work.items_of(work, sample[None]).tolist() == [item]
        if work.write is not None:
            out = np.zeros_like(sample)
            work.write(item, out)
            assert np.array_equal(out, sample)
    bench.images._jpeg_files.cache_clear()


# ---- the rest ----


def test_every_peer_has_a_pinned_package_and_a_docstring_with_its_setting(bench: Any) -> None:
    needed, optional = bench.environment.requirements(bench.environment.REQUIREMENTS.read_text(encoding="utf-8"))
    assert all("==" in line for line in (*needed, *optional))
    assert "torch==2.13.0" in optional
    packages = {line.partition("==")[0].partition("[")[0] for line in (*needed, *optional)}
    assert set(bench.rows.PEERS) - packages == {"pool_imap"}, "the standard library's"
    folder = bench.environment.REQUIREMENTS.parent / "peers"
    for peer in (*bench.rows.PEERS, "serial"):
        assert (folder / f"{peer}.py").read_text(encoding="utf-8").startswith('"""')


def test_requirements_are_blocks_without_comments(bench: Any) -> None:
    text = "# one\na==1  # why\nb==2\n\n# two\nc==3\n\nd==4\n"
    assert bench.environment.requirements(text) == (["a==1", "b==2"], ["c==3", "d==4"])


def test_of_the_peers_only_the_best_of_the_first_round_is_run_again(bench: Any) -> None:
    results = results_of(bench, "cpu/tf", loaderpool=10.0, bare=1.0, torch=8.0, grain=5.0, ray=None, joblib=9.0)
    row = results["cpu/tf", "bare"].row
    results["cpu/tf", "joblib"].rounds.append({"rate": 1.0})  # only the first counts here
    settled = {
        result.contestant for result in results.values() if bench.rounds._is_settled(result, results.values(), row)
    }
    assert settled == {"torch", "grain", "ray"}


def test_in_tf_data_only_peers_are_run_whose_own_view_was_among_the_best(bench: Any) -> None:
    own = results_of(
        bench, "wide/own", loaderpool=10.0, rows=1.0, torch=1.0, grain=9.0, spdl=8.0, mpire=7.5, joblib=7.0, keras=None
    )
    rows = {row.key: row for row in bench.rows.ROWS}
    assert bench.rounds._beaten(rows["wide/tf"], own) == {"joblib"}
    for other in ("wide/own", "cpu/tf", "gap/tf"):
        assert bench.rounds._beaten(rows[other], own) == set()


def test_a_failure_is_told_in_a_line(bench: Any) -> None:
    text = "wide/own: ray ended with 1\nTraceback\n  File x\nKeyError: 'sample'\nsomething at exit"
    assert bench.rounds._one_line(text) == "wide/own: ray ended with 1: KeyError: 'sample'"
