"""What is told of work that takes long, where, and how often: by a clock that a test moves on."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from loaderpool.system import clock, long_work, process
from loaderpool.system.long_work import LongWork


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now_ns = [1_000_000_000]
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns[0])
    monkeypatch.delenv(long_work.SWITCH, raising=False)

    def wait(seconds: float) -> None:
        now_ns[0] += int(seconds * 1e9)

    return wait


def test_what_is_over_soon_is_not_told_of(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    work = LongWork("counting", 100)
    pass_time(1.9)
    work.reach(90)
    assert capsys.readouterr().err == ""


def test_a_line_now_and_then_says_how_far_it_is(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    work = LongWork("counting", 1000)
    for done in range(0, 1000, 10):
        pass_time(1)
        work.reach(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "counting: 1% of 1,000 bytes, 2 s so far, about 198 s left"
    assert lines[1] == "counting: 6% of 1,000 bytes, 7 s so far, about 110 s left"
    assert 10 < len(lines) < 16  # of a hundred seconds: each a fifth of the time so far behind the one before


def test_bytes_are_sizes(pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    work = LongWork("reading", 12_300_000_000)
    pass_time(3)
    work.reach(1_230_000_000)
    assert capsys.readouterr().err == "reading: 10% of 11.5 GiB, 3 s so far, about 27 s left\n"


def test_what_goes_wrong_while_it_tells_is_no_matter(
    pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        if stream is not None:
            stream.close()
        work = LongWork("a", 1)
        pass_time(3)
        work.reach(1)


def test_a_worker_says_nothing(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_role", "worker")
    work = LongWork("this", 10)
    pass_time(3)
    work.reach(5)
    assert capsys.readouterr().err == ""


def test_the_switch_turns_it_off(
    pass_time: Callable[[float], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(long_work.SWITCH, "0")
    work = LongWork("this", 10)
    pass_time(3)
    work.reach(5)
    assert capsys.readouterr().err == ""
