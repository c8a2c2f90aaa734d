"""Verdicts on Python and the libraries, told from their metadata: TensorFlow is not imported for it."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable

from loaderpool.tools.doctor.checks import Check, Status

_GROUP = "software"
# As in pyproject.toml: where the tests run, and what is declared.
_PYTHONS = ((3, 10), (3, 13))
_LEAST = {"numpy": (1, 26), "cloudpickle": (3, 0)}
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu")
_FIRST_TENSORFLOW = (2, 17)
_COPYING_TENSORFLOW = (2, 18)


def version_checks(
    version_of: Callable[[str], str | None] | None = None, python: tuple[int, ...] = sys.version_info[:3]
) -> list[Check]:
    """A check for Python and each library.

    Args:
        version_of: an installed distribution's version, None where it is not installed; None: this interpreter's.
        python: the interpreter's version.
    """
    version_of = version_of or _version_of
    checks = [_python(python)]
    for name in ("numpy", "cloudpickle"):
        checks.append(_library(name, version_of(name)))
    checks.append(_tensorflow(version_of))
    return checks


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(version: tuple[int, ...]) -> Check:
    shown = ".".join(map(str, version))
    first, last = _PYTHONS
    if version[:2] < first:
        return Check(_GROUP, "Python", "fail", shown, f"Python {_dotted(first)} or later is needed")
    if version[:2] > last:
        change = f"the tests run on Python {_dotted(first)} to {_dotted(last)}: take one of those if something is odd"
        return Check(_GROUP, "Python", "warn", shown, change)
    return Check(_GROUP, "Python", "ok", shown)


def _library(name: str, version: str | None) -> Check:
    least = _LEAST[name]
    shown = {"numpy": "NumPy"}.get(name, name)
    if version is None:
        return Check(_GROUP, shown, "fail", "not installed", f"pip install '{name}>={_dotted(least)}'")
    if _numbers(version) < least:
        return Check(_GROUP, shown, "fail", version, f"pip install '{name}>={_dotted(least)}'")
    return Check(_GROUP, shown, "ok", version)


def _tensorflow(version_of: Callable[[str], str | None]) -> Check:
    name, version = next(
        ((name, version) for name in _TENSORFLOWS if (version := version_of(name)) is not None), ("", None)
    )
    status: Status = "ok"
    if version is None:
        return Check(_GROUP, "TensorFlow", status, "not installed (needed by as_dataset() only)")
    found = version if name == "tensorflow" else f"{version} ({name})"
    numbers = _numbers(version)[:2]
    if numbers == _COPYING_TENSORFLOW and _numbers(version_of("numpy") or "0") >= (2,):
        change = (
            "TensorFlow 2.18 under NumPy 2 copies every array that comes from Python, one copy more for each batch: "
            "take TensorFlow 2.19 or later, or NumPy 1.26"
        )
        return Check(_GROUP, "TensorFlow", "warn", found, change)
    if numbers < _FIRST_TENSORFLOW:
        change = f"the tests run from TensorFlow {_dotted(_FIRST_TENSORFLOW)} on"
        return Check(_GROUP, "TensorFlow", "warn", found, change)
    return Check(_GROUP, "TensorFlow", status, found)


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 2.19.0rc1 -> 2, 19, 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
