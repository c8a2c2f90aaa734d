"""Users are told how far work is that takes long: in real loaders, whose two seconds are made shorter here."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.child import run_child

ON = {"LOADERPOOL_PROGRESS": None}  # tests switch it off in all their children
SOON = """
import sys
import threading
import time
import numpy as np
import loaderpool as lp
from loaderpool.system import long_work

long_work._FIRST_NS = 200_000_000
long_work._LINE_NS = 200_000_000


def length(item):
    time.sleep(0.002)
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


def told(*work: str) -> list[str]:
    """What each piece of work has said, all in one child."""
    between = '\nprint("next", file=sys.stderr, flush=True)\n'
    return run_child(SOON + between.join(work), env=ON).check().stderr.split("next\n")


def test_lengths_are_counted_as_they_are_found() -> None:
    here, by_workers = told("make_buckets(0).close()", "make_buckets(2).close()")
    for said in (here, by_workers):
        shares = [int(share) for share in re.findall(r"calling Buckets.by: (\d+)% of 2,000 items, ", said)]
        assert len(shares) > 1 and shares == sorted(shares)
    assert any(line.endswith(" left") for line in by_workers.splitlines())


def test_a_pass_that_goes_on_says_how_far_it_is_on_the_way_to_its_place() -> None:
    on_the_way = r"up to item 1,600 to resume there: \d+% of 1,600 items, "
    expected = {
        "lp.Loader.from_generator(generate, batch_size=8, workers=2, copies=2)": (
            r"running generators up to their saved position: item [\d,]+ of generator [01] \(at most [\d,]+\), "
        ),
        "lp.Loader.from_generator(generate, batch_size=8, workers=0)": (
            r"running generators up to their saved position: item [\d,]+ of generator 0, "
        ),
        "lp.Loader(Stream(), batch_size=8, workers=2)": "reading the stream up to item 1,600[^:]*: ",
        "lp.Loader(Stream(), batch_size=8, workers=0)": on_the_way,
        "lp.Loader(Unsendable(), batch_size=8, workers=2)": on_the_way,  # read by a thread of the trainer
    }
    for made, said in zip(expected, told(*(f"resume(lambda: {made})" for made in expected)), strict=True):
        assert re.search(expected[made], said), (made, said)


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
