"""A worker that `multiprocess` has spawned, from its first line on: its environment is set before all imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any


def main(settings: dict[str, Any], connection: Any) -> None:
    """Be a worker to the end. The connection is its one way to the trainer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    if hasattr(signal, "pthread_sigmask"):  # blocked since before it began
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(os, "setsid"):  # what the function does to its process group is not done to the trainer
        os.setsid()
    theirs = settings["environment"]
    for name in [name for name in os.environ if name not in theirs]:
        del os.environ[name]
    os.environ.update(theirs)
    if settings["directory"] is not None:
        with contextlib.suppress(OSError):  # it was deleted: it stays where the trainer is
            os.chdir(settings["directory"])
    sys.path[:] = settings["path"]
    _work(settings, connection)


def _work(settings: dict[str, Any], connection: Any) -> None:
    import faulthandler

    from loaderpool.supervisor.late_payloads import LatePayloads
    from loaderpool.supervisor.spawned.block import attach
    from loaderpool.system import process
    from loaderpool.worker.after_fork import serve, settle_process
    from loaderpool.worker.connection import ConnectedChannels
    from loaderpool.worker.loop import WorkerLoop

    process.become("worker")
    settle_process()
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)
    channels = ConnectedChannels(connection, settings["trainer_pid"])
    arena = attach(settings["block"], settings["block_bytes"])
    payloads = LatePayloads(arena, settings["places"], [], settings["changes"], settings["number"])
    serve(WorkerLoop(settings["number"], settings["cell"], arena, channels, payloads).run)
