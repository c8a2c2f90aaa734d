"""The harness itself finds leaks, shows hangs, and accepts anything else."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import child, leaks, processes
from tests.support.child import ChildHungError, ChildLeftProcessesError, run_child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the harness reads /proc"),
]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


# -- children


def test_a_hanging_child_is_dumped_and_ended_with_all_it_started() -> None:
    with pytest.raises(ChildHungError) as caught:
        run_child(
            """
            import subprocess, sys, threading, time
            def waits_in_a_thread():
                time.sleep(60)
            def waits_in_main():
                time.sleep(60)
            threading.Thread(target=waits_in_a_thread).start()
            code = "import time\\ndef waits_in_grandchild(): time.sleep(60)\\nprint()\\nwaits_in_grandchild()"
            p = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, start_new_session=True)
            p.stdout.readline()
            print("pid", p.pid)
            waits_in_main()
            """,
            timeout_s=3.0,
        )
    message = str(caught.value)
    for name in (
        "timeout_s=3",
        "waits_in_main",
        "waits_in_a_thread",
        "waits_in_grandchild",
        "pid ",
    ):
        assert name in message
    grandchild = int(message.split("pid ")[-1].split()[0])
    assert processes.wait_gone([grandchild], 5.0) == []


def test_a_child_that_leaves_an_orphan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.2)
    with pytest.raises(ChildLeftProcessesError, match=r"time\.sleep\(60\)") as caught:
        run_child(
            f"import subprocess; p = subprocess.Popen({SLEEPER!r}, start_new_session=True); print('pid', p.pid)"
        )
    orphan = int(str(caught.value).split("pid ")[-1].split()[0])
    assert processes.wait_gone([orphan], 5.0) == []


# -- leaks


def leaked(block: Callable[[], object]) -> str:
    """Return the guard's message about code that leaves something behind."""
    with pytest.raises(AssertionError, match="left behind") as caught, leaks.guard(0.1):
        block()
    return str(caught.value)


def test_the_guard_finds_a_child_and_ends_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    message = leaked(lambda: started.append(subprocess.Popen(SLEEPER)))
    assert f"process {started[0].pid}, parent {os.getpid()}" in message
    assert not processes.is_alive(started[0].pid)
    started[0].wait()


def test_uncollected_garbage_is_not_a_leak() -> None:
    with leaks.guard(0):
        descriptor = os.memfd_create("loaderpool-test")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        cycle: list[object] = [mmap.mmap(descriptor, mmap.PAGESIZE)]
        os.close(descriptor)
        cycle.append(cycle)
        del cycle


def test_the_guard_finds_descriptors() -> None:
    opened: list[int] = []

    def open_some() -> None:
        opened.extend([*os.pipe(), os.memfd_create("other"), os.pidfd_open(os.getpid())])
        opened.extend(end.detach() for end in socket.socketpair())

    told = leaked(open_some)
    assert all(
        f"descriptor of {kind}" in told
        for kind in ("pipe:", "socket:", "/memfd:other", "anon_inode:[pidfd]")
    ), told
    for descriptor in opened:
        os.close(descriptor)


def test_marker_and_directory_each_fail_a_leaking_test(tmp_path: Path) -> None:
    head = "import os\nimport pytest\nopened = []\n"
    leak = "(): opened.append(os.pipe())\n"
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import _guard_leaks\nfrom tests.support import leaks\nleaks.GRACE_S = 0.1\n"
    )
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "test_a.py").write_text(
        f"{head}def test_directory{leak}@pytest.mark.may_leak('shown')\ndef test_allowed{leak}"
    )
    (tmp_path / "test_b.py").write_text(
        f"{head}@pytest.mark.no_leaks\ndef test_marker{leak}def test_unguarded{leak}"
    )
    report = run_child(
        "import sys, pytest; sys.exit(pytest.main(['-rA', '--rootdir', '.']))", cwd=tmp_path
    ).stdout
    failed = set(re.findall(r"^ERROR \S+::(\w+)", report, re.MULTILINE))
    assert failed == {"test_directory", "test_marker"}
    assert "4 passed" in report
