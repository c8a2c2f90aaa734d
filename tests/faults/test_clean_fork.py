"""Workers are forked from a process with one thread. Otherwise they are new interpreters, and a
warning says so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import loaderpool as lp
from tests.support.batches import assert_same, indices_in, read
from tests.support.child import run_child
from tests.support.processes import parents, wait_gone

Make = Callable[..., ModuleType]
# For tests that ignore the warning.
unasked = pytest.mark.filterwarnings(
    "ignore:Workers are started without fork:loaderpool.LoaderpoolWarning"
)

# Nothing is started in this process, because all tests share it.
THREAD = """
    import os, threading, time
    if "LOADERPOOL_ROLE" in os.environ:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
IDENTITY = """
    def fn(item):
        return item
"""
NOISE = """
    import random
    def fn(item, rng):
        return {"item": item, "rng": rng.random(3), "global": random.random()}
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Function that writes modules, and imports the last of them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**sources: str) -> ModuleType:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        for name in sources:
            monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(list(sources)[-1])
        for name in sources:
            monkeypatch.delitem(sys.modules, name, raising=False)
        sys.modules[module.__name__] = module  # removed again with the patches
        return module

    return write


def both(*sources: str) -> str:
    return "\n".join(map(textwrap.dedent, sources))


def start_of(module: ModuleType, **settings: Any) -> str | None:
    """Return the way in which workers are started for the module's `fn`, after a pass. A warning is
    an error.
    """
    with lp.Loader(range(8), module.fn, batch_size=4, workers=1, **settings) as loader:
        assert indices_in(loader) == list(range(8))
        return loader.statistics().workers_start


# ---- forked


@pytest.mark.parametrize(
    "library", ["numpy", "pandas", "PIL.Image", "scipy.linalg", "cv2", "pyarrow.parquet"]
)
def test_libraries_that_have_thread_pools_are_forked(make: Make, library: str) -> None:
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed")
    use = "import numpy\nnumpy.linalg.inv(numpy.eye(300) + 1) @ numpy.ones((300, 300))"
    assert start_of(make(cf_library=both(f"import {library}\n{use}", IDENTITY))) == "fork"


@pytest.mark.parametrize(
    ("began", "start"),
    [("", "fork"), ('began = pl.DataFrame({"a": [1, 2]}).filter(pl.col("a") > 1)', "exec")],
)
def test_polars_is_forked_unless_its_pool_has_begun(make: Make, began: str, start: str) -> None:
    """In a fork, the pool's first operation would wait forever."""
    source = """
        import polars as pl
        def fn(item):
            frame = pl.DataFrame({"a": [item] * 5, "b": list("xxyyz")})
            return frame.lazy().group_by("b").agg(pl.col("a").max()).collect()["a"].min()
    """
    module = make(cf_polars=both(source, began))
    warned = pytest.warns(lp.LoaderpoolWarning, match="started without fork")
    with warned if began else contextlib.nullcontext():
        assert start_of(module, limits=lp.Limits(timeout_s=30)) == start


def test_threads_that_have_ended_when_the_import_has_are_no_hindrance(make: Make) -> None:
    source = """
        import concurrent.futures, os
        if "LOADERPOOL_ROLE" in os.environ:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                found = list(pool.map(abs, range(-50, 0)))
    """
    assert start_of(make(cf_ended=both(source, IDENTITY))) == "fork"


# ---- not forked


def test_a_module_that_starts_a_thread_on_import_is_not_forked(make: Make) -> None:
    module = make(cf_thread=both(THREAD, NOISE))
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3}
    with lp.Loader(range(40), module.fn, workers=0, **settings) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(range(40), module.fn, workers=2, **settings) as loader:
        named = r"of thread 'Thread-\d+ \(sleep\)' \(from importing 'cf_thread'\) in the"
        with pytest.warns(lp.LoaderpoolWarning, match=named) as warned:
            batches = read(loader)
        assert_same(
            batches + read(loader), expected
        )  # it warns once: a second warning would be an error here
        statistics = loader.statistics()
        assert statistics.workers_start == "exec"
        assert statistics.restarts == 0
        assert len(statistics.workers) == 2
    assert "setup=" in str(warned[0].message)
    assert warned[0].filename in (__file__, read.__code__.co_filename)


