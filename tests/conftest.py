"""Fixtures for all tests: TensorFlow with several CPU devices, and the guard against what a test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support import leaks, tensorflow_runtime
from tests.support.batches import Place, shared_pools

# These run whole pools; whatever they leave would also spoil the tests after them.
GUARDED_DIRECTORIES = {"e2e", "faults", "stress"}

# The kernel's count of such kills is the whole machine's: one file would see those of the other.
COUNT_KILLS_FOR_MEMORY = {"test_cgroups.py", "test_verdicts.py", "test_deaths.py", "test_pages.py"}

# A deadline for each example fails on a busy machine, not on a wrong result; the timeout of pytest stays.
hypothesis.settings.register_profile("no deadline", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("no deadline")
tensorflow_runtime.quieten()
leaks.mark_children()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, the tests of a file stay together: they share pools, and TensorFlow once it is loaded."""
    for item in items:
        kills_for_memory = item.path.name in COUNT_KILLS_FOR_MEMORY
        item.add_marker(pytest.mark.xdist_group("kills for memory" if kills_for_memory else str(item.path)))


@pytest.fixture(autouse=True)
def _guard_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Autouse, so set up before a test's other function fixtures and torn down after them: theirs count as well."""
    directories = request.path.relative_to(request.config.rootpath).parts
    guarded = not GUARDED_DIRECTORIES.isdisjoint(directories) or request.node.get_closest_marker("no_leaks") is not None
    if not guarded or request.node.get_closest_marker("may_leak") is not None:
        yield
        return
    with leaks.guard():
        yield


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The test fails if it leaves a process, thread, descriptor or mapping behind; the marker does the same."""
    with leaks.guard():
        yield


@pytest.fixture(scope="session")
def tf() -> Any:
    """TensorFlow with three logical CPU devices and no GPU; skips where it is not installed (scripts/test has it)."""
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'loaderpool[tensorflow-cpu]'")
    return tensorflow_runtime.load()


@pytest.fixture(scope="module")
def on() -> Iterator[Place]:
    """Gives the arguments that have a loader use one of the pools that the tests of this file share."""
    with shared_pools() as place:
        yield place
