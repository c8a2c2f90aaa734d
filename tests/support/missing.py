"""Libraries that a test needs. If one is missing, the test is skipped, but in CI it fails.

CI installs the same as `scripts/test`. There, a skip would hide that a library is no longer
installed, and that its tests have not run for months.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

# Libraries that tests use if they are installed. `scripts/test` does not install them.
_NOT_IN_CI = {"dask", "h5netcdf", "numba", "rasterio", "rtree"}

# Python versions for which `scripts/test` installs a library: the first one, and the first one
# without it.
_FROM_PYTHON = {"zarr": (3, 11)}
_BEFORE_PYTHON = {
    "isal": (3, 15),
    "keras": (3, 14),
    "tensorflow": (3, 14),
    "zstandard": (3, 14),
}

_importorskip = pytest.importorskip


def is_needed(module: str) -> bool:
    """Return whether this process runs in CI, and CI has the module for this Python."""
    library = module.partition(".")[0]
    return (
        bool(os.environ.get("CI"))
        and library not in _NOT_IN_CI
        and _FROM_PYTHON.get(library, (3, 0)) <= sys.version_info
        and sys.version_info < _BEFORE_PYTHON.get(library, (4, 0))
    )


def import_or_skip(modname: str, *arguments: Any, **options: Any) -> Any:
    """Import like `pytest.importorskip`, but fail if CI should have the module.

    `tests/conftest.py` replaces `pytest.importorskip` by this function.
    """
    __tracebackhide__ = True  # so that pytest shows the caller's line
    try:
        return _importorskip(modname, *arguments, **options)
    except pytest.skip.Exception as skipped:
        if not is_needed(modname):
            raise
        message = f"{skipped}. CI never skips for {modname}: let scripts/test install it"
    pytest.fail(message, pytrace=False)
