"""The screens of `loaderpool top`, as text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

from loaderpool.tools.cli import main
from loaderpool.tools.cli.top_screen import draw
from loaderpool.tools.watching.snapshot import LoaderSnapshot, WorkerSnapshot, WorkerState
from loaderpool.tools.watching.trainings import TrainingSnapshot
from loaderpool.trainer.explain.decision import Decision
from loaderpool.trainer.explain.explanation import SlowItem, explain
from loaderpool.trainer.explain.looks import observed_in
from tests.support.looks import ABOUT, looks

AT_ITEM = WorkerSnapshot(0, 7000, WorkerState.ITEM, 8812, 1, 1.9, 0.97, 0.9)


def loader(workers: int = 2, **changes: Any) -> LoaderSnapshot:
    found = LoaderSnapshot(
        number=1,
        pool=(1, 9),
        explanation=explain(observed_in(looks(20, wait=0.6), ABOUT, 30.0)),
        wait_shares=(0.0, 0.25, 0.5, 1.0),
        look_age_s=0.5,
        steps_per_s=5.2,
        samples_per_s=1666.0,
        bytes_per_s=25e6,
        asked_s=1.25,
        handed_over_s=None,
        calls_of="sample",
        call_s={"p50": 0.041, "p90": 0.060},
        slowest=tuple(SlowItem(100 + each, 2, 5.0 - each, "") for each in range(5)),
        slots=6,
        slots_lent=2,
        workers=tuple(dataclasses.replace(AT_ITEM, number=each, pid=7000 + each) for each in range(workers)),
        decisions=(Decision(1.7e9, 2, 8, "training waited"), Decision(1.7e9 + 60, 8, 5, "data were always ready")),
    )
    return dataclasses.replace(found, **changes)


def screen(*loaders: LoaderSnapshot, width: int = 80, height: int | None = None, **more: Any) -> list[str]:
    training = TrainingSnapshot(4321, "python train.py --epochs 5", loaders)
    return draw(training, width, height, **more).plain.split("\n")


def test_a_loader_is_told_in_lines_that_fit() -> None:
    lines = screen(loader())
    assert lines[0] == "python train.py --epochs 5  (pid 4321)"
    assert any("training waited 60% of the time for data" in line for line in lines)
    assert "now      the training waits for a batch for 1.25 s" in lines
    assert "waited   ▁▃▅█ 100% of the last seconds" in lines
    assert "rate     5.2 steps/s, 1,666 samples/s, 25 MB/s" in lines
    assert "calls    p50 41 ms, p90 60 ms, of one sample each" in lines
    assert "slots    2 of 6 are lent to the training" in lines
    assert "slowest  items 100 (5 s, epoch 2), 101 (4 s, epoch 2), 102 (3 s, epoch 2)" in lines
    assert lines[-3:] == [
        "worker   pid  busy  CPU  now",
        "     0  7000   97%  90%  item 8812 for 1.9 s",
        "     1  7001   97%  90%  item 8812 for 1.9 s",
    ]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 24, 50, None])
@pytest.mark.parametrize("workers", [0, 2, 16, 64, 1024])
def test_no_line_is_too_long_and_none_too_many(width: int, height: int | None, workers: int) -> None:
    for found in ([loader(workers)], [loader(workers), loader(2, number=2, pool=(1, 10))]):
        for at_length in (False, True):
            lines = screen(*found, width=width, height=height, at_length=at_length)
            assert max(map(len, lines)) <= width
            assert height is None or len(lines) <= height


def test_many_workers_are_told_together_and_the_longest_by_name() -> None:
    workers = [dataclasses.replace(AT_ITEM, number=each, item_s=each / 10, busy_share=each / 64) for each in range(64)]
    workers[3] = dataclasses.replace(AT_ITEM, number=3, state=WorkerState.SETUP, item_s=None, busy_share=0.05)
    lines = screen(dataclasses.replace(loader(), workers=tuple(workers)), width=100)
    assert "workers  64: 1 in setup, 63 at items" in lines
    assert any(line.startswith("busy     49% (0% to 98%), ") for line in lines)
    assert lines[-4] == "longest  worker 63 (pid 7000): item 8812 for 6.3 s"
    assert lines[-1] == "         worker 60 (pid 7000): item 8812 for 6 s"
    assert sum(line.count("█") + line.count("▁") for line in lines) > 10


def test_as_many_workers_as_there_is_room_for_have_a_line_each() -> None:
    tall, low = screen(loader(16), height=40), screen(loader(16), height=22)
    assert sum("item 8812" in line for line in tall) == 16
    assert sum("item 8812" in line for line in low) == 4
    assert any(line.startswith("workers  16: 16 at items") for line in low)


def test_of_a_block_the_first_item_is_told() -> None:
    worker = dataclasses.replace(AT_ITEM, items=128)
    lines = screen(dataclasses.replace(loader(), workers=(worker,)))
    assert lines[-1] == "     0  7000   97%  90%  a block of at most 128 items from 8812 on for 1.9 s"


def test_workers_of_a_pool_that_loaders_share_stand_once() -> None:
    lines = screen(loader(), loader())
    assert sum(line.startswith("worker ") for line in lines) == 1
    assert sum("of 2]" in line for line in lines) == 2
    apart = screen(loader(), loader(pool=(1, 10)))
    assert sum(line.startswith("worker ") for line in apart) == 2


def test_what_was_not_measured_is_not_told() -> None:
    first = loader(
        0, steps_per_s=None, samples_per_s=None, bytes_per_s=None, call_s={}, slowest=(), wait_shares=(), slots=0,
        explanation=explain(observed_in(looks(1), ABOUT, 30.0)), asked_s=None, handed_over_s=0.5, number=None,
            decisions=(),
    )  # fmt: skip
    lines = screen(first)
    assert lines[2:] == [
        "WARM-UP: 0 steps so far, and 20 are needed",
        "now      the training has had the latest batch for 500 ms",
    ]


def test_at_length_all_slowest_items_are_told_and_what_a_change_brings() -> None:
    short, long = "\n".join(screen(loader(), width=200)), "\n".join(screen(loader(), width=200, at_length=True))
    assert "104 (1 s, epoch 2)" in long
    assert "104 (1 s, epoch 2)" not in short
    assert "change   " in short
    assert "expect   " not in short
    assert "2 → 8 workers: training waited" in long
    assert "2 → 8 workers" not in short
    assert "8 → 5 workers: data were always ready" in short
    assert "expect   " in long


def test_a_terminal_is_given_nothing_to_obey() -> None:
    lines = screen(loader(calls_of="\x1b[2J\n"))
    assert "calls    p50 41 ms, p90 60 ms, of one ?[2J? each" in lines


def test_a_training_between_two_loaders_is_told_so() -> None:
    assert screen()[-1] == "No loader delivers batches now; the process goes on."


# -- which training, if none is named


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Any) -> tuple[int, str]:
    monkeypatch.setattr("loaderpool.tools.cli.only_training.find_trainings", lambda: found)
    return main(["top", "--once"]), capsys.readouterr().err


def test_no_training_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, [])
    assert status == 1
    assert text.startswith("Error: no running training was found: looked for is a process of the same user")
    assert text.count("\n") == 1


def test_of_several_one_is_to_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(monkeypatch, capsys, [(7, "python a.py"), (1234567, "python b.py")])
    assert status == 2
    assert text.splitlines()[1:] == ["        7  python a.py", "  1234567  python b.py"]


def test_a_training_that_ended_when_it_was_found_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(monkeypatch, capsys, [(4_194_305, "python a.py")]) == (1, "Error: there is no process 4194305.\n")
