"""Modules that are edited while a loader exists: all its rows come from one version, or a warning
names the module.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.child import run_child

WITHOUT_MEMFD = Path(__file__).parents[1] / "support" / "without_memfd"
THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
HEAD = '''
import importlib, os, signal, sys, time, warnings
from pathlib import Path

import numpy as np

import loaderpool as lp

HELPERS, SUBMODULE = Path("helpers.py"), Path("package/inner.py")
SUBMODULE.parent.mkdir()
SUBMODULE.with_name("__init__.py").write_text("")
sys.path.insert(0, os.getcwd())
SIZE = 4


def version(text, thread=""):
    """Edit both modules: their functions return this from now on."""
    for path in (HELPERS, SUBMODULE):
        path.write_text(f"{thread}\\ndef told(i=0):\\n    return {text!r}\\n")


def kill_supervisor(loader):
    stat = Path(f"/proc/{loader.statistics().workers[0].pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


def kill_worker(loader):
    os.kill(loader.statistics().workers[0].pid, signal.SIGKILL)


def rows_of(loader, change=lambda: None):
    """The rows of a pass, at whose beginning this is done."""
    batches = iter(loader)
    rows = set(next(batches).tolist())
    change()
    return rows.union(*(batch.tolist() for batch in batches))


def row(i):
    time.sleep(0.002)
    return f"{helpers.told(i)} {package.inner.told(i)}"


def imports_inside(i):
    from helpers import told
    time.sleep(0.002)
    return told(i)


version("first", THREAD)
import helpers
import package.inner
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", "Workers are started without fork", lp.LoaderpoolWarning)
'''


def run(body: str, *, has_thread: bool = False, is_spawned: bool = False) -> None:
    path = os.pathsep.join(map(str, (WITHOUT_MEMFD, WITHOUT_MEMFD.parents[2])))
    head = HEAD.replace("THREAD", repr(THREAD if has_thread else ""))
    run_child(head + body, env={"PYTHONPATH": path} if is_spawned else {}).check()


LATER = {
    "another supervisor": ("kill_supervisor(loader)", False, False),
    "another supervisor, executed workers": ("kill_supervisor(loader)", True, False),
    "a resize, executed workers": ("loader.resize(3)", True, False),
    "a death, executed workers": ("kill_worker(loader)", True, False),
    "a resize, spawned workers": ("loader.resize(3)", False, True),
    "a death, spawned workers": ("kill_worker(loader)", False, True),
}


@pytest.mark.parametrize(
    "later",
    [pytest.param(each, marks=pytest.mark.slow) if "spawned" in each else each for each in LATER],
)
def test_later_processes_import_the_first_version(later: str) -> None:
    change, has_thread, is_spawned = LATER[later]
    run(
        f"""
with lp.Loader(range(400), row, batch_size=4, workers=1) as loader:
    def change():
        version("second, which is longer")
        {change}
    rows = rows_of(loader, change) | rows_of(loader)
    assert rows == {{"first first"}}, rows
""",
        has_thread=has_thread,
        is_spawned=is_spawned,
    )


def test_imports_inside_a_function_find_the_first_version() -> None:
    """A forked worker that starts later has not imported it before."""
    run("""
with lp.Loader(range(400), imports_inside, batch_size=4, workers=1) as loader:
    def change():
        version("second, which is longer")
        loader.resize(3)
    assert rows_of(loader, change) == {"first"}
""")


def test_imports_in_setup_find_the_first_version() -> None:
    run("""
def setup():
    import helpers as found
    global told
    told = found.told

def row(i):
    time.sleep(0.002)
    return told(i)

with lp.Loader(range(400), row, batch_size=4, setup=setup, workers=1) as loader:
    def change():
        version("second, which is longer")
        kill_worker(loader)
    assert rows_of(loader, change) == {"first"}
""")


def test_each_pass_of_a_stream_has_the_first_version() -> None:
    run("""
class Stream:
    def __iter__(self):
        return (helpers.told(i) for i in range(8))

with lp.Loader(Stream(), batch_size=4, workers=1) as loader:
    assert "the stream is read in a separate process" in loader.statistics().notes
    rows = rows_of(loader)
    version("second, which is longer")
    for _ in range(3):
        rows |= rows_of(loader)
    assert rows == {"first"}, rows
""")


@pytest.mark.parametrize(
    "edit", ["HELPERS.write_text('def told(')", "HELPERS.unlink(); SUBMODULE.unlink()"]
)
def test_a_half_written_or_missing_file_ends_no_training(edit: str) -> None:
    run(f"""
