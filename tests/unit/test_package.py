"""Content of the package: one version everywhere, types for the user's checker, and names that
exist.
"""

from __future__ import annotations

import importlib.resources
import inspect
import re
from pathlib import Path

import pytest

import loaderpool

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.corner


def test_the_version_is_the_same_in_package_project_and_changelog() -> None:
    project = re.search(
        r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    newest_change = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project and newest_change
    assert loaderpool.__version__ == project[1] == newest_change[1]


def test_types_are_shipped() -> None:
    assert (importlib.resources.files("loaderpool") / "py.typed").is_file()


def test_every_public_name_exists_and_type_checkers_see_the_same() -> None:
    assert [name for name in loaderpool.__all__ if not hasattr(loaderpool, name)] == []
    assert set(loaderpool.__all__) <= set(dir(loaderpool))
    assert len(loaderpool.__all__) <= 46
    text = Path(loaderpool.__file__).read_text()
    imports = re.findall(
        r"^    from loaderpool\.([\w.]+) import (\w+) as (\w+)$", text, re.MULTILINE
    )
    differ = {(name, module) for module, name, _ in imports} ^ set(loaderpool._HOMES.items())
    assert not differ, (
        "name each in loaderpool/__init__.py twice: in _MODULES, and below `if TYPE_CHECKING:`"
    )
    assert all(name == known for _, name, known in imports)


def test_every_public_class_and_function_says_what_may_be_relied_on() -> None:
    public = [(name, getattr(loaderpool, name)) for name in loaderpool.__all__]
    documented = [
        (name, thing)
        for name, thing in public
        if inspect.isclass(thing) or inspect.isroutine(thing)
    ]
    assert documented
    assert [name for name, thing in documented if not (thing.__doc__ or "").strip()] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        loaderpool.no_such_name  # noqa: B018


def test_every_public_error_can_be_caught_as_ours() -> None:
    public = [getattr(loaderpool, name) for name in loaderpool.__all__]
    errors = [
        thing for thing in public if inspect.isclass(thing) and issubclass(thing, BaseException)
    ]
    assert errors
    assert [
        error for error in errors if not issubclass(error, (loaderpool.LoaderpoolError, Warning))
    ] == []
