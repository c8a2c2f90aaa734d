"""Fixtures for all tests: TensorFlow with several CPU devices, and a guard against leaks."""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

from tests.support import coverage_figure, interrupts, leaks, missing, tensorflow_runtime
from tests.support.batches import Place, shared_pools

# Tests in these folders start whole pools. Leaks of one test would disturb the next ones.
GUARDED_DIRECTORIES = {"e2e", "faults", "stress"}

# The kernel counts kills for lack of memory on the whole machine. So tests that cause such kills do
# not run at the same time as tests that would count them as their own.
KILL_FOR_MEMORY = {"test_cgroups.py"}
COUNT_KILLS_FOR_MEMORY = {"test_verdicts.py", "test_deaths.py", "test_pages.py"}

# In CI, a failed test is run once more (scripts/test). If more tests than this need it, the whole
# run fails.
MOST_RUN_AGAIN = 3

# Hypothesis' deadline for each example would fail on a busy machine. pytest's timeout remains.
hypothesis.settings.register_profile("no deadline", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("no deadline")
tensorflow_runtime.quieten()
leaks.mark_children()
interrupts.hear_ctrl_c()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept pytest-timeout's settings in pyproject.toml if it is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored: pytest-timeout is not installed")
        parser.addini("timeout_method", "ignored: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Register pytest-timeout's marker if it is not installed, and guard CI against skips."""
    pytest.importorskip = missing.import_or_skip
    if coverage_figure.FIGURE is not None:
        config.pluginmanager.register(coverage_figure.FIGURE)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): ignored without pytest-timeout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests, unless they are requested."""
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(_run_again(session.config)) > MOST_RUN_AGAIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    first_tries = _run_again(terminalreporter.config)
    for report in first_tries:
        terminalreporter.section(f"run again: {report.nodeid}", "_")
        terminalreporter.write_line(report.longreprtext)
    if len(first_tries) > MOST_RUN_AGAIN:
        terminalreporter.write_line(
            f"FAILED: {len(first_tries)} tests were run again, at most {MOST_RUN_AGAIN} may be"
        )


def _run_again(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get("rerun", []) if reporter else []


@pytest.fixture(autouse=True)
def _kills_for_memory_apart(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    name = request.path.name
    if name not in KILL_FOR_MEMORY | COUNT_KILLS_FOR_MEMORY:
        yield
        return
    base = tmp_path_factory.getbasetemp()
    with open(
        (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kills-for-memory", "w"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if name in KILL_FOR_MEMORY else fcntl.LOCK_SH)
        yield


@pytest.fixture(autouse=True)
def _guard_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look for leaks after each test. It is set up before the test's other function fixtures, so
    their leaks count, too.
    """
    directories = request.path.relative_to(request.config.rootpath).parts
    guarded = (
        not GUARDED_DIRECTORIES.isdisjoint(directories)
        or request.node.get_closest_marker("no_leaks") is not None
    )
    if not guarded or request.node.get_closest_marker("may_leak") is not None:
        yield
        return
    yield from _guard(request)


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = report.failed or (report.when != "setup" and item.stash[_FAILED])
    return report


def _guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look for leaks of a test. If the test has failed, end what it left without an error, which
    would hide the reason.
    """
    try:
        with leaks.guard():
            yield
    except AssertionError:
        if not request.node.stash.get(_FAILED, False):
            raise


@pytest.fixture
def storm_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Function that imports a module of `scripts/stress_storms`. The module is removed after the
    test.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    yield lambda name: importlib.import_module(f"stress_storms.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "stress_storms"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def tf() -> Any:
    """TensorFlow with three logical CPU devices and no GPU. Skips the test if TensorFlow is not
    installed.
    """
    pytest.importorskip(
        "tensorflow", reason="TensorFlow is not installed: pip install 'loaderpool[tensorflow-cpu]'"
    )
    return tensorflow_runtime.load()


@pytest.fixture(scope="session")
def mirrored(tf: Any) -> Any:
    """A strategy over two CPU devices, the same one for all tests. With a second strategy in a
    process, TensorFlow would confuse the collective ops of both, and fail if their shapes differ.
    """
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])


@pytest.fixture(scope="module")
def on() -> Iterator[Place]:
    """Function that returns arguments with which a loader uses one of the file's shared pools."""
    with shared_pools() as place:
        yield place
