"""Whether code is an installed package's, or the user's own."""

from __future__ import annotations

import sys
from pathlib import PurePath

_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


def is_installed(name: str) -> bool:
    """Whether a module that is imported is a package's, not the user's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_installed_file(file)


def is_installed_file(path: str) -> bool:
    """Whether a file lies where packages are installed."""
    return not _DIRECTORIES.isdisjoint(PurePath(path).parts)
