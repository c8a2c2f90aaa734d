"""`loaderpool profile` as a user runs it: functions of which is known where their time goes, in real workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.tools.profiling.run import run_profile
from tests.support.child import ChildResult, run_command
from tests.unit.tools.test_profiling import check_speedscope

MODULE = r"""
import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import loaderpool as lp


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(5000))  # computes


def queued():
    # For how long this thread has waited for a CPU.
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def both(item):
    before, began = queued(), time.monotonic()
    compute(0.004)  # calls
    computed = time.monotonic()
    time.sleep(0.008)  # waits
    now = time.monotonic()
    with open(f"times-{os.getpid()}-{threading.get_ident()}.txt", "a") as file:  # how long it really took
        file.write(f"{computed - began} {now - computed} {queued() - before}\n")
    return np.float32(item)


def batch(items):
    return np.array([both(item) for item in items])


def fail(item):
    time.sleep(0.01)
    if item == 60:
        raise ValueError(f"no sample {item}")
    return item


def never(item):
    time.sleep(600)


def hold(item):
    return sum(range(10**11))


def generate():
    for item in range(10_000):
        yield both(item)


class Stream:
    def __iter__(self):
        yield from range(10_000)


pool = None


def in_threads(items):
    global pool
    pool = pool or ThreadPoolExecutor(2)
    return np.array(list(pool.map(both, items)))


ITEM = np.zeros((1000, 1000))


class Reading:
    def __len__(self):
        return 500

    def __getitem__(self, index):
        time.sleep(0.005)  # reads
        return ITEM


def make(**settings):
    return lp.Loader(range(5000), both, batch_size=4, **{"workers": 1, **settings})


make_local = functools.partial(make, workers=0)
make_threads = functools.partial(make, workers=1, worker_options=lp.WorkerOptions(threads=3))
make_cached = functools.partial(make, cache="memory")


def make_batches():
    return lp.Loader(range(5000), batch_fn=batch, batch_size=4, workers=1)


def make_pooled():
    return lp.Loader(range(5000), batch_fn=in_threads, batch_size=4, workers=1)


def make_generating():
    return lp.Loader.from_generator(generate, batch_size=4, copies=2, workers=2)


def make_stream():
    return lp.Loader(Stream(), both, batch_size=4, workers=2)


def make_in_c():
    return lp.Loader(Reading(), np.exp, batch_size=2, workers=1)


def make_failing():
    return lp.Loader(range(5000), fail, batch_size=4, workers=1)


def make_slow():
    return lp.Loader(range(5000), never, batch_size=4, workers=1)


def make_holding():
    return lp.Loader(range(5000), hold, batch_size=4, workers=1)
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., ChildResult]:
    """Runs `loaderpool ARGUMENTS` in the project's folder; what it started has to be gone with it."""
    pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")
    (tmp_path / "jobs.py").write_text(MODULE)

    def run(*arguments: str, before: str = "") -> ChildResult:
        return run_command(*arguments, cwd=tmp_path, before=before)

    return run


def line_number(text: str) -> int:
    return next(number for number, line in enumerate(MODULE.splitlines(), 1) if text in line)


