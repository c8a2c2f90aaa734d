"""A worker that `multiprocess` has spawned, from its first line on: its environment is set before all imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any


def main(start: dict[str, Any], connection: Any) -> None:
    """Be a worker to the end. The connection is its one way to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer
    if hasattr(signal, "pthread_sigmask"):  # blocked since before it began
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(os, "setsid"):  # what the function does to its process group is not done to the main process
        os.setsid()
    os.environ.clear()
    os.environ.update(start["environment"])
    if start["directory"] is not None:
        with contextlib.suppress(OSError):  # it was deleted: it stays where the main process is
            os.chdir(start["directory"])
    sys.path[:], sys.argv = start["path"], list(start["argv"])
    _work(start, connection)


def _work(start: dict[str, Any], connection: Any) -> None:
    import faulthandler

    from loaderpool.core.connection import Connected, attach
    from loaderpool.core.exec_worker import LatePayloads
    from loaderpool.core.messages import Done
    from loaderpool.core.worker import Worker
    from loaderpool.memory.arena import SlotFile
    from loaderpool.memory.layout import VaryingLayout
    from loaderpool.system import machine, process
    from loaderpool.transport.reports import LOST_PIPES_STATUS
    from loaderpool.worker.after_fork import serve, settle_process

    def look() -> None:
        if os.getppid() != start["trainer_pid"]:
            raise EOFError

    def end() -> None:  # with the main process
        os._exit(0 if machine.file_identity(connection.fileno()) == identity else LOST_PIPES_STATUS)

    class SpawnedWorker(Worker):
        def _send_batch(self, answer: Done, batch: VaryingLayout) -> None:
            content = bytearray(batch.nbytes)
            with memoryview(content) as view:
                batch.write(view, 0)
            channel.send(answer, [content])

    process.become("worker")
    settle_process()
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)
    identity = machine.file_identity(connection.fileno())
    channel: Any = Connected(connection, look, end)
    arena = attach(start["arena"], start["arena_bytes"])
    block = attach(start["slots"], start["slots_bytes"])
    slots = SlotFile(block.descriptor, block.map)
    payloads = LatePayloads(arena, start)
    serve(SpawnedWorker(start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]).run)
