"""Removes `os.memfd_create` from each interpreter that a test of `tests.support.over_spawned`
starts.
"""

import os

if hasattr(os, "memfd_create"):
    del os.memfd_create
