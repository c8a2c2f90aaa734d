"""Makes a module that looks like one of an installed package."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest


def make_library(
    directory: Path, monkeypatch: pytest.MonkeyPatch, source: str, folder: str = "site-packages"
) -> Any:
    """Write and import a module, which is removed after the test."""
    place = directory / folder
    place.mkdir()
    (place / "made_library.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.delitem(sys.modules, "made_library", raising=False)
    module = importlib.import_module("made_library")
    monkeypatch.setitem(sys.modules, "made_library", module)
    return module