with lp.Loader(range(400), row, batch_size=4, workers=1) as loader:
    def change():
        {edit}
        kill_supervisor(loader)
    assert rows_of(loader, change) == {{"first first"}}
    assert loader.statistics().supervisor_restarts == 1
""")


def test_a_function_that_closes_descriptors_harms_no_file() -> None:
    """The function may have closed the store's descriptor, and opened a file with the same
    number.
    """
    run("""
def row(i):
    os.closerange(3, 400)
    with open(f"own-{os.getpid()}", "ab", buffering=0) as file:
        os.dup2(file.fileno(), 100)
        for number in range(3, 100):
            os.dup2(file.fileno(), number)
    import helpers
    return helpers.told(i)

del helpers, package
with lp.Loader(range(8), row, batch_size=4, workers=1, on_error="skip") as loader:
    try:
        list(loader)
    except lp.LoaderpoolError:
        pass
sizes = [path.stat().st_size for path in Path().glob("own-*")]
assert sizes and not any(sizes), sizes
""")


def test_import_hooks_of_a_module_work() -> None:
    """The finder calls all other finders, as loaderpool's does."""
    run("""
Path("hooks.py").write_text('''
import sys

class Asking:
    found = []

    def find_spec(self, name, path=None, target=None):
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next(filter(None, others), None)
        if spec is not None:
            self.found.append(name)
        return spec

sys.meta_path.insert(0, Asking())
''')
import hooks

def row(i):
    import helpers
    time.sleep(0.002)
    return f"{helpers.told()} {hooks.Asking.found.count('helpers')}"

del sys.meta_path[0], sys.modules["helpers"]
with lp.Loader(range(400), row, batch_size=4, workers=1) as loader:
    def change():
        version("second, which is longer")
        loader.resize(2)
    rows = rows_of(loader, change)
    assert rows == {"first 1"}, rows
""")


def test_reload_in_a_worker_reads_the_file() -> None:
    run("""
def row(i):
    time.sleep(0.002)
    return importlib.reload(helpers).told(i)

with lp.Loader(range(400), row, batch_size=4, workers=1) as loader:
    assert rows_of(loader, lambda: version("second, which is longer")) == {"first", "second, which is longer"}
""")


def test_a_new_loader_imports_the_new_version() -> None:
    run("""
with lp.Loader(range(8), row, batch_size=4, workers=1) as loader:
    assert rows_of(loader) == {"first first"}
version("second, which is longer")
importlib.reload(helpers)
importlib.reload(package.inner)
with lp.Loader(range(8), row, batch_size=4, workers=1) as loader:
    assert rows_of(loader) == {"second, which is longer second, which is longer"}
""")


@pytest.mark.parametrize("is_spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_edit_since_the_import_is_warned_of(is_spawned: bool) -> None:
    """For example in a notebook: workers import the new file, and the notebook has the old
    functions.
    """
    run(
        """
version("second, which is longer")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = lp.Loader(range(8), row, batch_size=4, workers=1)
with loader:
    assert rows_of(loader) == {"second, which is longer second, which is longer"}
(text,) = [str(each.message) for each in caught]
assert "edited after this process imported them" in text, text
assert f"helpers ({HELPERS.absolute()})" in text and "package.inner (" in text, text
assert caught[0].filename == __file__
""",
        is_spawned=is_spawned,
    )


def test_edit_that_changes_no_function_is_not_warned_of() -> None:
    """The module was edited before its import, or has its old content again."""
    run("""
version("second, which is longer")
importlib.reload(helpers)
importlib.reload(package.inner)
with lp.Loader(range(8), row, batch_size=4, workers=1) as loader:
    rows_of(loader)
version("third")
version("second, which is longer")
with lp.Loader(range(8), row, batch_size=4, workers=1) as loader:
    rows_of(loader)
""")


def test_pool_that_has_an_older_version_is_warned_of() -> None:
    run("""
with lp.Pool(1) as pool:
    with lp.Loader(range(8), row, batch_size=4, workers=pool) as loader:
        assert rows_of(loader) == {"first first"}
    version("second, which is longer")
    with lp.Loader(range(8), row, batch_size=4, workers=pool) as loader:  # this process has the old one, too
        assert rows_of(loader) == {"first first"}
    importlib.reload(helpers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = lp.Loader(range(8), row, batch_size=4, workers=pool)
    with loader:
        assert rows_of(loader) == {"first first"}
(text,) = [str(each.message) for each in caught]
assert "another version of these modules" in text and f"helpers ({HELPERS.absolute()})" in text, text
assert "package.inner" not in text, text
""")
