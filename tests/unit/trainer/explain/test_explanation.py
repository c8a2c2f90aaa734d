"""Explanations for users: as text, in a notebook, and as numbers."""

from __future__ import annotations

import json
import re

import pytest

from loaderpool.memory.call_times import CallTimes, SlowItem
from loaderpool.trainer.explain.explanation import explain
from loaderpool.trainer.explain.verdicts import Verdict
from tests.docs.pages import ROOT
from tests.support.trainings import COMPUTING


def test_it_is_told_in_a_few_lines() -> None:
    lines = str(explain(COMPUTING.window(4))).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "TOO FEW WORKERS",
        "Why",
        "Change",
        "Expect",
        "Slowest items",
    ]
    assert (
        lines[0]
        == "TOO FEW WORKERS: training waited 62% of the time for data (122 ms of a step of 198 ms)"
    )
    assert lines[2] == "Change: lp.Loader(..., workers=11)"
    assert (
        lines[3] == "Expect: about 75 ms a step instead of 198 ms, as with data always ready (2.6x)"
    )
    assert lines[4] == "Slowest items: 8812 (1.9 s)"
    assert repr(explain(COMPUTING.window(4))).splitlines() == lines  # as a notebook shows it


def test_while_it_warms_up_nothing_else_is_told() -> None:
    told = explain(COMPUTING.window(4, steps=7))
    assert str(told) == "WARM-UP: 7 steps so far, and 20 are needed"
    assert (told.change, told.slowest, told.expected_step_s) == ("", (), None)
    assert explain(COMPUTING.window(4, steps=0, seconds=0.0)).step_s == 0.0


def test_three_of_the_slowest_items_are_shown_and_all_are_kept() -> None:
    calls = CallTimes(slowest=tuple(SlowItem(ns, 0, float(ns)) for ns in (9, 8, 7, 6)))
    told = explain(COMPUTING.window(4, calls=calls))
    assert str(told).endswith("Slowest items: 9 (9 s), 8 (8 s), 7 (7 s)")
    assert [(item.index, item.seconds) for item in told.slowest] == [
        (9, 9.0),
        (8, 8.0),
        (7, 7.0),
        (6, 6.0),
    ]


def test_a_dict_goes_through_json_and_has_the_same_keys_for_all() -> None:
    told = explain(COMPUTING.window(4))
    read = json.loads(json.dumps(told.to_dict()))
    assert read == told.to_dict()
    assert list(read) == [
        "verdict", "wait_share", "wait_s", "step_s", "why", "change", "expect", "expected_step_s", "slowest",
    ]  # fmt: skip
    assert (read["verdict"], read["change"]) == ("TOO_FEW_WORKERS", "lp.Loader(..., workers=11)")
    assert read["expected_step_s"] == pytest.approx(75e-3)
    assert read["slowest"] == [{"index": 8812, "epoch": 3, "seconds": 1.9, "generator": None}]
    assert list(explain(COMPUTING.window(4, steps=3)).to_dict()) == list(read)
    page = (
        (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8").partition("### explain\n")[2]
    )
    assert [each for each in (*read, *Verdict.__members__) if each not in page] == []


def test_the_guide_has_a_row_for_each_verdict() -> None:
    page = (ROOT / "docs/guide/speed/diagnose-slow-training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z '-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(each.value.upper() for each in Verdict)
