"""A worker that is no fork: an interpreter of its own, which loads the payloads itself. `exec_start` starts it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.late_payloads import LatePayloads
from loaderpool.supervisor.watch import StackFile
from loaderpool.system import process
from loaderpool.worker.after_fork import become_worker, serve
from loaderpool.worker.loop import WorkerChannels, WorkerLoop


def main(start: Mapping[str, Any]) -> None:
    """The worker process, from the first import to its end."""
    process.become("worker", start["node"])
    become_worker(start["supervisor_pid"], (), ())
    for name in ("tickets", "reports", "completions", "socket", "stacks", "arena"):
        os.set_inheritable(start[name], False)  # the exec needed them inheritable; what the function starts needs none
    for _, *files in start["files"]:
        for file in files:
            os.set_inheritable(file, False)
    sys.argv = list(start["argv"])
    StackFile(start["stacks"]).arm()
    arena = Arena(start["arena"], start["arena_bytes"])
    to_trainer = socket.socket(fileno=start["socket"])
    channels = WorkerChannels(start["tickets"], start["reports"], start["completions"], to_trainer)
    payloads = LatePayloads(arena, start["places"], start["files"], start["changes"], start["number"])
    serve(WorkerLoop(start["number"], start["cell"], arena, channels, payloads).run)
