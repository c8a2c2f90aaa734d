"""Run by each interpreter that a test of `tests.support.over_spawned` starts: this Python has no `memfd_create`."""

import os

if hasattr(os, "memfd_create"):
    del os.memfd_create
