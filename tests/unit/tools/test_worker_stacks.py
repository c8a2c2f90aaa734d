"""What workers' threads are at: faulthandler's texts put together, and processes that are asked."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loaderpool.tools.cli.stacks_screen import draw_stacks
from loaderpool.tools.watching import worker_stacks
from loaderpool.tools.watching.worker_stacks import Frame, Place, ask_stacks, places

IDLE = """Current thread 0x00007f80 (most recent call first):
  File "/site/loaderpool/worker/channels.py", line 30 in wait
  File "/site/loaderpool/worker/loop.py", line 90 in run
"""
READS = """Thread 0x00007f81 (most recent call first):
  File "/usr/lib/python3/pathlib.py", line 1050 in read_bytes
  File "/home/user/train.py", line 33 in read_image
  File "/site/loaderpool/worker/calls.py", line 200 in sample
  File "/site/loaderpool/worker/loop.py", line 99 in run
"""
READ = (
    Frame("read_bytes", "/usr/lib/python3/pathlib.py", 1050),
    Frame("read_image", "/home/user/train.py", 33),
)


def test_threads_at_one_place_stand_together_without_loaderpools_own_calls() -> None:
    found = places({12: f"{READS}\n{READS}\n{IDLE}", 10: READS, 11: IDLE, 13: "Thread 0x1 (most recent call first):\n"})
    assert found == [Place((10, 12, 12), READ), Place((11, 12), ())]


def test_the_screen_says_who_is_where() -> None:
    text = draw_stacks([Place((10, 12, 12), READ), Place((11, 12), ())], 1, 100, None).plain
    assert text == (
        "2 workers: pid 10, 12 (2 threads)\n"
        "  read_bytes  /usr/lib/python3/pathlib.py:1050\n"
        "  read_image  /home/user/train.py:33\n"
        "2 workers in loaderpool itself, mostly waiting for work: pid 11, 12\n"
        "1 worker did not answer"
    )


def test_of_a_long_path_the_end_is_shown() -> None:
    place = Place((10,), (Frame("read", f"{'/folder' * 20}/train.py", 33),))
    assert draw_stacks([place], 0, 30, 40).plain.splitlines()[1] == "  read  …er/folder/train.py:33"


def test_where_there_are_no_workers_it_says_so() -> None:
    assert draw_stacks([], 0, 100, 40).plain == "No worker of this machine makes batches for it now."


@pytest.mark.parametrize("height", [2, 5, 12, 40])
@pytest.mark.parametrize("count", [1, 16, 64])
def test_it_fits_the_terminal(count: int, height: int) -> None:
    frames = tuple(Frame(f"level_{number}", "/home/user/a\x1b[31m.py" * 9, number) for number in range(30))
    found = [Place((number,), (Frame(f"own_{number}", "train.py", 1), *frames)) for number in range(count)]
    lines = draw_stacks(found, 0, 80, height).plain.splitlines()
    assert len(lines) <= height
    assert all(len(line) <= 80 and line.isprintable() for line in lines)


def test_of_many_workers_some_are_named() -> None:
    idle = draw_stacks([Place(tuple(range(64)), ())], 0, 100, None).plain
    assert idle.startswith("64 workers in loaderpool itself, mostly waiting for work: pid 0, 1, 2,")


def test_on_a_narrow_terminal_it_is_told_how_many_they_are() -> None:
    lines = draw_stacks([Place(tuple(range(10_000, 10_064)), READ), Place((7,), ())], 0, 60, 24).plain.splitlines()
    assert lines[0].startswith("64 workers: pid 10000, 10001,")
    assert lines[-1].startswith("1 worker in loaderpool itself, mostly waiting for work")


def test_a_process_that_is_no_worker_gets_no_signal(tmp_path: Path) -> None:
    """The signal would end it: it has no such file, or has one and does not catch the signal yet."""
    script = "import os, time; held = os.memfd_create('loaderpool-asked-stacks'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert ask_stacks([other.pid, os.getpid(), 2**22 + 1]) == {}
        assert other.poll() is None
        other.send_signal(signal.SIGKILL)


def test_nor_does_one_of_which_the_kernel_does_not_say_what_it_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under gVisor, whose /proc/PID/status is shorter."""
    monkeypatch.setattr(worker_stacks, "_stack_file", lambda pid: "/dev/null")
    monkeypatch.setattr(worker_stacks, "open", lambda *args, **kwargs: io.StringIO("Name:\tpython3\n"), raising=False)
    assert ask_stacks([os.getpid()]) == {}
