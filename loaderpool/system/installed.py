"""Whether code is the user's own, an installed package's, or Python's."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import PurePath

# By these names, and not by where this interpreter installs: packages of another environment may be on the path, too.
_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def is_installed(name: str) -> bool:
    """Whether a module that is imported is a package's, not the user's own."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_installed_file(file)


def is_installed_file(path: str) -> bool:
    """Whether a file lies where packages are installed."""
    return not _DIRECTORIES.isdisjoint(PurePath(path).parts)


@functools.cache
def requirements_of(package: str) -> frozenset[str]:
    """Return the packages that an installed one requires with no extra asked for, as they are written in imports.

    Each is taken to be named as its distribution is, but for dashes; none of a package of which that does not hold.
    """
    from importlib import metadata  # 20 ms, which most processes need not wait for

    try:
        lines = metadata.requires(package) or ()
    except Exception:  # not found, or its metadata cannot be read
        return frozenset()
    names = (re.split(r"[^\w.-]", line.strip(), maxsplit=1)[0] for line in lines if "extra ==" not in line)
    return frozenset(re.sub(r"[.-]+", "_", name).lower() for name in names)


def is_library(module: str | None) -> bool:
    """Whether a module is no code of the user's own: ours, Python's, or a package's."""
    root = (module or "").partition(".")[0]
    return root == "loaderpool" or root in sys.stdlib_module_names or is_installed(module or "")


def is_library_file(path: str) -> bool:
    """Whether a file has no code of the user's own, as `is_library` says it of modules."""
    return path.startswith((_OURS, _STDLIB)) or is_installed_file(path)
