"""What is told of work that takes long, where, and how often: by a clock that a test moves on."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loaderpool.system import clock, long_work, role
from loaderpool.system.long_work import LongWork


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    now_ns = [1_000_000_000]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns[0])
    monkeypatch.delenv(long_work.SWITCH, raising=False)

    def wait(seconds: float) -> None:
        now_ns[0] += int(seconds * 1e9)

    yield wait
    assert LongWork._shown is None, "a test has left the terminal taken"


def test_what_is_over_soon_is_not_told_of(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with LongWork("counting", 100) as work:
        pass_time(1.9)
        work.reach(90)
    assert capsys.readouterr().err == ""


def test_a_line_now_and_then_says_how_far_it_is(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with LongWork("counting", 1000) as work:
        for done in range(0, 1000, 10):
            pass_time(1)
            work.reach(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "counting: 1% of 1,000 items, 2 s so far, about 198 s left"
    assert lines[1] == "counting: 6% of 1,000 items, 7 s so far, about 110 s left"
    assert 10 < len(lines) < 16  # of a hundred seconds: each a fifth of the time so far behind the one before


def test_bytes_are_sizes_and_a_total_may_be_unknown(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with LongWork("reading", 12_300_000_000, "bytes") as work:
        pass_time(3)
        work.reach(1_230_000_000)
    with LongWork("reading", None) as work:
        pass_time(3)
        work.reach(1234)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 10% of 12.3 GB, 3 s so far, about 27 s left",
        "reading: 1,234 items, 3 s so far",
    ]


def test_who_waits_asks_how_far_it_is(pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def measure() -> int:
        asked.append(1)
        return 30

    with LongWork("waiting", 60, measure=measure) as work:
        work.tell()
        assert not work.is_due and not asked
        pass_time(4)
        assert work.is_due
        work.tell()
        work.tell()
    assert asked == [1] and capsys.readouterr().err == "waiting: 50% of 60 items, 4 s so far, about 4 s left\n"
    assert not work.is_due


def test_what_goes_wrong_while_it_tells_is_no_matter(
    pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> int:
        raise RuntimeError

    for work in (LongWork("a", 1, measure=fails), LongWork("b", 1)):
        monkeypatch.setattr(sys, "stderr", None if work._measure else io.StringIO())
        sys.stderr and sys.stderr.close()
        with work:
            pass_time(3)
            work.tell()
            work.reach(1)
            assert not work.is_due
        pass_time(60)


@pytest.mark.parametrize("why", ["switch", "worker", "fork", "other"])
def test_it_is_silent_where_it_has_nothing_to_say(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "switch":
        monkeypatch.setenv(long_work.SWITCH, "0")
    if why == "worker":
        monkeypatch.setattr(role, "_role", "worker")
    work, other = LongWork("this", 10), LongWork("the other one", 10)
    pass_time(3)
    if why == "fork":
        monkeypatch.setattr(work, "_pid", os.getpid() + 1)
    if why == "other":
        other.reach(1)
    work.reach(5)
    assert "this" not in capsys.readouterr().err
    other.end()
    work.end()


# -- bars


def test_a_bar_on_a_terminal_is_gone_when_it_is_over(
    pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    streams = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt), LongWork("counting", 100) as work:
        pass_time(3)
        work.reach(25)
        drawn = terminal.getvalue()
        pass_time(0.1)
        work.reach(26)
        assert terminal.getvalue() == drawn  # five times a second at most
        raise KeyboardInterrupt
    shown = terminal.getvalue()
    assert "counting" in drawn and "25% of 100 items" in drawn and "0:00:03" in drawn
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor
    assert shown.rstrip().endswith("\x1b[2K")  # the line is empty
    assert (sys.stdout, sys.stderr) == streams


@pytest.mark.parametrize("why", ["lines", "dumb", "no rich"])
def test_there_are_lines_where_no_bar_can_be_drawn(
    pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm")
    if why == "no rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with LongWork("counting", 100, in_lines=why == "lines") as work:
        pass_time(3)
        work.reach(25)
    assert terminal.getvalue() == "counting: 25% of 100 items, 3 s so far, about 9 s left\n"


def test_to_tell_costs_next_to_nothing_in_between() -> None:
    def seconds(call: Callable[[Any], Any]) -> float:
        began = time.perf_counter()
        for done in range(100_000):
            call(done)
        return time.perf_counter() - began

    with LongWork("counting", 100_000) as work:
        assert min(seconds(work.reach) for _ in range(3)) < 20 * min(seconds(abs) for _ in range(3)) + 0.05


def test_a_notebook_that_can_draw_no_bar_has_lines(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = pytest.importorskip("rich.console")
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with LongWork("counting", 100) as work:
        pass_time(3)
        work.reach(10)
    assert capsys.readouterr().err == "counting: 10% of 100 items, 3 s so far, about 27 s left\n"
