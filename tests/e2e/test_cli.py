"""The command line as a user runs it: real loaders, real workers, real files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.child import ChildResult, run_command

pytest.importorskip("rich", reason="pip install 'loaderpool[cli]'")

MODULE = """
import os
import signal
import time

import numpy as np

import loaderpool as lp


def wait(i):
    time.sleep(0.005)
    return np.full(4, i, np.float32)


def fail(i):
    raise ValueError(f"no sample {i}")


def interrupt(i):
    if i == 3:
        os.kill(int(os.environ["INTERRUPT_PID"]), signal.SIGINT)
        time.sleep(0.2)
    return i


def make_waiting():
    return lp.Loader(range(50), wait, batch_size=4, workers=2)


def make_cached():
    return lp.Loader(range(50), wait, batch_size=4, workers=2, cache="kept")


def make_streaming():
    return lp.Loader(map(wait, range(100_000)), batch_size=4, workers=2)


def make_short():
    return lp.Loader(map(wait, range(8)), batch_size=4, workers=2)


def make_failing():
    return lp.Loader(range(50), fail, batch_size=4, workers=1)


def make_interrupting():
    return lp.Loader(range(50), interrupt, batch_size=1, workers=1)


def make_with(path):
    return make_waiting()


def make_wrong():
    return [1, 2]


def make_raising():
    return undefined_name


def make_exiting():
    raise SystemExit(7)


a_number = 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a module of loaders, and modules that cannot be imported."""
    (tmp_path / "jobs.py").write_text(MODULE)
    (tmp_path / "needs_other.py").write_text("import no_such_library\n")
    (tmp_path / "trains.py").write_text(
        "import loaderpool as lp\nloader = lp.Loader(range(8), batch_size=4, workers=0)\nfor _ in loader: pass\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script.py FILE')\n")
    return tmp_path


@pytest.fixture
def command(project: Path) -> Callable[..., ChildResult]:
    """Runs `loaderpool ARGUMENTS` in the project's folder, and checks that all its processes have
    ended.
    """

    def run(*arguments: str, before: str = "") -> ChildResult:
        return run_command(*arguments, cwd=project, before=before)

    return run


@pytest.fixture
def main_here(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs `main` in this process, if it ends before any worker starts. Returns the status and
    stderr.
    """
    from loaderpool.tools.cli import main

    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)

    def run(*arguments: str) -> tuple[int, str]:
        return main(arguments), capsys.readouterr().err

    yield run
    for name in {path.stem for path in project.glob("*.py")} - modules:
        sys.modules.pop(name, None)


# -- tune


def test_tune_measures_recommends_and_writes_files(
    command: Callable[..., ChildResult], project: Path
) -> None:
    result = command(
        "tune", "jobs:make_waiting", "--seconds", "0.6", "--workers", "0,2", "--json", "r.json"
    ).check()  # fmt: skip
    data = json.loads((project / "r.json").read_text())
    none, two = data["measurements"]
    assert [each["setting"]["workers"] for each in (none, two)] == [0, 2]
    # Two workers that sleep are twice as fast as one process, on any number of CPUs.
    assert none["samples_per_s"] < 1 / 0.005
    assert two["samples_per_s"] > 1.4 * none["samples_per_s"]
    assert two["bytes_per_s"] == pytest.approx(16 * two["samples_per_s"])
    assert (data["recommendation"]["workers"], data["recommendation"]["arguments"]) == (
        2,
        "workers=2",
    )
    assert f"Use workers=2: {data['recommendation']['reason']}." in result.stdout.splitlines()
    assert [f"round {each} of 2, workers=2: " in result.stderr for each in (1, 2)] == [True, True]


@pytest.mark.slow
def test_tune_measures_threads_with_each_number_of_workers(
    command: Callable[..., ChildResult], project: Path
) -> None:
    result = command(
        "tune", "jobs:make_waiting", "--seconds", "0.6", "--workers", "0,1", "--threads", "1,4", "--json", "r.json"
    ).check()  # fmt: skip
    data = json.loads((project / "r.json").read_text())
    settings = [
        (each["setting"]["workers"], each["setting"]["threads"]) for each in data["measurements"]
    ]
    assert settings == [(0, 1), (1, 1), (1, 4)]
    none, one, four = (each["samples_per_s"] for each in data["measurements"])
    assert max(none, one) < 1 / 0.005 < 1.4 / 0.005 < four
    advice = f"Use workers=1, threads=4: {data['recommendation']['reason']}."
    assert advice in result.stdout.splitlines()


def test_tune_leaves_a_cache_out(command: Callable[..., ChildResult], project: Path) -> None:
    """With a cache, fifty samples would be cached after the first window, and all later windows
    would be fast.
    """
    result = command(
        "tune", "jobs:make_cached", "--seconds", "0.6", "--workers", "0,1", "--json", "r.json"
    ).check()
    rates = json.loads((project / "r.json").read_text())["measurements"]
    assert all(each["samples_per_s"] < 1 / 0.005 for each in rates)
    assert "Note: measured without the loader's cache" in result.stdout


