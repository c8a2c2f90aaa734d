"""Fixtures for the tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import loaderpool as lp
from tests.support.batches import Place, read
from tests.support.frameworks import FRAMEWORKS, Framework
from tests.support.sounds import BY_LENGTH, load_sound, write_sounds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file that share pools may leak, because workers change. The fixture checks after
    the last of them.
    """
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    sharing = {item.path for item in here if "on" in getattr(item, "fixturenames", ())}
    for item in here:
        if item.path in sharing:
            item.add_marker(pytest.mark.may_leak(reason="the fixture `on` watches the whole file"))


@pytest.fixture(scope="module")
def pool(on: Place) -> lp.Pool:
    """A pool of two workers that the tests of a file share."""
    shared: lp.Pool = on(2)["workers"]
    return shared


@pytest.fixture(params=[0, 2])
def made_in(request: pytest.FixtureRequest, on: Place) -> dict[str, Any]:
    """Arguments of `Loader`, with which samples are made in this process, or in a shared pool of
    two workers.
    """
    return on(request.param)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in FRAMEWORKS])
def framework(request: pytest.FixtureRequest) -> Framework:
    """Each framework that is installed."""
    pytest.importorskip(request.param)
    return FRAMEWORKS[request.param]


@pytest.fixture(scope="module")
def all_frameworks() -> None:
    """Import all frameworks before any pool starts. Their threads and files are then no leaks."""
    for each in FRAMEWORKS.values():
        if importlib.util.find_spec(each.name) is not None:
            each.load()


@pytest.fixture(scope="session")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths of sound files of varied length."""
    return write_sounds(tmp_path_factory.mktemp("sounds"))


@pytest.fixture(scope="session")
def two_epochs(sounds: list[str]) -> list[Any]:
    """Batches of two epochs under `BY_LENGTH`, made in this process. Any loader must make the
    same.
    """
    with lp.Loader(sounds, load_sound, workers=0, **BY_LENGTH) as loader:
        return read(loader, passes=2)


@pytest.fixture
def shapes(storm_module: Callable[[str], ModuleType]) -> ModuleType:
    """The shapes of work that storms use."""
    return storm_module("shapes")
