"""The page that a training leaves for `loaderpool top`, and what it says of a loader."""

from __future__ import annotations

import gc
import json
import mmap
import os

import pytest

from loaderpool.memory.call_times import BUCKETS, CallTimes, SlowCall
from loaderpool.trainer.explain.page import NAME, PAGE_BYTES, Page, page_of_process, read_page, told_of
from tests.support.looks import ABOUT, look, looks


class Loader:
    """Anything that can be referred to weakly."""


def path() -> str | None:
    """Where this process's page can be opened."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return next((link for link in links if os.path.lexists(link) and f":loaderpool-{NAME} " in os.readlink(link)), None)


def read() -> bytearray:
    found = path()
    assert found is not None
    with open(found, "rb") as file:
        return bytearray(file.read(PAGE_BYTES))


def loaders_in(data: bytearray) -> list[object]:
    content = read_page(bytes(data))
    assert content is not None
    loaders: list[object] = content["loaders"]
    return loaders


def test_it_tells_of_each_loader_what_was_told_last_until_it_is_gone() -> None:
    page, one, two = Page(), Loader(), Loader()
    assert read_page(bytes(read())) is None
    page.write({one: {"batches": 1}, two: {"batches": 2}})
    page.write({one: {"batches": 3}})
    assert loaders_in(read()) == [{"batches": 3}, {"batches": 2}]
    page.remove(one)
    assert loaders_in(read()) == [{"batches": 2}]
    page.remove(two)
    page.remove(two)
    assert page.loaders == []


@pytest.mark.parametrize("writes", [2, 3])
@pytest.mark.parametrize("at", [16, 40, 8])
def test_what_is_half_written_is_passed_over(writes: int, at: int) -> None:
    page, loader = Page(), Loader()
    for number in range(writes):
        page.write({loader: {"number": number, "text": "x" * 100}})
    data = read()
    latest = writes % 2 * PAGE_BYTES // 2
    assert loaders_in(data)[0] == {"number": writes - 1, "text": "x" * 100}
    data[latest + at] ^= 1
    assert loaders_in(data)[0] == {"number": writes - 2, "text": "x" * 100}


def test_a_process_has_one_for_as_long_as_it_is_kept() -> None:
    assert page_of_process(makes=False) is None
    page = page_of_process()
    assert page is not None and page_of_process() is page
    del page
    gc.collect()
    assert path() is None


def test_a_fork_writes_nothing_to_the_page_of_the_process_that_it_is_of() -> None:
    page, loader = page_of_process(), Loader()
    assert page is not None
    page.write({loader: {"batches": 1}})
    pid = os.fork()
    if not pid:
        try:
            page.write({loader: {"batches": 2}})
            page.remove(loader)
            has_its_own = page_of_process() is not page
        finally:
            os._exit(0 if has_its_own else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert loaders_in(read()) == [{"batches": 1}]


def test_no_other_process_can_write_to_it() -> None:
    page = Page()
    found = path()
    assert found is not None
    try:
        writable = os.open(found, os.O_RDWR)  # root can
    except PermissionError:
        return
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(writable, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(writable, 10)
    os.close(writable)
    page.write({page: {}})


def test_of_a_loader_it_tells_rates_a_verdict_and_what_workers_are_at() -> None:
    calls = CallTimes(100, 10**9, 0, (0,) * 23 + (60, 40) + (0,) * (BUCKETS - 25), (SlowCall(1_500_000_000, 8812, 3),))
    seen = looks(20, pids=(100, 101), calls=calls)
    told = json.loads(json.dumps(told_of(seen, ABOUT, {0: {"state": "item"}, 1: {"state": "idle"}})))
    assert told["explanation"]["headline"].endswith("waited 50% of the time for data (50 ms of a step of 100 ms)")
    assert (told["steps_per_s"], told["samples_per_s"], told["bytes_per_s"]) == (10, 320, 320_000)
    of_two_epochs = [seen[0], *(each._replace(steps=each.steps._replace(epochs=each.number)) for each in seen[1:])]
    assert told_of(of_two_epochs, ABOUT, {})["steps_per_s"] == pytest.approx(10.5)  # a last batch in every 2 s
    assert told["wait_shares"] == [0.5] * 15
    assert (told["buffers"], told["buffers_in_use"], told["buffers_ready"]) == (6, 2, 3)
    assert [each["state"] for each in told["workers"]] == ["item", "idle"]
    assert [each["busy_share"] for each in told["workers"]] == [0.5, 0.5]
    assert told["explanation"]["slowest"][0]["index"] == 8812


def test_an_item_that_no_counter_has_yet_counts_as_work() -> None:
    before, now = look(3, pids=(100,)), look(4, pids=(100,))
    stuck = now._replace(work=before.work, now_ns=before.now_ns + 2_000_000_000)
    (worker,) = told_of([before, stuck], ABOUT, {0: {"state": "item"}})["workers"]
    assert worker["busy_share"] == 1.0
    (worker,) = told_of([before, stuck], ABOUT, {0: {"state": "idle"}})["workers"]
    assert worker["busy_share"] == 0.0


def test_the_first_steps_have_no_verdict() -> None:
    told = told_of([look(0, steps=0, steps_ns=0, wait_ns=0)], ABOUT, {})
    assert (told["explanation"], told["steps_per_s"], told["wait_shares"]) == (None, None, [])