def shares(data: dict[str, Any], text: str) -> tuple[float, float]:
    """Of a line its share of the time, and of its own time the share in which it waits."""
    number = next(number for number, line in enumerate(MODULE.splitlines(), 1) if text in line)
    (line,) = [each for each in data["lines"] if each["line"] == number]
    assert text in line["text"]
    return line["total_s"] / data["busy_s"], line["waiting_s"] / line["total_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    ["make", "make_local", "make_threads", "make_cached", "make_batches", "make_generating", "make_stream"],
)
def test_a_line_that_computes_and_one_that_waits_have_their_shares(
    command: Callable[..., ChildResult], tmp_path: Path, target: str
) -> None:
    result = command("profile", f"jobs:{target}", "--seconds", "3", "--json", "p.json").check()
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["error"] is None and data["looks"] > 100
    times = np.concatenate([np.loadtxt(path, ndmin=2) for path in tmp_path.glob("times-*.txt")])
    computed_s, waited_s, queued_s = times.sum(axis=0)
    # Where CPUs are short, beside other tests, the sampler waits for one, too, and the function for the sampler.
    inexact = 2 * queued_s / (computed_s + waited_s)
    computes, calls, waits = (shares(data, text) for text in ("# computes", "# calls", "# waits"))
    inside = calls[0] + waits[0]
    assert inside > 0.7  # the rest is the files, and loaderpool
    assert computes[0] == pytest.approx(calls[0], abs=0.1 + inexact)
    assert waits[1] > 0.9 - inexact
    if target != "make_threads":  # there they wait for one another, too
        assert calls[0] / inside == pytest.approx(computed_s / (computed_s + waited_s), abs=0.1 + inexact)
        assert computes[1] < 0.1 + inexact
    assert "time.sleep(0.008)  # waits" in result.stdout and "jobs.py:" in result.stdout
    assert ("without the loader's cache" in result.stdout) == (target == "make_cached")
    assert ("reading the stream" in result.stdout) == (target == "make_stream")


@pytest.mark.slow
def test_threads_of_the_functions_own_are_seen(command: Callable[..., ChildResult], tmp_path: Path) -> None:
    command("profile", "jobs:make_pooled", "--seconds", "2", "--json", "p.json").check()
    data = json.loads((tmp_path / "p.json").read_text())
    assert shares(data, "# waits")[0] > 0.2 and shares(data, "# calls")[0] > 0.1
    assert data["busy_s"] > 1.5 * data["elapsed_s"]  # of the worker's thread, and of two more


@pytest.mark.slow
def test_files_are_written_and_workers_may_be_others(command: Callable[..., ChildResult], tmp_path: Path) -> None:
    pytest.importorskip("pyinstrument", reason="pip install 'loaderpool[cli]'")
    result = command(
        "profile", "jobs:make", "--seconds", "1", "--workers", "1", "--interval", "0.005", "--top", "1",
        "--html", "p.html", "--speedscope", "p.json", "--json", "-",
    ).check()  # fmt: skip
    data = json.loads(result.stdout)
    assert (data["command"], data["workers"], data["interval_s"]) == ("profile", 1, 0.005)
    stacks = json.loads((tmp_path / "p.json").read_text())
    check_speedscope(stacks)
    names = [frame["name"] for frame in stacks["shared"]["frames"]]
    assert any(name.startswith("both:") and "time.sleep(0.008)" in name for name in names)
    assert not any("worker/" in frame.get("file", "") for frame in stacks["shared"]["frames"])
    page = (tmp_path / "p.html").read_text()
    assert "jobs:make" in page and "time.sleep(0.008)" in page
    rows = [line for line in result.stderr.splitlines() if "jobs.py:" in line]
    assert len(rows) == 2  # a line and a function


@pytest.mark.slow
def test_a_function_in_c_and_the_items_it_reads(command: Callable[..., ChildResult], tmp_path: Path) -> None:
    command("profile", "jobs:make_in_c", "--seconds", "2", "--json", "p.json").check()
    data = json.loads((tmp_path / "p.json").read_text())
    assert shares(data, "# reads")[1] > 0.5
    (spent,) = [each for each in data["functions"] if each["function"] == "numpy.exp"]
    assert not spent["file"] and spent["computing_s"] > 0.5 * spent["total_s"] > 0.02 * data["busy_s"]


