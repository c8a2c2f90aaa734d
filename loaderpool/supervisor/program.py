"""How the supervisor's process, or another program in its place, begins and ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from loaderpool.system import machine, role


def begin(new_role: role.Role, start: Mapping[str, Any]) -> bool:
    """Be this from now on, with the settings of the start; returns whether the trainer is there still."""
    role.become(new_role, start.get("node"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != start["trainer_pid"]:
        return False  # it died while we started
    sys.argv = list(start["argv"])
    for name in ("control", "socket", "arena", "completions"):
        os.set_inheritable(start[name], False)  # the exec needed it; what the user's function starts needs none
    machine.raise_descriptor_limit()
    return True


def end_group() -> NoReturn:
    """End this process, and with it what the user's function has started and left running."""
    if os.getpgrp() == os.getpid():  # else the group is the trainer's
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
