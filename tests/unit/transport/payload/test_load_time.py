"""How long a payload took to load."""

from __future__ import annotations

import contextlib

import pytest

from loaderpool.transport.payload import load_time
from loaderpool.transport.payload.load_time import NOT_TOLD, LoadTime, LoadTimer


@pytest.fixture
def time_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(load_time.clock, "monotonic_s", lambda: now[0])
    return now


def test_the_import_that_took_longest_is_named(time_s: list[float]) -> None:
    watched = []
    timer = LoadTimer(lambda module: contextlib.nullcontext(watched.append(module)))
    with timer.loading():
        for module, seconds in (("json", 0.25), ("train", 2.0), ("os", 0.0)):
            with timer.importing(module):
                time_s[0] += seconds
        time_s[0] += 0.5
    assert timer.latest == LoadTime(2.75, "train", 2.0)
    assert watched == ["json", "train", "os"]


def test_each_load_is_measured_for_itself_and_a_short_one_is_not_told_of(time_s: list[float]) -> None:
    timer = LoadTimer(lambda _: contextlib.nullcontext())
    with timer.loading(), timer.importing("train"):
        time_s[0] += 2
    with timer.loading():
        time_s[0] += 1
    assert timer.latest == LoadTime(1.0, "", 0.0)
    with timer.loading():
        time_s[0] += 0.125
    assert timer.latest == NOT_TOLD


def test_a_load_that_fails_leaves_no_time(time_s: list[float]) -> None:
    timer = LoadTimer(lambda _: contextlib.nullcontext())
    with pytest.raises(ImportError), timer.loading(), timer.importing("train"):
        time_s[0] += 2
        raise ImportError
    assert timer.latest == NOT_TOLD