def test_samples_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands around the function, and looking draws from no generator that it may use."""

    def noisy(item: int, rng: np.random.Generator) -> Any:
        import random

        return np.array([random.random(), np.random.random(), rng.random(), item])

    from loaderpool.tools.profiling import run

    seen: list[np.ndarray] = []
    original = run._Window._take

    def take(window: Any) -> None:
        class Kept:
            def __init__(self, loader: lp.Loader) -> None:
                self.loader = loader

            def __iter__(self) -> Any:
                for batch in self.loader:
                    seen.append(np.array(batch))
                    yield batch

            def __getattr__(self, name: str) -> Any:
                return getattr(self.loader, name)

        window._loader = Kept(window._loader)
        original(window)

    monkeypatch.setattr(run._Window, "_take", take)
    with lp.Loader(range(40), noisy, batch_size=4, workers=2, shuffle=True, seed=3) as loader:
        plain = [np.array(batch) for batch in loader]
        run_profile(loader, 0.3, 0.002)
    assert len(seen) >= 10
    np.testing.assert_array_equal(np.stack(seen[:10]), np.stack(plain))


# -- what goes wrong


def test_a_function_that_raises_ends_it_with_what_was_seen_before(command: Callable[..., ChildResult]) -> None:
    result = command("profile", "jobs:make_failing", "--seconds", "60")
    assert result.returncode == 1
    assert "time.sleep(0.01)" in result.stdout and "with the error below" in result.stdout
    assert "ValueError: no sample 60" in result.stderr and "source index 60" in result.stderr
    assert "loaderpool/tools" not in result.stderr


def test_a_call_that_lasts_longer_than_all_the_time_is_seen(command: Callable[..., ChildResult]) -> None:
    result = command("profile", "jobs:make_slow", "--seconds", "0.7").check()
    (row,) = [line for line in result.stdout.splitlines() if "time.sleep(600)" in line]
    assert row.split()[:4] == ["100%", "100%", "0%", "100%"]
    assert "no batch was finished" in result.stdout


def test_a_call_that_never_lets_go_of_the_interpreter_is_told(command: Callable[..., ChildResult]) -> None:
    result = command("profile", "jobs:make_holding", "--seconds", "0.5")
    assert result.returncode == 1
    assert "nothing was seen in 500 ms" in result.stderr and "GIL" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seconds", "0"], "not a positive number"),
        (["--workers", "-1"], "--workers"),
        (["--workers", "x"], "'x' is not a valid whole number."),
        (["--interval", "0"], "not a positive number"),
        (["--interval", "1e-9"], "not within 0.001 and 1 seconds"),
        (["--top", "0"], "--top"),
        (["--html", "no_such_folder/p.html"], "no_such_folder"),
        (["--speedscope", "."], "is a directory"),
        (["--json", "no_such_folder/p.json"], "no_such_folder"),
    ],
)
def test_a_wrong_option_is_one_line(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")
    from loaderpool.tools.cli import main

    assert main(["profile", "no_such_module:make", *options]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", ["--html", "--speedscope", "--json"])
def test_a_file_that_cannot_be_written_is_one_line(command: Callable[..., ChildResult], option: str) -> None:
    result = command("profile", "jobs:make", "--seconds", "0.5", option, "/proc/p")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: /proc/p cannot be written: No such file or directory."


def test_a_page_without_its_library_says_what_to_install(command: Callable[..., ChildResult], tmp_path: Path) -> None:
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'pyinstrument' else f(n)"
    result = command("profile", "jobs:make", "--html", "p.html", before=hide)
    assert result.returncode == 2
    assert "pip install 'loaderpool[cli]'" in result.stderr.splitlines()[-1]


def test_a_target_that_is_not_there_is_told(command: Callable[..., ChildResult]) -> None:
    result = command("profile", "jobs:mke")
    assert result.returncode == 2 and "Did you mean make" in result.stderr


def test_who_cannot_be_told_how_far_it_is_ends_it() -> None:
    """A terminal that is gone, or a pipe without a reader."""

    def gone(fraction: float) -> None:
        raise BrokenPipeError

    with lp.Loader(range(10**6), np.float32, batch_size=4, workers=1) as loader, pytest.raises(BrokenPipeError):
        run_profile(loader, 1.0, 0.01, on_progress=gone)


def test_looking_in_this_process_leaves_no_descriptor() -> None:
    def slow(item: int) -> np.float32:
        time.sleep(0.001)
        return np.float32(item)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with lp.Loader(range(10**6), slow, batch_size=4, workers=0) as loader:
        before = descriptors()
        assert run_profile(loader, 0.3, 0.01).profile.looks
        until_s = time.monotonic() + 20
        while descriptors() > before and time.monotonic() < until_s:  # its thread ends by itself
            time.sleep(0.01)
        assert descriptors() == before