def test_of_many_threads_the_first_are_named(make: Make) -> None:
    modules = [
        make(cf_inner=THREAD, **{f"cf_{n}": both(THREAD, "import cf_inner", IDENTITY)})
        for n in range(5)
    ]
    functions = [module.fn for module in modules]
    loader = lp.Loader(
        range(8), lambda item: [fn(item) for fn in functions], batch_size=4, workers=1
    )
    named = r"thread '[^']*' \(from importing 'cf_\w+'\)"
    message = f"of {named}, {named}, {named} and 3 more in the supervisor"
    with loader, pytest.warns(lp.LoaderpoolWarning, match=message):
        assert len(list(loader)) == 2


def test_each_thread_has_the_name_of_the_module_that_started_it(make: Make) -> None:
    """Also before and after an import inside that module."""
    module = make(cf_inner=THREAD, cf_outer=both(THREAD, "import cf_inner", THREAD, IDENTITY))
    with pytest.warns(lp.LoaderpoolWarning, match="started without fork") as warned:
        assert start_of(module) == "exec"
    text = str(warned[0].message)
    assert [text.count(f"(from importing {name!r})") for name in ("cf_inner", "cf_outer")] == [1, 2]


STARTED = {
    "polars": (
        'polars.DataFrame({"a": [1]}).filter(polars.col("a") > 1)',
        r"of (_polars\w+ \(imported by )?polars",
    ),
    "tqdm": ("bar = tqdm.tqdm(total=2, disable=False)", "thread 'tqdm_monitor' of tqdm"),
    "cv2": (
        "import numpy; cv2.setNumThreads(3); cv2.GaussianBlur(numpy.ones((3000, 3000)), (31, 31), 0)",
        "a thread of cv2",
    ),
}


@pytest.mark.parametrize("library", STARTED)
def test_a_threads_library_is_named(make: Make, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    started, named = STARTED[library]
    source = f"""
        import os
        if "LOADERPOOL_ROLE" in os.environ:
            import {library}
            {started}
    """
    module = make(cf_library_thread=both(source, IDENTITY))
    with pytest.warns(lp.LoaderpoolWarning, match=named):
        assert start_of(module) == "exec"


def test_a_thread_of_the_interpreters_own_start_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(THREAD.replace('"LOADERPOOL_ROLE"', '"PYTHONHASHSEED"'))
    )
    child = run_child(
        """
        import loaderpool as lp
        with lp.Loader(range(4), batch_size=4, workers=1) as loader:
            print([batch.tolist() for batch in loader], loader.statistics().workers_start)
        """,
        env={
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PYTHONHASHSEED": None,
        },
    ).check()
    assert child.stdout == "[[0, 1, 2, 3]] exec\n"
    assert "in the supervisor, which imports" in child.stderr


def test_a_warning_that_is_made_an_error_breaks_nothing(make: Make) -> None:
    module = make(cf_thread=both(THREAD, IDENTITY))
    with lp.Loader(range(8), module.fn, batch_size=4, workers=1) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(lp.LoaderpoolWarning):
                list(loader)
        assert indices_in(loader) == list(range(8))


def test_the_same_pool_stays_as_it_is_when_a_clean_loader_comes(make: Make) -> None:
    clean = make(cf_plain=IDENTITY)
    with lp.Pool(2) as pool:
        with lp.Loader(range(8), clean.fn, batch_size=4, workers=pool) as first:
            assert indices_in(first) == list(range(8))
            assert first.statistics().workers_start == "fork"
            with lp.Loader(
                range(8), make(cf_thread=both(THREAD, IDENTITY)).fn, batch_size=4, workers=pool
            ) as second:
                with pytest.warns(lp.LoaderpoolWarning, match="started without fork"):
                    assert indices_in(second) == list(range(8))
                assert indices_in(first) == list(range(8))
        with lp.Loader(range(12), clean.fn, batch_size=4, workers=pool) as third:
            assert indices_in(third) == list(range(12))
            assert third.statistics().workers_start == "exec"


