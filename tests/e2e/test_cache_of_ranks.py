"""`cache="memory"` in ranks of one job on a machine: one copy, and one call for each item."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.interpreters import Interpreter, Ranks, ranks_of
from tests.support.processes import wait_until

ITEMS, RANKS = 1600, 4
SLOW = 40  # items of the loaders whose function is slow
IN_FLIGHT = 8  # calls that may be running at a kill

SCRIPT = """
import asyncio, os, sys, time
import numpy as np
import loaderpool as lp

FOLDER, RANK = sys.argv[1], int(sys.argv[2])

def decode(number):
    with open(f"{FOLDER}/calls", "ab") as file:
        file.write(b"x")
    return np.full(100, number)

def other(number):
    return np.full(100, -number)

def slow(number):
    time.sleep(0.01)
    return decode(number)

async def slow_async(number):
    await asyncio.sleep(0.01)
    return decode(number)

def several(number):
    return [slow(number)] * 2

def waits(number):  # for the file "go", in the first call for item 3
    first = not os.path.exists(f"{FOLDER}/begun")
    if number == 3 and first:
        with open(f"{FOLDER}/begun", "w") as file:
            file.write(f"{os.getpid()}")
        while not os.path.exists(f"{FOLDER}/go"):
            time.sleep(0.01)
        if os.path.exists(f"{FOLDER}/fails"):
            raise LookupError("it fails")
    return decode(number)

def start(fn=decode, cache="memory"):
    global loader
    loader = lp.Loader(
        range(1600), fn, cache=cache, batch_size=50, shuffle=True, seed=5, workers=1,
        shard=lp.Shard(4, RANK),
    )

def start_equal(fn=slow, **given):  # all ranks have the same batches
    global loader
    options = {"cache": "memory", "workers": 2, "batch_size": 5, **given}
    loader = lp.Loader(range(40), fn, **options)

def sums():
    return sum(int(batch[:, 7].sum()) for batch in loader)

def counts():
    cache = loader.statistics().cache
    return cache.hits, cache.misses

loader = None"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ranks_of(tmp_path, SCRIPT, RANKS) as start:
        yield start


def run(ranks: list[Interpreter], line: str) -> list[str]:
    for rank in ranks:
        rank.begin(line)
    return [rank.answer() for rank in ranks]


def calls(folder: Path) -> int:
    return (folder / "calls").stat().st_size


def test_ranks_call_the_function_once_for_each_item(ranks: Ranks, tmp_path: Path) -> None:
    several = ranks()
    assert run(several, "start()") == ["None"] * RANKS
    for _ in range(4):
        assert sum(map(int, run(several, "sums()"))) == ITEMS * (ITEMS - 1) // 2
    assert calls(tmp_path) == ITEMS
    hits, misses = zip(*map(eval, run(several, "counts()")), strict=True)
    assert sum(misses) == ITEMS and sum(hits) >= 3 * ITEMS
    sizes = {*run(several, "loader.statistics().cache.bytes")}
    assert len(sizes) == 1 and int(sizes.pop()) > ITEMS * 800


@pytest.mark.parametrize(
    "options",
    [
        "slow",
        "slow_async, threads=3",
        "slow, workers=0",
        "several, samples_per_item=2",
        "slow, cache=FOLDER + '/cache'",
    ],
)
def test_ranks_wait_for_items_that_others_make(ranks: Ranks, tmp_path: Path, options: str) -> None:
    several = ranks(3)
    assert run(several, f"start_equal({options})") == ["None"] * 3
    # The ranks start with the same items, and some are an epoch ahead of others.
    total = SLOW * (SLOW - 1) // 2 * (2 if "several" in options else 1)
    assert {*run(several, "[sums(), sums()]")} == {f"[{total}, {total}]"}
    assert calls(tmp_path) == SLOW
    assert sum(map(int, run(several, "counts()[1]"))) == SLOW


@pytest.mark.parametrize("fate", ["killed", "stopped", "fails", "all stopped"])
def test_no_rank_waits_for_one_that_makes_nothing(ranks: Ranks, tmp_path: Path, fate: str) -> None:
    first, second = ranks(2)
    run([first, second], "start_equal(waits, workers=1)")
    first.begin("sums()")
    begun = tmp_path / "begun"
    wait_until(lambda: begun.exists() and begun.read_text())
    maker = int(begun.read_text())
    second.begin("sums()")
    wait_until(lambda: calls(tmp_path) >= 3)
    if fate == "killed":
        first.end(signal.SIGKILL)
    elif fate == "fails":
        (tmp_path / "fails").touch()
        (tmp_path / "go").touch()
        assert "LookupError" in first.answer()
    else:
        supervisor = int(Path(f"/proc/{maker}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in (maker, *([supervisor, first.pid] if "all" in fate else ())):
            os.kill(pid, signal.SIGSTOP)
    assert second.answer() == str(SLOW * (SLOW - 1) // 2)


def test_a_closed_loader_leaves_the_cache_to_others(ranks: Ranks, tmp_path: Path) -> None:
    several = ranks()
    run(several, "start()")
    run(several, "sums()")
    before = calls(tmp_path)
    assert run(several[:2], "loader.close()") == ["None"] * 2
    several[2].end(signal.SIGKILL)
    assert several[3].run("sums()").isdecimal()
    assert several[0].run("start()") == "None" and several[0].run("sums()").isdecimal()
    assert calls(tmp_path) <= before + IN_FLIGHT
    run([several[0], several[3]], "loader.close()")
    wait_until(lambda: not any(map(has_cache, several)))
    several[0].run("start()")
    several[0].run("sums()")
    assert calls(tmp_path) >= before + ITEMS // RANKS


def has_cache(rank: Interpreter) -> bool:
    if not Path(f"/proc/{rank.pid}").exists():
        return False
    names = [str(each.readlink()) for each in Path(f"/proc/{rank.pid}/fd").iterdir()]
    return any("loaderpool-cache" in each for each in names)


@pytest.mark.parametrize(
    ("job", "local", "line"),
    [("another", RANKS, "start()"), ("job", 1, "start()"), ("job", RANKS, "start(other)")],
    ids=["other job", "one rank", "other function"],
)
def test_others_have_caches_of_their_own(
    ranks: Ranks, tmp_path: Path, job: str, local: int, line: str
) -> None:
    (first,), (second,) = ranks(1), ranks(1, job, local)
    first.run("start()")
    total = int(first.run("sums()"))
    assert second.run(line) == "None"
    found = int(second.run("sums()"))
    assert found == (-total if "other" in line else total)
    assert int(second.run("counts()[1]")) >= ITEMS // RANKS


def test_the_limit_is_for_all_ranks_together(ranks: Ranks) -> None:
    several = ranks()
    assert run(several, "start(cache=lp.Cache('memory', '500kB'))") == ["None"] * RANKS
    run(several, "sums()")
    sizes = {*map(int, run(several, "loader.statistics().cache.bytes"))}
    assert len(sizes) == 1 and sizes.pop() <= 500_000
    assert run(several, "loader.statistics().cache.is_full").count("True") >= 1
