"""The harness itself: a leak is found, a hang is shown, and what is no leak passes."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import child, leaks, processes, tensorflow_runtime
from tests.support.child import ChildHungError, ChildLeftProcessesError, run_child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the harness reads /proc"),
]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER)
    yield process
    process.kill()
    process.wait()


# -- processes


def test_descendants_include_grandchildren_in_a_session_of_their_own() -> None:
    code = f"import subprocess as s; p = s.Popen({SLEEPER!r}, start_new_session=True); print(p.pid); p.wait()"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        found = processes.descendants(os.getpid())
        processes.end_all([grandchild, parent.pid])
    assert {parent.pid, grandchild} <= set(found)
    assert os.getpid() not in found
    assert processes.wait_gone([grandchild, parent.pid], 5.0) == []


def test_a_zombie_is_not_alive_and_wait_gone_names_those_that_are(sleeper: subprocess.Popen[bytes]) -> None:
    assert processes.is_alive(sleeper.pid)
    assert processes.wait_gone([sleeper.pid], 0.05) == [sleeper.pid]
    sleeper.kill()  # not reaped: a zombie
    assert processes.wait_gone([sleeper.pid], 5.0) == []
    assert sleeper.pid in processes.parents()
    assert "state Z" in processes.describe(sleeper.pid)


# -- children


def test_a_child_runs_a_script_with_its_output_status_and_environment() -> None:
    result = run_child(
        """
        import os, sys
        print("out", os.environ["SEEN"], "GONE" in os.environ, __file__.endswith(".py"))
        print("err", file=sys.stderr)
        sys.exit(3)
        """,
        env={"SEEN": "yes", "GONE": None},
    )
    assert (result.returncode, result.stdout, result.stderr) == (3, "out yes False True\n", "err\n")
    with pytest.raises(AssertionError, match="status 3"):
        result.check()


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
    for name in ("timeout_s=3", "waits_in_main", "waits_in_a_thread", "waits_in_grandchild", "pid "):
        assert name in message
    grandchild = int(message.split("pid ")[-1].split()[0])
    assert processes.wait_gone([grandchild], 5.0) == []


def test_a_child_that_leaves_an_orphan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.2)
    with pytest.raises(ChildLeftProcessesError, match=r"time\.sleep\(60\)") as caught:
        run_child(f"import subprocess; p = subprocess.Popen({SLEEPER!r}, start_new_session=True); print('pid', p.pid)")
    orphan = int(str(caught.value).split("pid ")[-1].split()[0])
    assert processes.wait_gone([orphan], 5.0) == []


# -- children that are forks of a process which has imported a module

SLOW = "xml.dom.minidom"  # stands for one that is slow to import


def test_a_fork_finds_the_module_imported_and_all_else_as_a_script_does(tmp_path: Path) -> None:
    code = f"""
        import atexit, os, sys, threading
        print({SLOW!r} in sys.modules, "loaderpool" in sys.modules, [name for name in globals() if name[:2] != "__"])
        print(__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv == [__file__] == sys.orig_argv[1:])
        print(sys.path[0] == os.path.dirname(__file__), os.environ["SEEN"], os.getcwd(), os.getsid(0) == os.getpid())
        print("err", file=sys.stderr)
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:4], os.read(0, 1))
        atexit.register(print, "the end")
        threading.Timer(0.1, print, ["a thread"]).start()
        sys.exit(3)
        """
    how: dict[str, Any] = {"env": {"SEEN": "yes"}, "cwd": tmp_path}
    shown = "{} False ['atexit', 'os', 'sys', 'threading']\n__main__ True True\nTrue yes {} True\n"
    shown += "[0, 1, 2, 3] b''\na thread\nthe end\n"  # 3 lists the directory
    for result, is_imported in ((run_child(code, imported=SLOW, **how), True), (run_child(code, **how), False)):
        assert (result.returncode, result.stderr) == (3, "err\n")
        assert result.stdout == shown.format(is_imported, tmp_path)


@pytest.mark.no_leaks
@pytest.mark.parametrize("end", ["pass", "os._exit(0)"])
def test_a_server_of_forks_is_nobodys_child_and_ends_with_those_who_ask_it(end: str) -> None:
    code = f"""
        import os
        from tests.support.child import run_child
        from tests.support.processes import descendants
        server = int(run_child("import os; print(os.getppid())", imported={SLOW!r}).check().stdout)
        print(server, server in descendants(os.getpid()), flush=True)
        {end}
        """
    server, is_child = run_child(code, env={"PYTHONWARNINGS": "error"}).check().stdout.split()
    assert is_child == "False" and processes.wait_gone([int(server)], 5.0) == []


# -- leaks


def leaked(block: Callable[[], object], grace_s: float = 0.1) -> str:
    """What the guard says about a block that leaves something behind."""
    with pytest.raises(AssertionError, match="left behind") as caught, leaks.guard(grace_s):
        block()
    return str(caught.value)


def test_the_guard_finds_a_child_and_ends_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    message = leaked(lambda: started.append(subprocess.Popen(SLEEPER)))
    assert f"process {started[0].pid}, parent {os.getpid()}" in message
    assert not processes.is_alive(started[0].pid)
    started[0].wait()


def test_the_guard_finds_an_orphan_in_a_session_of_its_own() -> None:
    code = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdout=-3, start_new_session=True).pid)"
    pids: list[int] = []
    message = leaked(lambda: pids.append(int(subprocess.check_output([sys.executable, "-c", code]))))
    assert f"process {pids[0]}," in message
    assert processes.wait_gone(pids, 5.0) == []


def test_the_guard_finds_a_thread() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten", daemon=True)
    assert "thread 'forgotten'" in leaked(thread.start)
    release.set()
    thread.join()


@pytest.mark.parametrize("kind", ["pipe", "socket", "memfd", "pidfd"])
def test_the_guard_finds_a_descriptor(kind: str) -> None:
    opened: list[int] = []

    def open_one() -> None:
        if kind == "pipe":
            opened.extend(os.pipe())
        elif kind == "socket":
            opened.extend(end.detach() for end in socket.socketpair())
        elif kind == "memfd":
            opened.append(os.memfd_create("other"))
        else:
            opened.append(os.pidfd_open(os.getpid()))

    assert kind in leaked(open_one)
    for descriptor in opened:
        os.close(descriptor)


def test_the_guard_finds_a_mapping_whose_descriptor_is_closed() -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # mmap.mmap would keep a duplicate of the descriptor
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    addresses: list[int] = []

    def map_one() -> None:
        descriptor = os.memfd_create("loaderpool-test")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        addresses.append(libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0))
        os.close(descriptor)

    message = leaked(map_one)
    assert "mapping of /memfd:loaderpool-test" in message
    assert "descriptor" not in message
    assert libc.munmap(addresses[0], mmap.PAGESIZE) == 0


def test_garbage_and_things_that_end_a_moment_later_are_no_leak() -> None:
    class Holder:
        def __init__(self) -> None:
            self.me = self  # a cycle: only the collector frees it
            self.sockets = [socket.socket(fileno=end.detach()) for end in socket.socketpair()]

        def __del__(self) -> None:
            for end in self.sockets:
                end.close()

    def leave_garbage() -> None:
        Holder()

    with leaks.guard(3.0):
        leave_garbage()
        thread = threading.Timer(0.2, int)
        thread.start()


def test_fixture_marker_and_directory_each_fail_a_leaking_test(tmp_path: Path) -> None:
    head = "import os\nimport pytest\nopened = []\n"
    leak = "(): opened.append(os.pipe())\n"
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import _guard_leaks, no_leaks\nfrom tests.support import leaks\nleaks.GRACE_S = 0.1\n"
    )
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e" / "test_a.py").write_text(
        f"{head}def test_directory{leak}@pytest.mark.may_leak('shown')\ndef test_allowed{leak}"
    )
    (tmp_path / "test_b.py").write_text(
        f"{head}@pytest.mark.usefixtures('no_leaks')\ndef test_fixture{leak}"
        f"@pytest.mark.no_leaks\ndef test_marker{leak}def test_unguarded{leak}"
    )
    report = run_child("import sys, pytest; sys.exit(pytest.main(['-rA', '--rootdir', '.']))", cwd=tmp_path).stdout
    failed = set(re.findall(r"^ERROR \S+::(\w+)", report, re.MULTILINE))
    assert failed == {"test_directory", "test_fixture", "test_marker"}
    assert "5 passed" in report


# -- Ctrl-C


# -- TensorFlow


@pytest.mark.corner
def test_tensorflow_has_several_cpu_devices(tf: Any) -> None:
    assert len(tf.config.list_logical_devices("CPU")) == tensorflow_runtime.LOGICAL_CPUS
    with tf.device("/cpu:1"):
        assert tf.identity(tf.zeros(2)).device.endswith("CPU:1")


@pytest.mark.corner
def test_tensorflow_lets_go_of_arrays_when_told(tf: Any) -> None:
    kept: list[weakref.ref[Any]] = []

    def make() -> Any:
        buffer = np.zeros(4096 + 64, np.uint8)
        start = -buffer.ctypes.data % 64  # so aligned, TensorFlow aliases it instead of copying
        kept.append(weakref.ref(buffer))
        return buffer[start : start + 4096]

    count = tf.function(lambda: tf.size(tf.numpy_function(make, [], tf.uint8)))
    held = count()  # the array's own tensor died inside; no eager tensor has died since
    assert kept[0]() is not None
    tensorflow_runtime.let_go_of_arrays()
    assert kept[0]() is None
    assert int(held) == 4096
