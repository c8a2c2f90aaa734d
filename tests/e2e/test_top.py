"""`loaderpool top` with real trainings, in terminals of their own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running_trainings import DEADLINE_S, ROOT, RunningTraining, running_trainings

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

COMMAND = [sys.executable, "-m", "loaderpool.tools.cli", "top"]
NOBODY = 65534
HELD = 40  # item that waits for a file

TRAINING = f"""
import os
import sys
import time

import numpy as np

import loaderpool as lp


def hold(i):
    time.sleep(0.0005)  # samples of microseconds are made in blocks, of which the first item is known
    if i == {HELD}:
        with open("begun.part", "w") as file:
            file.write(str(time.monotonic()))
        os.rename("begun.part", "begun")
        while not os.path.exists("release"):
            time.sleep(0.01)
    return np.full(4, i, np.float32)


def wait(i):
    time.sleep(0.002)
    return np.full(4, i, np.float32)


def take(loader):
    for batch in loader:
        yield


def train(*loaders):
    takes = [iter(()) for _ in loaders]
    while not os.path.exists("end"):
        for place, loader in enumerate(loaders):
            if next(takes[place], "over") == "over":
                takes[place] = take(loader)
                next(takes[place])
    for each in takes:
        getattr(each, "close", int)()


if __name__ == "__main__":
    kind = sys.argv[1]
    function = hold if kind == "held" else wait
    with (
        lp.Loader(range(64), function, batch_size=4, workers=0 if kind == "none" else 2) as one,
        lp.Loader(range(64), wait, batch_size=8, workers=1) as two,
    ):
        train(one, two) if kind == "two" else train(one)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], RunningTraining]]:
    with running_trainings(tmp_path, TRAINING) as begin:
        yield begin


def top(*arguments: object, before: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `loaderpool top`, and return its output. `before` runs after its imports."""
    code = f"import sys\nfrom loaderpool.tools import cli, commands, top\n{before}\nsys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "top"] if before else COMMAND
    result = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result


def look_until(
    training: RunningTraining, is_wanted: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Return the first output that satisfies a condition."""
    command = [*COMMAND, f"{training.pid}", "--json"]
    found: dict[str, Any] = training.look_until(
        lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True),
        json.loads,
        is_wanted,
    )
    return found


def at_held(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["loaders"][0]["workers"] if each["index"] == HELD]


# -- output


def test_a_worker_that_is_at_an_item_for_long_is_shown_with_it(
    start: Callable[[str], RunningTraining],
) -> None:
    training = start("held")
    found = look_until(training, lambda found: at_held(found) and found["loaders"][0]["asked_s"])
    (loader,), begun_s = found["loaders"], float((training.folder / "begun").read_text())
    others = [each for each in loader["workers"] if each["index"] != HELD]
    assert [each["pid"] > 0 for each in loader["workers"]] == [True, True]
    assert len(others) == 1
    before_s = time.monotonic()
    found = look_until(training, at_held)
    after_s = time.monotonic()
    (worker,) = at_held(found)
    assert worker["state"] == "item"
    assert (
        before_s - begun_s - 3.0 < worker["item_s"] < after_s - begun_s + 0.1
    )  # the page is up to a second old
    assert found["loaders"][0]["asked_s"] >= loader["asked_s"]
    assert found["process"].endswith("train.py held")
    assert (found["pid"], found["command"], found["format"]) == (training.pid, "top", 3)
    shown = top(training.pid).stdout
    assert f"item {HELD} for " in shown
    assert "training has waited " in shown
    training.release()
    found = look_until(
        training, lambda found: (found["loaders"][0]["explanation"] or {}).get("slowest")
    )
    slowest = found["loaders"][0]["explanation"]["slowest"][0]
    assert slowest["index"] == HELD
    assert slowest["seconds"] >= worker["item_s"]
    times = found["loaders"][0]["call_s"]
    assert list(times) == ["p50", "p90", "p99"] and 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert found["loaders"][0]["calls_of"] == "sample"
    assert re.search(
        r"^calls +p50 .*s, p90 .*s, p99 .*s for each sample *$",
        top(training.pid).stdout,
        re.MULTILINE,
    )


