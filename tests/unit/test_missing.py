"""Tests without optional libraries: skipped on a small machine, failed in CI."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.child import run_child

ROOT = Path(__file__).resolve().parents[2]


def test_missing_library_skips_outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no_such_library"):
        pytest.importorskip("no_such_library")


def test_missing_library_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setitem(sys.modules, "h5py", None)
    for name in ("h5py", "no_such_library.part"):
        with pytest.raises(pytest.fail.Exception, match=rf"CI never skips for {name}"):
            pytest.importorskip(name, reason="pip install it")


def test_library_that_ci_never_has_skips_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(pytest.skip.Exception):
        pytest.importorskip("numba")


@pytest.mark.slow
def test_quick_tests_are_collected_without_optional_libraries() -> None:
    done = run_child(
        """
        import importlib.machinery
        import os
        import sys

        KNOWN = {
            "cloudpickle", "hypothesis", "loaderpool", "numpy", "pytest",
            "tests",
            # what pytest and hypothesis import
            "attr", "attrs", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py",
            "pygments", "sortedcontainers", "tomli", "typing_extensions",
        }

        find_any = importlib.machinery.PathFinder.find_spec

        def find_known(finder, name, path=None, target=None):
            library = name.partition(".")[0]
            is_known = library.startswith("_") or library in KNOWN | sys.stdlib_module_names
            return find_any(name, path, target) if is_known else None

        importlib.machinery.PathFinder.find_spec = classmethod(find_known)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ.pop("CI", None)

        import pytest

        sys.exit(pytest.main(["--collect-only", "-q", "tests/unit", "tests/property"]))
        """,
        cwd=ROOT,
    ).check()
    assert "tests collected" in done.stdout and "error" not in done.stdout.splitlines()[-1]
