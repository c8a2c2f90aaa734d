"""The user's own code is distinguished from that of libraries, wherever these are installed."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from loaderpool.system.process import is_library, package_of


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("some_module")
    monkeypatch.setitem(sys.modules, "some_module", made)
    return made


@pytest.mark.parametrize(
    "name", ["json.decoder", "numpy.linalg", "loaderpool.errors", "builtins", "sys"]
)
def test_modules_of_python_of_packages_and_our_own_are_libraries(name: str) -> None:
    assert is_library(name)


@pytest.mark.parametrize(
    "directory",
    [
        "/other/env/lib/python3.11/site-packages",
        "/usr/lib/python3/dist-packages",
        "C/site-packages",
    ],
)
def test_a_package_of_another_environment_is_one(module: types.ModuleType, directory: str) -> None:
    """For example, a .pth file adds it."""
    module.__file__ = f"{directory}/some_module.py"
    assert is_library("some_module")


def test_the_user_s_own_is_none(module: types.ModuleType, tmp_path: Path) -> None:
    assert not is_library("some_module")  # created at run time
    module.__file__ = str(tmp_path / "some_module.py")
    assert not is_library("some_module")
    assert not is_library(None) and not is_library("") and not is_library("not_imported")


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("/v/lib/python3.11/site-packages/onnxruntime/capi/state.so", "onnxruntime"),
        ("/v/lib/python3.11/site-packages/scipy.libs/libopenblas.so", "scipy"),
        ("/usr/lib/python3/dist-packages/numpy/core/umath.so", "numpy"),
        ("/v/lib/python3.11/site-packages/single.so", ""),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", ""),
        ("", ""),
    ],
)
def test_an_installed_file_names_its_package(file: str, package: str) -> None:
    assert package_of(file) == package