def test_two_loaders_stand_one_below_the_other(start: Callable[[str], RunningTraining]) -> None:
    training = start("two")
    found = look_until(training, lambda found: len(found["loaders"]) == 2)
    assert sorted(len(each["workers"]) for each in found["loaders"]) == [1, 2]
    pids = [worker["pid"] for each in found["loaders"] for worker in each["workers"]]
    assert len(set(pids)) == 3
    shown = top(training.pid).stdout
    assert shown.index("[1 of 2]") < shown.index("[2 of 2]")
    assert all(f"{pid}" in shown for pid in pids)


# -- choice of the training


def test_of_several_trainings_one_must_be_chosen(start: Callable[[str], RunningTraining]) -> None:
    one, two = start("waiting"), start("none")
    for each in (one, two):
        look_until(each, lambda found: True)
    said = top(status=2).stderr
    assert f"{one.pid}  {sys.executable} train.py waiting\n" in said
    assert f"{two.pid}  {sys.executable} train.py none\n" in said


def test_a_worker_is_no_training(start: Callable[[str], RunningTraining]) -> None:
    """The process has inherited the page of its training."""
    found = look_until(start("waiting"), lambda found: len(found["loaders"][0]["workers"]) == 2)
    worker = found["loaders"][0]["workers"][0]["pid"]
    said = top(worker, status=1).stderr
    assert said == f"Error: process {worker} has no loader that has delivered a first batch.\n"


# -- on a terminal


class Terminal:
    """A terminal in which a command runs."""

    def __init__(self, *command: str) -> None:
        self.shown = ""
        self.descriptor, its = pty.openpty()
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=its, stdout=its, stderr=its, env=environment
        )
        os.close(its)

    def read_until(self, text: str) -> None:
        """Read the output until this text appears."""
        while text not in self.shown and self._read():
            pass
        assert text in self.shown, self.shown
        self.shown = self.shown[self.shown.rindex(text) + len(text) :]

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        readable, _, _ = select.select([self.descriptor], [], [], DEADLINE_S)
        try:
            data = os.read(self.descriptor, 1 << 16) if readable else b""
        except OSError:  # the other end is closed
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*command: str) -> Terminal:
        opened.append(Terminal(*command))
        return opened[-1]

    yield open_one
    for each in opened:
        each.process.kill()
        each.process.wait()
        os.close(each.descriptor)


def watched(
    start: Callable[[str], RunningTraining], terminal: Callable[..., Terminal], *options: str
) -> tuple[RunningTraining, Terminal]:
    """A running training, and a terminal that shows it."""
    training = start("waiting")
    look_until(training, lambda found: True)
    screen = terminal(*COMMAND, f"{training.pid}", *options)
    screen.read_until("py-spy dump --subprocesses")
    return training, screen


def test_it_ends_with_the_training_and_leaves_the_last_screen(
    start: Callable[[str], RunningTraining], terminal: Callable[..., Terminal]
) -> None:
    training, screen = watched(start, terminal)
    training.process.send_signal(signal.SIGKILL)
    assert training.process.wait(DEADLINE_S) == -signal.SIGKILL
    screen.read_until("train.py waiting")
    screen.read_until(f"The training has ended: process {training.pid} does not exist.")
    assert screen.end() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(
    start: Callable[[str], RunningTraining], terminal: Callable[..., Terminal]
) -> None:
    training, screen = watched(start, terminal)
    screen.process.send_signal(signal.SIGINT)
    assert screen.end() == 0
    assert termios.tcgetattr(screen.descriptor)[3] & termios.ECHO


# -- permissions to read and to write


def page_of(pid: int) -> str:
    folder = f"/proc/{pid}/fd"
    paths = [f"{folder}/{name}" for name in os.listdir(folder)]
    return next(path for path in paths if os.readlink(path).startswith("/memfd:loaderpool-page "))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_look(start: Callable[[str], RunningTraining]) -> None:
    training = start("waiting")
    look_until(training, lambda found: True)
    path = page_of(training.pid)
    become = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    open_it = f"""
try:
    os.open({path!r}, os.O_RDONLY)
    sys.exit("it could be opened")
except PermissionError:
    pass
"""
    said = top(training.pid, before=f"{become}\n{open_it}", status=1).stderr
    assert said == (f"Error: process {training.pid} cannot be read: Permission denied.\n")
    assert f"{training.pid}" not in top(before=become, status=1).stderr
