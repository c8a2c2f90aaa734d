"""`lp.share(make, name=...)`: processes of one machine share one copy, even if any of them dies."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.memory.holders import Name, job_key
from loaderpool.system import ranks
from tests.support.child import run_child
from tests.support.interpreters import Interpreter
from tests.support.notes import bytes_copied, bytes_shared
from tests.support.processes import is_alive, wait_until

REPOSITORY = str(Path(__file__).resolve().parents[2])
TIMEOUT_S = 60

# The script runs each line of its standard input, and prints the result.
SCRIPT = """
import os, subprocess, sys, threading, time
import loaderpool as lp

FOLDER, NAME = sys.argv[1:]
errors = []

class Record:
    def __init__(self, number):
        self.number = number

def calls():
    with open(f"{FOLDER}/calls", "a") as file:
        file.write("x")

def wait_for(name):
    while not os.path.exists(f"{FOLDER}/{name}"):
        time.sleep(0.01)

def make():
    calls()
    return {number: Record(number) for number in range(1000)}

def make_slowly():
    calls()
    wait_for("go")
    return [1, 2, 3]

def fail():
    calls()
    raise LookupError("no data")

def fork_in_c(seconds):
    # The same as a fork by C code: a process with this one's sockets, without Python's hooks.
    for number in os.listdir("/proc/self/fd"):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{number}"):
                os.set_inheritable(int(number), True)
        except OSError:
            pass
    subprocess.Popen(["sleep", str(seconds)], close_fds=False)

def share_again():
    return lp.share(make, name=NAME)

def fork(function):
    read, write = os.pipe()
    if not os.fork():
        os.write(write, outcome(function).encode())
        os._exit(0)
    return os.read(read, 10000).decode()

def outcome(function):
    try:
        return function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

