"""Libraries that only some sources need: imported when such a source is made, with advice where one is missing."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, *, what: str, extra: str) -> Any:
    """Import a library that only some sources need; returns it.

    Args:
        module: its name.
        what: who needs it.
        extra: the extra of loaderpool that installs it.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and misses another one
        raise ImportError(
            f"{what} needs {module.partition('.')[0]}, which is not installed: pip install 'loaderpool[{extra}]'",
            name=error.name,
        ) from None
