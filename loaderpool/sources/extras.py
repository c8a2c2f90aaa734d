"""Packages that only some sources need: imported where such a source is made."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, needed_by: str) -> Any:
    """Import a package that only some sources need; returns it.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and misses another one
        raise ImportError(
            f"{needed_by} needs {error.name}, which is not installed: pip install 'loaderpool[files]'", name=error.name
        ) from None
