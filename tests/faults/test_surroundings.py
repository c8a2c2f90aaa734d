"""Processes that start later have the directory and environment with which the pool started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.child import run_child

WITHOUT_MEMFD = Path(__file__).parents[1] / "support" / "without_memfd"
HEAD = '''
import os, signal, sys, time, warnings
from pathlib import Path

import numpy as np

import loaderpool as lp

Path("began/elsewhere").mkdir(parents=True)
os.chdir("began")
sys.path.insert(0, os.getcwd())
os.environ["LP_TEST_SEEN"], os.environ["LP_TEST_GONE"] = "old", "old"
Path("helpers.py").write_text("""
import threading
{thread}
def told(i):
    return 1
""")
import helpers


def surroundings(i):
    time.sleep(0.005)
    seen, gone = os.environ.get("LP_TEST_SEEN", ""), os.environ.get("LP_TEST_GONE", "")
    return f"{os.path.basename(os.getcwd())} {seen} {gone} {os.environ.get('LP_TEST_NEW', '')} {helpers.told(i)}"


def change_all():
    os.chdir("elsewhere")
    os.environ["LP_TEST_SEEN"], os.environ["LP_TEST_NEW"] = "new", "new"
    del os.environ["LP_TEST_GONE"]


def kill_supervisor(loader):
    stat = Path(f"/proc/{loader.statistics().workers[0].pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


made = lp.Loader(range(200), surroundings, batch_size=4, workers=1)
'''
THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
FORKED, BY_EXEC, SPAWNED = "forked", "by exec", "spawned"


def run(body: str, start: str = FORKED) -> None:
    path = os.pathsep.join(map(str, (WITHOUT_MEMFD, WITHOUT_MEMFD.parents[2])))
    env = {"PYTHONPATH": path} if start == SPAWNED else {}
    head = HEAD.replace("{thread}", THREAD if start == BY_EXEC else "")
    filters = 'warnings.filterwarnings("ignore", category=lp.LoaderpoolWarning)\n'
    run_child(head.replace("made = ", filters + "made = ") + body, env=env).check()


MORE = {
    "another supervisor": (FORKED, "kill_supervisor(loader)"),
    "a resize": (BY_EXEC, "loader.resize(3)"),
    "a worker that died": (SPAWNED, "os.kill(loader.statistics().workers[0].pid, signal.SIGKILL)"),
}
WAYS = [
    pytest.param(way, marks=pytest.mark.slow) if MORE[way][0] == SPAWNED else way for way in MORE
]


@pytest.mark.parametrize("way", WAYS)
def test_one_pass_has_one_directory_and_one_environment(way: str) -> None:
    start, more = MORE[way]
    run(
        f"""
with made as loader:
    batches = iter(loader)
    seen = set(next(batches).tolist())
    change_all()
    {more}
    for batch in batches:
        seen |= set(batch.tolist())
    pids = {{worker.pid for worker in loader.statistics().workers}}
assert seen == {{"began old old  1"}}, seen
""",
        start,
    )


def test_a_loader_made_after_the_change_has_it() -> None:
    run(
        """
with made as loader:
    list(loader)
    change_all()
    with loader.replace() as other:
        assert {text for batch in other for text in batch.tolist()} == {"elsewhere new  new 1"}
"""
    )


def test_a_reader_of_a_stream_that_starts_later_finds_the_same() -> None:
    run(
        """
made.close()

class Lines:
    def __iter__(self):
        for _ in range(100):
            time.sleep(0.005)
            yield f"{os.path.basename(os.getcwd())} {os.environ.get('LP_TEST_SEEN')} {os.getpid()}"

with lp.Loader(Lines(), batch_size=4, workers=1) as loader:
    first = next(iter(loader)).tolist()[0].split()
    os.kill(int(first.pop()), signal.SIGKILL)
    change_all()
    time.sleep(0.1)
    try:
        list(loader)
    except lp.SourceError:
        pass
    second = next(iter(loader)).tolist()[0].split()[:2]
assert first == second == ["began", "old"], (first, second)
"""
    )
