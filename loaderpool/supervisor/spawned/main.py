"""A worker that `multiprocess` has spawned, from its first line on: its environment is set before all imports."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main(settings: dict[str, Any], connection: Any, faults: Any) -> None:
    """Be a worker to the end.

    Args:
        settings: what the trainer tells it.
        connection: its end of the one way to the trainer.
        faults: the write end of a pipe, for what C code's faults leave.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    if hasattr(signal, "pthread_sigmask"):  # blocked since before it began
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(os, "setsid"):  # what the function does to its process group is not done to the trainer
        os.setsid()
    for name in settings["without"]:
        os.environ.pop(name, None)
    os.environ.update(settings["environment"])
    sys.path[:] = settings["path"]
    from loaderpool.supervisor.spawned.work import work

    work(settings, connection, faults)
