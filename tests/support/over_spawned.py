"""A plugin for pytest, `-p tests.support.over_spawned`: Python has no `memfd_create`, so workers are spawned.

So any test shows whether spawned workers do what forked ones do. It holds for the processes that tests start, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from multiprocess import resource_tracker

from tests.support.without_memfd import sitecustomize as _sitecustomize  # noqa: F401

_FOLDER = str(Path(__file__).with_name("without_memfd"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FOLDER, os.environ.get("PYTHONPATH", "")]))
# One for the life of each process that makes shared memory: no test's, and so none leaves it behind.
resource_tracker.ensure_running()
