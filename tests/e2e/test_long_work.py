"""Users are told how far work is that takes long: in real loaders, whose two seconds are made shorter here."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.session.session import Session
from tests.support.child import run_child

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
    result = run_child(f"{SOON}\nmake_buckets({workers}).close()\n").check()
    shares = [int(share) for share in re.findall(r"calling Buckets.by: (\d+)% of 2,000 items, ", result.stderr)]
    assert shares and shares == sorted(shares)
    if workers:
        assert len(shares) > 3
        assert any(line.endswith(" left") for line in result.stderr.splitlines())


def test_a_cache_that_is_filled_says_so_in_the_first_epoch_only(tmp_path: Path) -> None:
    result = run_child(
        f"""{SOON}
with lp.Loader(range(3000), zeros, batch_size=8, workers=2, cache={str(tmp_path / "kept")!r}) as loader:
    for batch in loader: pass
    print("over", file=__import__("sys").stderr)
    for batch in loader: pass
"""
    ).check()
    before, _, behind = result.stderr.partition("over\n")
    assert re.search(r"filling cache='.*kept': \d+% of 3,000 items, ", before)
    assert behind == ""


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            "lp.Loader.from_generator(generate, batch_size=8, workers=2, copies=2)",
            r"running generators up to their place: item [\d,]+ of generator [01], of [\d,]+ at most, ",
        ),
        (
            "lp.Loader.from_generator(generate, batch_size=8, workers=0)",
            r"running generators up to their place: item [\d,]+ of generator 0, ",
        ),
        ("lp.Loader(Stream(), batch_size=8, workers=2)", "reading the stream up to item 1,600, where it goes on: "),
        ("lp.Loader(Stream(), batch_size=8, workers=0)", r"up to item 1,600, where it goes on: \d+% of 1,600 items, "),
        (
            "lp.Loader(Unsendable(), batch_size=8, workers=2)",  # read by a thread of the trainer
            r"up to item 1,600, where it goes on: \d+% of 1,600 items, ",
        ),
    ],
)
def test_a_pass_that_goes_on_says_how_far_it_is_on_the_way_to_its_place(made: str, says: str) -> None:
    result = run_child(f"{SOON}\nresume(lambda: {made})\n").check()
    assert re.search(says, result.stderr), result.stderr


def test_the_switch_turns_all_of_it_off() -> None:
    result = run_child(f"{SOON}\nmake_buckets(2).close()\n", env={"LOADERPOOL_PROGRESS": "0"}).check()
    assert result.stderr == ""


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")
    script = tmp_path / "script.py"
    script.write_text(f"{SOON}\nif __name__ == '__main__':\n    make_buckets(2)\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [sys.executable, str(script)], environment | {"TERM": "xterm"})
    shown, is_sent, deadline = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # so the end of a terminal shows on Linux
                break
            if not piece:
                break
            shown += piece
            if not is_sent and b"of 2,000 items" in shown:
                os.write(terminal, b"\x03")
                is_sent = True
    finally:
        os.close(terminal)
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert is_sent and b"KeyboardInterrupt" in shown
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1  # hidden, and shown again
    assert shown.index(b"\x1b[?25h") < shown.index(b"KeyboardInterrupt")


def test_work_that_ends_while_another_thread_waits_ends_no_wait() -> None:
    """It is taken off without the lock, also between the look whether there is some and its use."""

    class EndsMeanwhile(Session):
        work = LongWork("waiting")
        looks = 0

        @property  # type: ignore[override]
        def long_work(self) -> LongWork | None:
            self.looks += 1
            return self.work if self.looks % 2 else None

    def slow(item: int) -> np.float32:
        time.sleep(0.01)
        return np.float32(item)

    with lp.Loader(range(40), slow, batch_size=4, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        session = loader._core.pool.session  # type: ignore[union-attr]
        del vars(session)["long_work"]
        session.__class__ = EndsMeanwhile
        assert len(list(batches)) == 9
