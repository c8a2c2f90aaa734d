"""A plugin for pytest, `-p tests.support.over_hosts`: pools have a dispatcher and local hosts for a supervisor.

So any test shows whether batches that a host makes are what a worker's are. Tests that look at the supervisor or at
workers themselves do not apply; one that would end a worker by its pid is skipped, as a host has none here.
"""

from __future__ import annotations

import os

import pytest

from loaderpool.trainer.session import session
from tests.support.local_hosts import local_hosts

session.SUPERVISOR = local_hosts(hosts=0, workers=1)
_kill = os.kill


def _kill_or_skip(pid: int, signal: int) -> None:
    if not pid:  # the whole process group, otherwise
        pytest.skip("a host is no process of this machine")
    _kill(pid, signal)


os.kill = _kill_or_skip
