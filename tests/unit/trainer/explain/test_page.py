"""The page that a training writes for `loaderpool top`, and its values for a loader."""

from __future__ import annotations

import dataclasses
import gc
import json
import os

import pytest

from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowItem
from loaderpool.trainer.explain.page import NAME, PAGE_BYTES, Page, read_page, told_of
from loaderpool.trainer.explain.window import Snapshot
from tests.support.looks import look, looks


def path() -> str | None:
    """Path of this process's page."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return next(
        (
            link
            for link in links
            if os.path.lexists(link) and f":loaderpool-{NAME} " in os.readlink(link)
        ),
        None,
    )


def read() -> bytearray:
    found = path()
    assert found is not None
    with open(found, "rb") as file:
        return bytearray(file.read(PAGE_BYTES))


def told_in(data: bytearray) -> object:
    content = read_page(bytes(data))
    assert content is not None
    (told,) = content["loaders"]
    return told


def test_it_tells_what_was_told_last_and_goes_with_the_loader() -> None:
    page = Page()
    assert read_page(bytes(read())) is None
    page.write({"batches": 1})
    page.write({"batches": 3})
    assert told_in(read()) == {"batches": 3}
    del page
    gc.collect()
    assert path() is None


@pytest.mark.parametrize("at", [0, 4, 8, 40])
def test_what_is_half_written_is_not_told(at: int) -> None:
    page = Page()
    page.write({"text": "x" * 100})
    data = read()
    assert told_in(data) == {"text": "x" * 100}
    data[at] ^= 1
    assert read_page(bytes(data)) is None


def test_what_has_no_room_is_not_told() -> None:
    page = Page()
    page.write({"text": "x"})
    page.write({"text": "x" * PAGE_BYTES})
    assert told_in(read()) == {"text": "x"}


def test_a_fork_writes_nothing_to_the_page_of_the_process_that_it_is_of() -> None:
    page = Page()
    page.write({"batches": 1})
    pid = os.fork()
    if not pid:
        try:
            page.write({"batches": 2})
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert told_in(read()) == {"batches": 1}


@pytest.fixture
def busy() -> list[Snapshot]:
    """Snapshots of a loader with two workers. Training waits for it half of the time."""
    calls = CallTimes(
        100, 10**9, 0, (0,) * 23 + (60, 40) + (0,) * (BUCKETS - 25), (SlowItem(8812, 3, 1.5),)
    )
    return looks(20, pids=(100, 101), calls=calls)


def test_the_page_has_a_verdict_and_the_slowest_items(busy: list[Snapshot]) -> None:
    explanation = json.loads(json.dumps(told_of(busy)))["explanation"]
    assert explanation["headline"].endswith(
        "waited 50% of the time for data (50 ms of a step of 100 ms)"
    )
    assert explanation["slowest"][0]["index"] == 8812


def test_the_page_has_rates_and_waits(busy: list[Snapshot]) -> None:
    told = told_of(busy)
    assert (told["steps_per_s"], told["samples_per_s"], told["bytes_per_s"]) == (10, 320, 320_000)
    assert told["wait_shares"] == [0.5] * 15
    of_two_epochs = [busy[0], *(dataclasses.replace(each, epochs=each.number) for each in busy[1:])]
    # the last batch of an epoch comes every 2 s
    assert told_of(of_two_epochs)["steps_per_s"] == pytest.approx(10.5)


def test_the_page_has_the_buffers(busy: list[Snapshot]) -> None:
    told = told_of(busy)
    assert (told["buffers"], told["buffers_in_use"], told["buffers_ready"]) == (6, 2, 3)


def test_the_page_has_the_state_of_each_worker(busy: list[Snapshot]) -> None:
    workers = told_of(busy)["workers"]
    assert [(each["state"], each["busy_share"]) for each in workers] == [("idle", 0.5)] * 2


@pytest.mark.parametrize(("state", "share"), [("item", 1.0), ("idle", 0.0)])
def test_an_item_that_no_counter_has_yet_counts_as_work(state: str, share: float) -> None:
    before, now = look(3, pids=(100,)), look(4, pids=(100,))
    worker = before.by_worker[0]._replace(doing={"state": state})
    stuck = dataclasses.replace(now, by_worker={0: worker}, now_ns=before.now_ns + 2_000_000_000)
    (told,) = told_of([before, stuck])["workers"]
    assert (told["state"], told["busy_share"]) == (state, share)


def test_the_first_steps_have_no_verdict() -> None:
    told = told_of([look(0)])
    assert (told["explanation"], told["steps_per_s"], told["wait_shares"]) == (None, None, [])
