"""Pictures of a report: positions, shares and words for known records."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

import pytest

from loaderpool.memory.board import Board, Field
from loaderpool.memory.recorder import DeliveryKind
from loaderpool.trainer.explain.window import Window, window_of
from loaderpool.trainer.timeline import STYLE, shares, shares_figure, timeline, timeline_figure
from tests.support.looks import looks
from tests.support.recordings import HandMadeRecording, ns

BUFFERS = 8


class Bar(NamedTuple):
    """A rectangle in a row: its state, its start and end (0 to 1 of the time), and its share of the
    height.
    """

    state: str
    begin: float
    end: float
    share: float


class Picture:
    """A drawn picture: bars by the labels of rows, and the text for screen readers."""

    def __init__(self, figure: str) -> None:
        svg = next(iter(ET.fromstring(figure)))
        self.title, self.told = str(svg.findtext("title")), str(svg.findtext("desc"))
        self.is_image = svg.get("role") == "img"
        self.ticks = {str(text.text): place(text.get("x")) for text in svg.findall("text")}
        self.rows = {
            str(row.findtext("text")): [*map(bar, row.findall("rect"))] for row in svg.findall("g")
        }

    def of(self, label: str, state: str) -> list[tuple[float, float]]:
        """Return the places at which a row has bars of a state with its whole height."""
        return [
            (each.begin, each.end)
            for each in self.rows[label]
            if each.state == state and each.share == 1
        ]


def place(x: str | None) -> float:
    """Convert a position in the picture into a position in the time."""
    return (float(str(x).rstrip("%")) - 18) / 82


def bar(rect: ET.Element) -> Bar:
    begin, width = place(rect.get("x")), float(str(rect.get("width")).rstrip("%")) / 82
    return Bar(
        str(rect.get("class"))[3:], begin, begin + width, float(str(rect.get("height"))) / 14
    )


def drawn(made: HandMadeRecording, now_ms: float = 1_000.0, lent: int = 1) -> Picture:
    found = timeline(made.tracing(now_ms), BUFFERS, lent)
    assert found is not None
    return Picture(timeline_figure(found))


def near(*places: tuple[float, float]) -> list[tuple[object, object]]:
    return [(pytest.approx(begin, abs=1e-3), pytest.approx(end, abs=1e-3)) for begin, end in places]


def two_batches() -> HandMadeRecording:
    """Record a second, at whose start batches are requested: batch 0 arrives after 0.4 s, batch 1
    after 0.7 s.
    """
    made = HandMadeRecording()
    made.ticket(0, 100, 300, 0, ticket=1)
    made.ticket(1, 100, 600, 1, ticket=2)
    made.ticket(0, 500, 200, 2, ticket=3)
    made.delivery(0, 400, 0, begins_pass=True)
    made.delivery(450, 250, 1)
    return made


def test_bars_stand_where_records_say() -> None:
    picture = drawn(two_batches())
    assert [*picture.rows] == ["training", "worker 0", "worker 1"]
    assert picture.of("training", "wait") == near((0, 0.4), (0.45, 0.7))
    assert picture.of("training", "step") == near((0.4, 0.45), (0.7, 1))
    assert picture.of("worker 0", "task") == near((0.1, 0.4), (0.5, 0.7))
    assert picture.of("worker 0", "idle") == near((0.4, 0.5), (0.7, 1))
    assert picture.of("worker 1", "task") == near((0.1, 0.7))
    assert picture.ticks == {
        f"−{ago} s" if ago else "now": pytest.approx(1 - ago) for ago in (0, 0.2, 0.4, 0.6, 0.8, 1)
    }


def test_screen_readers_get_the_shares_in_words() -> None:
    picture = drawn(two_batches())
    assert picture.is_image and picture.title == "The last 1 s"
    assert "training: training step 35%, waits for data 65%" in picture.told
    assert re.search(
        r"worker 1: runs a task: your function.* 67%, waits for a task 33%$", picture.told
    )


def test_full_buffers_are_told_from_missing_work() -> None:
    made = HandMadeRecording(workers=1)
    for batch in range(7):  # with the buffer of the batch in training, these are all buffers
        made.ticket(0, batch * 100, 100, batch, ticket=batch + 1)
    made.delivery(0, 100, 0, begins_pass=True)
    made.delivery(880, 1, 1)
    made.ticket(0, 890, 100, 7, ticket=8)
    assert drawn(made).of("worker 0", "buffer") == near((0.7, 0.89), (0.99, 1))
    some_left = drawn(two_batches())
    assert not some_left.of("worker 0", "buffer")


def test_buffers_of_an_abandoned_pass_are_free_again() -> None:
    made = HandMadeRecording(workers=1)
    for batch in range(7):
        made.ticket(0, batch * 50, 50, batch, ticket=batch + 1)
    made.delivery(0, 50, 0, begins_pass=True)
    made.delivery(
        400, 10, 0, run=10, begins_pass=True
    )  # of the next pass, of which no batch is made ahead
    made.ticket(0, 500, 100, 70, ticket=9)
    picture = drawn(made)
    assert picture.of("worker 0", "buffer") == near((0.35, 0.5))
    assert picture.of("worker 0", "idle") == near((0.6, 1))


def test_short_tasks_are_shares_of_the_height() -> None:
    made = HandMadeRecording(workers=1)
    for number in range(5000):  # a quarter of each 2 ms
        made.ticket(0, number * 2, 0.5, number, ticket=number + 1)
        made.delivery(number * 2, 0.5, number, begins_pass=not number)
    picture = drawn(made, now_ms=10_000)
    tasks = [each for each in picture.rows["worker 0"] if each.state == "task"]
    assert len(tasks) <= 121
    assert {round(each.share, 2) for each in tasks} == {0.25}
    assert sum((each.end - each.begin) * each.share for each in tasks) == pytest.approx(
        0.25, abs=0.01
    )


def test_a_task_that_runs_reaches_now() -> None:
    made = HandMadeRecording(workers=1)
    made.delivery(0, 1, 0, begins_pass=True)
    made.call(0, 200, 300, 40, ticket=5)  # a call in the running ticket
    base = Board.base(0)
    made.board[base + Field.TICKET] = 5
    made.board[base + Field.INDEX], made.board[base + Field.STARTED_NS] = (
        42,
        ns(600),
    )  # after some short tickets
    assert drawn(made).of("worker 0", "task") == near((0.2, 1))


def test_only_the_last_ten_seconds_are_shown() -> None:
    made = two_batches()
    made.delivery(11_000, 9_000, 2)
    picture = drawn(made, now_ms=20_000)
    assert picture.title == "The last 10 s"
    assert picture.of("training", "wait") == near((0.1, 1))


def test_an_old_recording_ends_with_its_last_record() -> None:
    picture = drawn(two_batches(), now_ms=60_000)
    assert "end" in picture.ticks and "now" not in picture.ticks
    assert picture.of("worker 1", "task") == near((1 / 7, 1))


def test_more_workers_than_rows_are_counted() -> None:
    made = HandMadeRecording(workers=4)
    made.ticket(0, 0, 100, 0, ticket=1)
    found = timeline(made.tracing(), BUFFERS, 1)
    assert found is not None
    assert "3 more workers not shown" in timeline_figure(found._replace(left_out=3))


def test_without_workers_the_training_makes_batches() -> None:
    made = HandMadeRecording(workers=0)
    made.delivery(0, 600, 0, way=DeliveryKind.MADE_HERE, run=0, begins_pass=True)
    picture = drawn(made)
    assert picture.of("training", "make") == near((0, 0.6))
    assert [*picture.rows] == ["training"]


def test_without_records_there_is_no_picture() -> None:
    assert timeline(HandMadeRecording(workers=1).tracing(), 0, 0) is None


def test_shares_of_a_window_fill_their_bars() -> None:
    window = Window(seconds=10, steps=40, wait_s=4, epoch_starts_s=1, workers=2, busy_s=12, idle_s=8, cpu_s=6,
                    queued_s=2)  # fmt: skip
    assert shares(window) == {
        "training": {"step": 6, "wait": 3, "epoch": 1},
        "workers": {"compute": 6, "cpu": 2, "other": 4, "hungry": 8},
    }
    picture = Picture(shares_figure(window))
    assert picture.of("training", "step") == near((0, 0.6))
    assert picture.of("training", "epoch") == near((0.9, 1))
    assert picture.of("workers", "hungry") == near((0.6, 1))
    assert "waits for a CPU 10%" in picture.told


def test_before_the_first_batch_there_are_no_bars() -> None:
    assert shares_figure(Window()) == "<p>No batch has been taken yet.</p>"


def test_a_measured_window_has_bars() -> None:
    picture = Picture(shares_figure(window_of(looks(20, pids=(100, 101)), math.inf)))
    assert all(
        sum(each.end - each.begin for each in row) == pytest.approx(1)
        for row in picture.rows.values()
    )


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    "ground", ["#ffffff", "#111111", "#1e1e1e"], ids=["light", "dark", "notebook"]
)
def test_fills_stand_out_on_light_and_dark(ground: str) -> None:
    """By the contrast that WCAG 2.1 requires of graphics."""
    for color in re.findall(r"#[0-9a-f]{6}", STYLE):
        dark, light = sorted((luminance(color), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) >= 3, color