# -- errors


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [
        ("trains:loader", 1, "iterates a loader"),
        ("trains:loader", 1, "Put the code that trains under `if __name__ == '__main__':`"),
        ("trains:loader", 1, 'trains.py", line 3'),
        ("jobs", 2, "package.module:name"),
        ("jobs.py", 2, "without .py"),
        ("jobs.py:make_waiting", 2, "without .py"),
        ("./my-jobs.py:make", 2, "package.module:name"),
        ("jobs:", 2, "package.module:name"),
        ("missing:make", 1, "ModuleNotFoundError: No module named 'missing'"),
        (
            "jobs:make_waitin",
            2,
            "was not found: module jobs has no 'make_waitin'. Did you mean make_waiting?",
        ),
        ("jobs:a_number", 2, "got int"),
        ("jobs:make_wrong", 2, "or a function without arguments that returns one, got list"),
        ("jobs:make_with", 1, "make_with() missing 1 required positional argument: 'path'"),
        ("jobs:make_raising", 1, "return undefined_name"),
        ("jobs:make_exiting", 1, "SystemExit: 7"),
        ("needs_other:make", 1, "import no_such_library"),
        ("broken:make", 1, "SyntaxError"),
        ("script:make", 1, "usage: script.py FILE"),
    ],
)
def test_a_wrong_target_is_explained(
    main_here: Callable[..., tuple[int, str]], target: str, status: int, says: str
) -> None:
    code, text = main_here("tune", target)
    assert code == status
    assert says in text
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    assert not any(
        "loaderpool/" in frame or "importlib" in frame for frame in frames
    )  # only the user's frames


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seconds", "0"], "not in the range 0<x<=86400"),
        (["--seconds", "inf"], "not in the range"),
        (["--seconds", "nan"], "nan is no number of seconds"),
        (["--seconds", "soon"], "'soon' is not a valid number."),
        (["--workers", "1,x"], "'x' is not a valid whole number. Write numbers with commas"),
        (["--workers", "1,99999"], "99999 is not in the range 0<=x<=1024"),
        (["--threads", "0,4"], "0 is not in the range 1<=x<=256"),
        (["--json", "no_such_folder/r.json"], "the folder 'no_such_folder' does not exist."),
        (["--json", "/nope/x/r.json"], "the folder '/nope/x' does not exist."),
        (["--json", "."], "'.' is a folder: name a file, such as tune.json."),
        (["--json", "-"], "must end in .json"),
        (["--rounds"], "No such option"),
    ],
)
def test_a_wrong_option_fails_before_anything_is_imported(
    main_here: Callable[..., tuple[int, str]], options: list[str], says: str
) -> None:
    code, text = main_here("tune", "script:make", *options)
    assert code == 2
    assert says in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tun", "No such command 'tun'. Did you mean 'tune'?"),
        ("xyz", "Write one of doctor, profile, replay, top, trace, tune."),
    ],
)
def test_an_unknown_command_says_which_there_are(
    main_here: Callable[..., tuple[int, str]], name: str, says: str
) -> None:
    code, text = main_here(name)
    assert code == 2
    assert says in text


def test_a_function_is_called_again_for_each_setting_of_a_stream(
    command: Callable[..., ChildResult],
) -> None:
    result = command("tune", "jobs:make_streaming", "--seconds", "0.4", "--workers", "0,1").check()
    assert [f"round {each} of 2, workers=1: " in result.stderr for each in (1, 2)] == [True, True]


def test_a_stream_that_is_too_short_to_measure_says_so(
    main_here: Callable[..., tuple[int, str]],
) -> None:
    code, text = main_here("tune", "jobs:make_short", "--seconds", "5", "--workers", "0")
    assert code == 1
    assert "source is a map, which ended after 2 batches, before the measurement did" in text


def test_a_loader_of_an_iterator_is_to_be_made_by_a_function(
    main_here: Callable[..., tuple[int, str]], project: Path
) -> None:
    (project / "stream.py").write_text(
        "import loaderpool as lp\nloader = lp.Loader(iter(range(9)), workers=0)\n"
    )
    code, text = main_here("tune", "stream:loader")
    assert code == 2
    assert "TARGET 'stream:loader' reads a range_iterator, which can be read only once" in text
    assert "Name a function that returns the loader" in text


def test_a_function_that_fails_on_a_sample_shows_its_error_and_where(
    command: Callable[..., ChildResult],
) -> None:
    result = command("tune", "jobs:make_failing", "--workers", "1")
    assert result.returncode == 1
    assert "ValueError: no sample 0" in result.stderr and "in fail" in result.stderr
    assert "run `loaderpool replay jobs:make_failing --index 0 --epoch 0`" in result.stderr
    assert "loaderpool/tools" not in result.stderr


@pytest.mark.parametrize("workers", ["0,1", "1,2"])
def test_ctrl_c_ends_cleanly(command: Callable[..., ChildResult], workers: str) -> None:
    # The function sends the signal itself, so that it arrives during a measurement.
    result = command(
        "tune", "jobs:make_interrupting", "--seconds", "60", "--workers", workers,
        before="os.environ['INTERRUPT_PID'] = str(os.getpid())",
    )  # fmt: skip
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "Interrupted."


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_missing_extra_is_one_line_of_advice(
    command: Callable[..., ChildResult], missing: str
) -> None:
    result = command("--version", before=f"sys.modules[{missing!r}] = None")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert missing in line and "pip install 'loaderpool[cli]'" in line


# -- help


def test_help_and_version(
    main_here: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    import loaderpool
    from loaderpool.tools.cli import main

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"loaderpool {loaderpool.__version__}\n"
    for arguments in (["--help"], ["tune", "--help"], ["profile", "-h"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert (
            "Example" in text
            and f"  loaderpool {arguments[0].replace('--help', 'tune')} train:" in text
        )
