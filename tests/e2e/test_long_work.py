"""Users are told how far work is that takes long: in real loaders, whose two seconds are made shorter here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.child import run_child

ON = {"LOADERPOOL_PROGRESS": None}  # tests switch it off in all their children
SOON = """
import threading
import time
import numpy as np
import loaderpool as lp
from loaderpool.system import long_work

long_work._FIRST_NS = 200_000_000
long_work._LINE_NS = 200_000_000


def length(item):
    time.sleep(0.005)
    return item % 50 + 1


def generate():
    for item in range(3000):
        time.sleep(0.0015)
        yield item


class Stream:
    def __iter__(self):
        return generate()


class Unsendable(Stream):
    def __init__(self):
        self.lock = threading.Lock()


def zeros(item):
    time.sleep(0.002)
    return np.zeros(4, np.float32)


def make_buckets(workers):
    return lp.Loader(range(2000), zeros, batch_size=8, workers=workers, buckets=lp.Buckets(length, [20, 40]))


def resume(make):
    first = make()
    batches = iter(first)
    for _ in range(200):
        next(batches)
    state = batches.state_dict()
    first.close()
    with make() as second:
        second.load_state_dict(state)
        return next(iter(second))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_are_counted_as_they_are_found(workers: int) -> None:
    result = run_child(f"{SOON}\nmake_buckets({workers}).close()\n", env=ON).check()
    shares = [int(share) for share in re.findall(r"calling Buckets.by: (\d+)% of 2,000 items, ", result.stderr)]
    assert shares and shares == sorted(shares)
    if workers:
        assert len(shares) > 3
        assert any(line.endswith(" left") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            "lp.Loader.from_generator(generate, batch_size=8, workers=2, copies=2)",
            r"running generators up to their saved position: item [\d,]+ of generator [01] \(at most [\d,]+\), ",
        ),
        (
            "lp.Loader.from_generator(generate, batch_size=8, workers=0)",
            r"running generators up to their saved position: item [\d,]+ of generator 0, ",
        ),
        ("lp.Loader(Stream(), batch_size=8, workers=2)", "reading the stream up to item 1,600[^:]*: "),
        ("lp.Loader(Stream(), batch_size=8, workers=0)", r"up to item 1,600 to resume there: \d+% of 1,600 items, "),
        (
            "lp.Loader(Unsendable(), batch_size=8, workers=2)",  # read by a thread of the trainer
            r"up to item 1,600 to resume there: \d+% of 1,600 items, ",
        ),
    ],
)
def test_a_pass_that_goes_on_says_how_far_it_is_on_the_way_to_its_place(made: str, says: str) -> None:
    result = run_child(f"{SOON}\nresume(lambda: {made})\n", env=ON).check()
    assert re.search(says, result.stderr), result.stderr


def test_a_function_whose_imports_take_seconds_is_told_while_the_first_batch_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(3)\nvalue = 1\n")
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        sys.modules["slow_library"] = type(sys)("slow_library")  # here it is there already
        import loaderpool as lp

        import slow_function

        with lp.Loader(range(8), slow_function.load, batch_size=4, workers=1) as loader:
            print(len(list(loader)))
        """
    (tmp_path / "slow_function.py").write_text("import slow_library\ndef load(item):\n    return float(item)\n")
    result = run_child(code, env=ON).check()
    assert result.stdout == "2\n"
    lines = [line for line in result.stderr.splitlines() if line.startswith("loaderpool: loading the function")]
    assert len(lines) == 1 and re.search(r"[12](\.\d+)? s so far$", lines[0])


def test_the_switch_turns_all_of_it_off() -> None:
    result = run_child(f"{SOON}\nmake_buckets(2).close()\n", env={"LOADERPOOL_PROGRESS": "0"}).check()
    assert result.stderr == ""