print(os.getpid(), flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except SyntaxError:
        exec(line)
        print("done", flush=True)
"""


Start = Callable[..., Interpreter]
NAMES = itertools.count()


@pytest.fixture
def name() -> str:
    return f"test {os.getpid()} {next(NAMES)}"


@pytest.fixture
def start(tmp_path: Path, name: str) -> Iterator[Start]:
    """Function that starts an interpreter. All are killed after the test."""
    script, running = tmp_path / "script.py", list[Interpreter]()
    script.write_text(SCRIPT)

    def start(**env: str) -> Interpreter:
        running.append(Interpreter(script, str(tmp_path), name, **env))
        return running[-1]

    yield start
    for rank in running:
        rank.end()
    wait_until(lambda: not bound(name))


def calls(folder: Path) -> int:
    path = folder / "calls"
    return len(path.read_text()) if path.exists() else 0


def key_of(name: str) -> str:
    return job_key("share", ranks.job(), name)


def bound(name: str) -> list[str]:
    """Return the addresses of a name that are in use."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        return [line.split()[-1] for line in file if key_of(name) in line]


def is_waiting(name: str, count: int) -> Callable[[], bool]:
    """Return a condition: `count` processes wait for the lock, each with a connection to it."""

    def is_so() -> bool:
        return sum("/lock0" in address for address in bound(name)) >= 1 + count

    return is_so


SHARE = "value = lp.share(make, name=NAME)"
SLOWLY = "value = lp.share(make_slowly, name=NAME)"


# -- one copy


def test_four_processes_make_the_data_once(start: Start, tmp_path: Path) -> None:
    several = [start() for _ in range(4)]
    for rank in several:
        rank.begin(SHARE)
    assert [rank.answer() for rank in several] == ["done"] * 4
    assert calls(tmp_path) == 1
    for rank in several:
        assert rank.run("len(value), value[999].number, type(value[3]) is Record") == (
            "(1000, 999, True)"
        )
        assert rank.run("lp.share(make, name=NAME) is value") == "True"


VALUES: list[Any] = [
    np.arange(12.0).reshape(3, 4),
    np.arange(5).astype("M8[s]"),
    np.empty((0, 3), np.int8),
    np.array(7),
    np.zeros(3, [("a", "i4"), ("b", "f8")]),
    np.array(["one", "three"]),
    [{"a": 1}, "text", None],
    (1, 2, 3),
    [],
    {},
    {"a": [1, 2], ("b", 3): np.arange(20_000)},
    [np.full(30_000, number) for number in range(5)],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_keep_type_and_content(value: Any, name: str) -> None:
    shared = lp.share(lambda: value, name=name)
    assert type(shared) is type(lp.share(value))
    if isinstance(value, np.ndarray):
        assert (shared.dtype, shared.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(shared, value)
    elif isinstance(value, dict):
        np.testing.assert_equal(dict(shared), value)
    else:
        np.testing.assert_equal(list(shared), list(value))


def test_received_data_reach_workers_without_a_copy(start: Start) -> None:
    first, second = start(), start()
    line = "value = lp.share(lambda: __import__('numpy').arange(1 << 20), name=NAME)"
    assert first.run(line) == second.run(line) == "done"
    lines = (
        "loader = lp.Loader(range(100), lambda i: value[i], batch_size=10, workers=2)",
        "[int(batch.sum()) for batch in loader][:2]",
        "loader.statistics().notes",
        "loader.close()",
    )
    for rank in (second, first):
        results = [rank.run(each) for each in lines]
        assert results[1] == "[45, 145]"
        assert "8,388,608 bytes of arrays are shared with the workers and not copied" in results[2]
        assert "copied into" not in results[2]


def test_arrays_are_read_only_for_all(name: str) -> None:
    array = lp.share(lambda: np.arange(10), name=name)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_a_loader_takes_a_new_value_for_each_epoch(name: str) -> None:
    data = [lp.share(lambda: np.arange(100_000), name=name)]
    with lp.Loader(range(4), lambda i: data[0][i], batch_size=4, workers=1) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
        assert (bytes_shared(loader.statistics()), bytes_copied(loader.statistics())) == (
            800_000,
            0,
        )
        data[0] = lp.share(lambda: np.arange(100_000) + 1, name=f"{name} again")
        assert [batch.tolist() for batch in loader] == [[1, 2, 3, 4]]


def test_jobs_have_separate_names(start: Start, tmp_path: Path) -> None:
    jobs = {"TORCHELASTIC_RUN_ID": "1"}, {"TORCHELASTIC_RUN_ID": "2"}, {"MASTER_PORT": "3"}
    several = [start(**job) for job in jobs for _ in range(2)]
    assert [rank.run(SHARE) for rank in several] == ["done"] * 6
    assert calls(tmp_path) == 3


def test_a_script_and_its_spawned_processes_share(name: str) -> None:
    script = (
        "import multiprocessing, os, sys\n"
        "import loaderpool as lp\n"
        "class Record: number = 5\n"
        "def make():\n"
        "    print('made', flush=True)\n"
        "    return [Record()] * 3\n"
        "def rank(number):\n"
        f"    assert type(lp.share(make, name={name!r})[2]) is Record\n"
        "    print('shared', flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    value = lp.share(make, name={name!r})\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        pool.map(rank, range(2))\n"
    )
    assert sorted(run_child(script).check().stdout.split()) == ["made", "shared", "shared"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_with_the_script_that_starts_them(name: str, start: str) -> None:
    script = (
        "import loaderpool as lp\n"
        "def make():\n"
        "    return {number: 2 * number for number in range(8)}\n"
        "def double(number):\n"
        f"    return lp.share(make, name={name!r})[number]\n"
        "if __name__ == '__main__':\n"
        f"    value = lp.share(make, name={name!r})\n"
        f"    with lp.Pool(1, start={start!r}) as pool:\n"
        "        with lp.Loader(range(8), double, batch_size=8, workers=pool) as loader:\n"
        "            print(*next(iter(loader)).tolist())\n"
    )
    assert run_child(script).check().stdout.split() == ["0", "2", "4", "6", "8", "10", "12", "14"]


def test_the_maker_returns_the_memory_of_its_objects(start: Start) -> None:
    rank = start()
    assert rank.run("value = lp.share(lambda: [1], name=NAME + ' before')") == "done"
    before = own_bytes(rank.pid)
    # All objects are in malloc's heap, whose free memory does not return to the kernel by itself.
    line = "{number: os.urandom(1000) for number in range(60_000)}"
    assert rank.run(f"value = lp.share(lambda: {line}, name=NAME)") == "done"
    assert own_bytes(rank.pid) < before + 15e6


def own_bytes(pid: int) -> int:
    """Return the size of a process's private memory, without files."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss_Anon:"))


# -- the life of a value


def test_a_dropped_value_is_not_served(start: Start, tmp_path: Path, name: str) -> None:
    first, second = start(), start()
    assert first.run(SHARE) == "done"
    assert bound(name)
    assert first.run("del value") == "done"
    wait_until(lambda: not bound(name))
    maps = Path(f"/proc/{first.pid}/maps")
    assert "memfd:loaderpool-data" not in maps.read_text()
    wait_until(
        lambda: not any("memfd" in os.readlink(each) for each in links_of(first.pid)), TIMEOUT_S
    )
    assert second.run(SHARE) == "done" and calls(tmp_path) == 2


def links_of(pid: int) -> list[Path]:
    return [each for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()]


def test_a_part_of_an_array_keeps_it(name: str) -> None:
    count = itertools.count()

    def make() -> Any:
        return np.arange(10) + next(count)

    part = lp.share(make, name=name)[3:5]
    assert lp.share(make, name=name).tolist() == list(range(10)) and part.tolist() == [3, 4]
    del part
    assert lp.share(make, name=name)[0] == 1


def test_a_value_outlives_its_maker(start: Start, tmp_path: Path) -> None:
    first, second, third = start(), start(), start()
    assert first.run(SHARE) == second.run(SHARE) == "done"
    first.end()
    assert third.run(SHARE) == "done"
    second.end()
    assert third.run("value[5].number") == "5"
    assert start().run(SHARE) == "done"
    assert calls(tmp_path) == 1


def test_an_interpreter_that_exits_is_no_holder(start: Start, tmp_path: Path, name: str) -> None:
    first = start()
    # Runs last at exit, after the other functions that Python calls at exit.
    assert first.run("import atexit; atexit.register(wait_for, 'go')") == "done"
    assert first.run(SHARE) == "done"
    first.begin("sys.exit()")
    wait_until(lambda: not is_served(name))
    assert start().run(SHARE) == "done"
    assert calls(tmp_path) == 2
    (tmp_path / "go").touch()


def is_served(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return connection.connect_ex(address_of(name, "")) == 0


# -- deaths


def test_a_maker_that_is_killed_is_replaced(start: Start, tmp_path: Path, name: str) -> None:
    first, second, third = start(), start(), start()
    first.begin(SLOWLY)
    wait_until(lambda: calls(tmp_path) == 1)
    second.begin(SLOWLY)
    third.begin(SLOWLY)
    wait_until(is_waiting(name, 2))
    first.end()
    wait_until(lambda: calls(tmp_path) == 2)
    (tmp_path / "go").touch()
    assert second.answer() == third.answer() == "done"
    assert calls(tmp_path) == 2
    assert second.run("list(value)") == third.run("list(value)") == "[1, 2, 3]"


NOTE_WARNINGS = """
import warnings
warnings.showwarning = lambda message, *_: print(message, file=open(FOLDER + "/warnings", "a"))
""".strip()


@pytest.mark.parametrize("role", ["maker", "holder"])
def test_nobody_waits_for_a_stopped_process(
    start: Start, tmp_path: Path, name: str, role: str
) -> None:
    (tmp_path / "stopped_s").write_text("0.5")
    first, second, third = (start(LOADERPOOL_FAULTS=str(tmp_path)) for _ in range(3))
    for line in NOTE_WARNINGS.splitlines():
        second.run(line)
    first.begin(SLOWLY)
    wait_until(lambda: calls(tmp_path) == 1)
    if role == "holder":
        (tmp_path / "go").touch()
        assert first.answer() == "done"
    os.kill(first.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    try:
        assert second.run(SLOWLY) == third.run(SLOWLY) == "done"
        assert calls(tmp_path) == 2
        (warning,) = (tmp_path / "warnings").read_text().splitlines()
        assert f"kill -CONT {first.pid}" in warning
    finally:
        os.kill(first.pid, signal.SIGCONT)
    if role == "maker":
        assert first.answer() == "done"
    assert first.run("list(value)") == third.run("list(value)") == "[1, 2, 3]"


def test_another_holder_answers_for_a_stopped_one(start: Start, tmp_path: Path) -> None:
    first, second, third = start(), start(), start(PYTHONWARNINGS="error")
    for rank in (first, second):
        assert rank.run(SHARE) == "done"
    os.kill(first.pid, signal.SIGSTOP)
    assert third.run(SHARE) == "done" and calls(tmp_path) == 1


@pytest.mark.parametrize("when", ["while it makes", "after it"])
def test_a_fork_in_c_does_not_stand_for_its_parent(
    start: Start, tmp_path: Path, name: str, when: str
) -> None:
    first, second = start(), start()
    if when == "after it":
        assert first.run(SHARE) == "done"
        assert first.run("fork_in_c(30)") == "None"
    else:
        first.begin("lp.share(lambda: [fork_in_c(30), make_slowly()], name=NAME)")
        wait_until(lambda: calls(tmp_path) == 1)
    orphans = children_of(first.pid)
    try:
        assert orphans
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(first.pid))
        assert bound(name)  # the orphan keeps the address
        (tmp_path / "go").touch()
        assert second.run(SHARE) == "done"
        assert start().run(SHARE) == "done"
        assert calls(tmp_path) == 2
    finally:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, orphans)))


def test_a_lock_is_free_although_a_fork_in_c_has_it(
    start: Start, tmp_path: Path, name: str
) -> None:
    first, second = start(), start()
    first.begin("lp.share(lambda: [fork_in_c(30), make_slowly(), fail()], name=NAME)")
    wait_until(lambda: calls(tmp_path) == 1)
    second.begin("outcome(lambda: lp.share(make, name=NAME)[5].number)")
    wait_until(is_waiting(name, 1))
    (tmp_path / "go").touch()
    assert second.answer() == "5"
    orphans = children_of(first.pid)
    assert len(orphans) == 1
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, orphans)))


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def test_a_forked_child_keeps_the_value_only(start: Start, tmp_path: Path, name: str) -> None:
    first = start()
    assert first.run(SHARE) == "done"
    line = (
        "pid = os.fork() or "
        "os._exit((wait_for('go'), value[7].number + (lp.share(make, name=NAME) is value))[1])"
    )
    assert first.run(line) == "done"
    (child,) = children_of(first.pid)
    wait_until(lambda: not any("socket" in os.readlink(each) for each in links_of(child)))
    (tmp_path / "go").touch()
    assert first.run("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == "8"
    assert calls(tmp_path) == 1


def test_random_kills_leave_nothing(
    storm_module: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 31)
    script = (
        "import sys\n"
        f"sys.path.insert(0, {os.path.join(REPOSITORY, 'scripts')!r})\n"
        "from pathlib import Path\n"
        "from stress_storms.sharing import run_sharing\n"
        f"found = run_sharing(50, {seed}, 40, Path({str(tmp_path)!r}))\n"
        "print(found)\n"
        "assert found.kills >= 50 and found.makes > 3 and found.values > 20\n"
        "assert not found.mismatches, found.mismatches\n"
    )
    run_child(script, timeout_s=120).check()


# -- errors


def test_another_function_is_refused(start: Start) -> None:
    first, second = start(), start()
    assert first.run(SHARE) == "done"
    for rank in (first, second):
        answer = rank.run("outcome(lambda: lp.share(make_slowly, name=NAME))")
        assert "ArgumentError: share(name='test" in answer
        assert "make of " in answer and "make_slowly of " in answer
    answer = second.run("outcome(lambda: lp.share(lambda: make(), name=NAME))")
    assert "ArgumentError" in answer and "<lambda>" in answer


def test_captured_values_are_not_compared(name: str) -> None:
    def maker(number: int) -> Callable[[], list[int]]:
        return lambda: [number]

    value = lp.share(maker(1), name=name)
    assert lp.share(maker(2), name=name) is value


def test_an_error_of_make_is_raised_and_the_next_tries(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    assert "LookupError: no data" in first.run("outcome(lambda: lp.share(fail, name=NAME))")
    assert "LookupError: no data" in second.run("outcome(lambda: lp.share(fail, name=NAME))")
    assert first.run(SHARE) == second.run(SHARE) == "done"
    assert calls(tmp_path) == 3


def test_closed_descriptors_do_not_break_a_holder(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    assert first.run(SHARE) == "done"
    assert first.run("threading.excepthook = errors.append") == "done"
    assert first.run("os.closerange(3, 1000)") == "None"
    assert second.run(SHARE) == "done"  # wakes the thread that serves
    wait_until(lambda: first.run("threading.active_count()") == "1")
    assert first.run("errors") == "[]"
    assert first.run("value[999].number") == "999"


@pytest.mark.parametrize("call", ["share_again()", "fork(share_again)"])
def test_make_may_not_ask_for_its_own_name(start: Start, call: str) -> None:
    rank = start()
    answer = rank.run(f"outcome(lambda: lp.share(lambda: [{call}], name=NAME)[0])")
    assert "the function that makes the data asks for them itself" in answer
    assert rank.run(SHARE) == "done"


def test_a_maker_may_share_under_another_name(name: str) -> None:
    value = lp.share(lambda: [lp.share(lambda: [3], name=f"{name} inner")[0]], name=name)
    assert value[0] == 3


def test_a_changed_function_needs_its_earlier_result_deleted(name: str) -> None:
    value: Any = lp.share(lambda: [1], name=name)
    with pytest.raises(lp.ArgumentError, match="delete the earlier result first"):
        lp.share(lambda: [1, 2], name=name)
    del value
    assert len(lp.share(lambda: [1, 2], name=name)) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((lambda: [1],), {}),
        (([1],), {"name": "a"}),
        ((lambda: [1],), {"name": ""}),
        ((lambda: [1],), {"name": 5}),
        ((lambda path: [1],), {"name": "a"}),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, text: Any) -> None:
    with pytest.raises(lp.ArgumentError, match=r"share: |must be callable as data\(\)"):
        lp.share(*arguments, **text)


def test_a_class_that_a_process_lacks_is_named(start: Start, tmp_path: Path) -> None:
    first, second = start(), start()
    assert first.run(SHARE) == "done"
    assert second.run("del Record") == "done"
    answer = second.run("outcome(lambda: lp.share(make, name=NAME))")
    assert "UnpicklableError" in answer and "Record" in answer and "Define it before" in answer


# -- interrupts and threads


@pytest.mark.parametrize("role", ["maker", "waiter"])
def test_ctrl_c_ends_the_wait(start: Start, tmp_path: Path, name: str, role: str) -> None:
    first, second = start(), start()
    line = "outcome(lambda: lp.share(make_slowly, name=NAME))"
    first.begin(line)
    wait_until(lambda: calls(tmp_path) == 1)
    second.begin(line)
    wait_until(is_waiting(name, 1))
    hit, other = (first, second) if role == "maker" else (second, first)
    os.kill(hit.pid, signal.SIGINT)
    assert hit.answer() == "'KeyboardInterrupt: '"
    (tmp_path / "go").touch()
    assert "shared list of 3" in other.answer()
    assert hit.run("list(lp.share(make_slowly, name=NAME))") == "[1, 2, 3]"


def test_threads_of_a_process_make_the_data_once(name: str) -> None:
    count, values = itertools.count(), list[Any]()

    def make() -> list[int]:
        next(count)
        time.sleep(0.2)
        return [1]

    threads = [
        threading.Thread(target=lambda: values.append(lp.share(make, name=name))) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert next(count) == 1 and len(values) == 4 and len(set(map(id, values))) == 1


def test_only_a_daemon_thread_serves(start: Start) -> None:
    rank = start()
    assert rank.run("sorted(name for name in sys.modules if 'holders' in name)") == "[]"
    assert rank.run("lp.share and 'loaderpool.memory.holders' in sys.modules") == "False"
    assert rank.run(SHARE) == "done"
    assert rank.run("[each.daemon for each in threading.enumerate()[1:]]") == "[True]"
    assert rank.run("del value") == "done"
    wait_until(lambda: rank.run("threading.active_count()") == "1")


# -- strangers


def address_of(name: str, kind: str) -> bytes:
    return Name(key_of(name), "", "").address(kind, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("kind", ["", "lock"])
def test_a_process_of_another_user_is_refused(start: Start, name: str, kind: str) -> None:
    def listen(listener: socket.socket) -> None:
        listener.bind(address_of(name, kind))
        os.setresuid(65534, 65534, 65534)
        listener.listen(8)

    with as_child(listen) as pid:
        answer = start().run("outcome(lambda: lp.share(make, name=NAME))")
        assert f"): process {pid} of user 65534 listens at its address" in answer
        assert "or pass another name" in answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_gets_nothing(start: Start, name: str, tmp_path: Path) -> None:
    assert start().run(SHARE) == "done"

    def ask(connection: socket.socket) -> None:
        os.setresuid(65534, 65534, 65534)
        connection.connect(address_of(name, ""))
        answer = connection.recv(100)
        (tmp_path / "answer").write_bytes(answer) if answer else os._exit(0)

    with as_child(ask):
        pass
    assert not (tmp_path / "answer").exists()


@contextlib.contextmanager
def as_child(run: Callable[[socket.socket], None]) -> Iterator[int]:
    """Fork a child that calls `run` with a socket, and then waits to be killed. Yield its pid."""
    ready, is_ready = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            used = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            run(used)
            os.write(is_ready, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(is_ready)
    os.read(ready, 1)
    os.close(ready)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def can_make_namespaces() -> bool:
    with contextlib.suppress(OSError):
        return not subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode
    return False


@pytest.mark.parametrize("inside", ["holder", "newcomer"])
def test_a_process_of_another_pid_namespace_is_refused(
    start: Start, tmp_path: Path, name: str, inside: str
) -> None:
    if not can_make_namespaces():
        pytest.skip("this process may not make PID namespaces")
    outer = start()
    with subprocess.Popen(
        [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            sys.executable,
            tmp_path / "script.py",
            tmp_path,
            name,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": REPOSITORY},
    ) as inner:
        assert inner.stdin is not None and inner.stdout is not None
        assert int(inner.stdout.readline()) == 1
        line = "outcome(lambda: len(lp.share(make, name=NAME)))\n"

        def ask_inner() -> str:
            inner.stdin.write(line)
            inner.stdin.flush()
            return inner.stdout.readline()

        try:
            if inside == "newcomer":
                assert outer.run(SHARE) == "done"
                answer = ask_inner()
            else:
                inner.stdin.write(f"{SHARE}\n")
                inner.stdin.flush()
                assert inner.stdout.readline() == "done\n"
                answer = outer.run(line.strip())
            assert "): a process in another container (PID namespace)" in answer
        finally:
            inner.kill()
