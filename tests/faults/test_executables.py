"""`sys.executable` is not Python: no frozen, serving or embedding program starts itself
endlessly.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import loaderpool as lp
from tests.support.child import ChildResult, run_child

MOST_STARTS = 6  # after this number of starts, a stand-in ends, whatever the program does


class StandIn:
    """An executable in place of Python, which counts its starts and then runs a script."""

    def __init__(self, folder: Path, does: str) -> None:
        self.path, self._count = folder / "app", folder / "starts"
        self.path.write_text(
            f"#!/bin/sh\necho >> {self._count}\n[ $(wc -l < {self._count}) -gt {MOST_STARTS} ] && exit 9\n{does}\n"
        )
        self.path.chmod(0o755)

    @property
    def starts(self) -> int:
        return len(self._count.read_text().splitlines()) if self._count.exists() else 0


def run_program(folder: Path, does: str, body: str, before: str = "") -> tuple[ChildResult, int]:
    """Run a program whose `sys.executable` is a stand-in, which may run the program again. Also
    return the number of starts.
    """
    app = StandIn(folder, does.format(python=sys.executable, program=folder / "program.py"))
    (folder / "program.py").write_text(
        f"import os, sys\nprint('program', flush=True)\n{before}\nsys.executable = {str(app.path)!r}\n"
        f"import loaderpool as lp\n{body}\n"
    )
    result = run_child(
        f"import runpy; runpy.run_path({str(folder / 'program.py')!r}, run_name='__main__')"
    )
    return result, app.starts


TWICE = """
with lp.Loader(range(40), lambda item: 2 * item, batch_size=4, workers=2) as loader:
    print(sum(int(batch.sum()) for batch in loader), loader.statistics().workers_start)
"""
AGAIN = "exec {python} {program} $*"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_executable_that_ends_is_started_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    app = StandIn(tmp_path, "exit 3")
    monkeypatch.setattr(sys, "executable", str(app.path))
    with pytest.raises(
        lp.PoolBrokenError, match=r"(?s)exit code 3.*sys\.executable is .*app"
    ) as caught:
        list(lp.Loader(range(40), batch_size=4, workers=workers))
    assert "workers=0" in str(caught.value)
    assert app.starts == 1


def test_an_executable_that_stays_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = StandIn(tmp_path, "exec sleep 60")
    monkeypatch.setattr(sys, "executable", str(app.path))
    monkeypatch.setattr("loaderpool.engine.pool._BEGINS_S", 0.5)
    expected = pytest.raises(
        lp.LoaderpoolWarning, match=r"has not begun for 0\.5 s.* sys\.executable is .*app"
    )
    with lp.Loader(range(40), batch_size=4, workers=1) as loader, expected:
        list(loader)
    assert app.starts == 1


@pytest.mark.parametrize("before", ["", "sys.frozen = True"], ids=["embedded", "frozen"])
def test_a_program_that_runs_again_becomes_the_supervisor(tmp_path: Path, before: str) -> None:
    result, starts = run_program(tmp_path, AGAIN, TWICE, before)
    assert result.check().stdout.split() == ["program", "program", "1560", "fork"]
    assert starts == 1


def test_a_program_that_runs_again_becomes_a_worker(tmp_path: Path) -> None:
    body = """
import threading
class Thread:
    def __reduce__(self):
        return begin, ()
def begin():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
thread = Thread()
with lp.Loader(range(40), lambda item: (thread, 2 * item)[1], batch_size=4, workers=2) as loader:
    print(sum(int(batch.sum()) for batch in loader), loader.statistics().workers_start)
"""
    result, starts = run_program(tmp_path, AGAIN, body, "sys.frozen = True")
    assert result.check().stdout.split()[-2:] == ["1560", "exec"]
    assert starts == 3


def test_a_program_that_runs_again_becomes_a_stream_process(tmp_path: Path) -> None:
    body = """
class Stream:
    def __iter__(self):
        return iter(range(40))
with lp.Loader(Stream(), batch_size=4, workers=1) as loader:
    print(sum(int(batch.sum()) for batch in loader))
    assert "the stream is read in a separate process" in loader.statistics().notes
"""
    result, starts = run_program(tmp_path, AGAIN, body, "sys.frozen = True")
    assert result.check().stdout.split()[-1] == "780"
    assert starts == 2


def test_a_frozen_program_gets_no_arguments_of_pythons(tmp_path: Path) -> None:
    result, _ = run_program(
        tmp_path, 'echo "got $*"\nexec {python} {program}', TWICE, "sys.frozen = True"
    )
    assert "got loaderpool-supervisor" in result.check().stdout.splitlines()


def test_a_loader_in_a_copy_of_the_program_is_an_error(tmp_path: Path) -> None:
    """The process looks like a child of loaderpool, and does not work as one."""
    does = "exec {python} -c \"exec(open('{program}').read())\""
    result, starts = run_program(tmp_path, does, TWICE)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if "PoolBrokenError: " in line]
    assert len(errors) == 2  # one of the copy, and one of the program itself
    assert "runs this program again" in errors[0] and "sys.executable is" in errors[1]
    assert starts == 1


def test_a_python_of_another_name_spawns_workers(tmp_path: Path) -> None:
    body = TWICE.replace("workers=2", "workers=lp.Pool(2, start='spawn')")
    result, starts = run_program(tmp_path, 'exec {python} "$@"', body)
    assert result.check().stdout.split() == ["program", "1560", "spawn"]
    assert starts >= 3


def test_without_workers_nothing_is_started(tmp_path: Path) -> None:
    body = TWICE.replace("workers=2", "workers=0")
    result, starts = run_program(tmp_path, AGAIN, body, "sys.frozen = True")
    assert result.check().stdout.split() == ["program", "1560", "None"]
    assert starts == 0


@pytest.mark.parametrize(
    ("before", "most"), [("sys.frozen = True", 0), ("", 1)], ids=["frozen", "embedded"]
)
def test_spawned_workers_need_python(tmp_path: Path, before: str, most: int) -> None:
    body = TWICE.replace("workers=2", "workers=lp.Pool(2, start='spawn')")
    result, starts = run_program(tmp_path, AGAIN, body, before)
    assert result.returncode == 1
    assert "PoolBrokenError: " in result.stderr and "workers=0" in result.stderr
    assert starts <= most


def test_programs_that_workers_start_may_have_loaders(tmp_path: Path) -> None:
    program = tmp_path / "inner.py"
    program.write_text(
        "import loaderpool as lp\n"
        "with lp.Loader(range(4), batch_size=4, workers=1) as loader:\n"
        "    print(int(next(iter(loader)).sum()))\n"
    )

    def run(item: int) -> int:
        import subprocess

        assert "LOADERPOOL_START" not in os.environ
        return int(
            subprocess.run([sys.executable, program], check=True, capture_output=True).stdout
        )

    with lp.Loader(range(2), run, batch_size=2, workers=1) as loader:
        assert next(iter(loader)).tolist() == [6, 6]


def test_a_site_that_imports_the_package_is_no_copy(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import loaderpool\n")
    run_child(
        """
        import loaderpool as lp
        with lp.Loader(range(8), batch_size=4, workers=1) as loader:
            assert len(list(loader)) == 2
        """,
        env={"PYTHONPATH": str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", "")},
    ).check()