# ---- deaths, hangs, errors


@unasked
def test_the_death_of_such_a_worker_changes_no_bit(make: Make, tmp_path: Path) -> None:
    source = f"""
        import os, signal
        def fn(item, rng):
            if item == 21 and "LOADERPOOL_ROLE" in os.environ:
                try:
                    os.close(os.open({str(tmp_path / "died")!r}, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            return item, rng.random()
    """
    module = make(cf_dying=both(THREAD, source))
    with lp.Loader(range(96), module.fn, batch_size=4, workers=0) as loader:
        expected = read(loader, passes=2)
    with lp.Loader(range(96), module.fn, batch_size=4, workers=2) as loader:
        # Two, because the death may happen during the prefetch of the second epoch.
        assert_same(read(loader, passes=2), expected)
        assert loader.statistics().restarts == 1
    assert (tmp_path / "died").exists()


@unasked
def test_an_import_that_fails_in_the_worker_only_is_an_error_at_once(make: Make) -> None:
    source = """
        if os.environ.get("LOADERPOOL_ROLE") == "worker":
            raise OSError("port 8000 is in use")
    """
    module = make(cf_port=both(THREAD, source, IDENTITY))
    with lp.Pool(2) as pool:
        with lp.Loader(range(8), module.fn, batch_size=4, workers=pool) as loader:
            with pytest.raises(lp.SetupError, match="a worker could not load") as raised:
                list(loader)
            assert "port 8000 is in use" in str(raised.value)
            assert "cf_port.py" in str(raised.value)
            assert not any(
                inner in str(raised.value) for inner in ("importlib", "loaded.py", "contextlib")
            )
            assert loader.statistics().restarts == 0
        with lp.Loader(
            range(8), batch_size=4, workers=pool
        ) as loader:  # of others the workers can be
            assert indices_in(loader) == list(range(8))


@unasked
def test_such_workers_end_with_the_supervisor_and_another_has_its_own(make: Make) -> None:
    module = make(cf_slow=both(THREAD, "def fn(item):\n    time.sleep(0.005)\n    return item"))
    with lp.Loader(range(200), module.fn, batch_size=4, workers=2) as loader:
        batches = iter(loader)
        seen = next(batches).tolist()
        before = {worker.pid for worker in loader.statistics().workers}
        supervisor = parents()[min(before)]
        assert supervisor != os.getpid()
        os.kill(supervisor, signal.SIGKILL)
        assert seen + indices_in(batches) == list(range(200))
        assert before.isdisjoint(worker.pid for worker in loader.statistics().workers)
        assert wait_gone(before, 5.0) == []
        assert loader.statistics().workers_start == "exec"


# ---- TensorFlow


@pytest.mark.slow
def test_a_module_that_runs_an_operation_on_import_is_named(make: Make, tf: Any) -> None:
    source = """
        import numpy, os
        import tensorflow as tf
        table = tf.constant([1.0, 2.0, 3.0]) * 2
        def fn(item):
            return (table + numpy.float32(item)).numpy()
    """
    module = make(cf_operation=source)
    with lp.Loader(range(8), module.fn, batch_size=4, workers=0) as loader:
        expected = read(loader)
    with lp.Loader(range(8), module.fn, batch_size=4, workers=1) as loader:
        message = "because of the runtime of TensorFlow"
        with pytest.warns(lp.LoaderpoolWarning, match=message) as warned:
            assert_same(read(loader), expected)
        assert loader.statistics().workers_start == "exec"
    assert "no operation" in str(warned[0].message)


def test_a_module_that_imports_tensorflow_only_is_forked(make: Make, tf: Any) -> None:
    source = """
        import tensorflow as tf
        def fn(item):
            return item if tf.float32 else tf
    """
    assert start_of(make(cf_import_only=source)) == "fork"
