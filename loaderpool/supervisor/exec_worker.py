"""A worker that is no fork: an interpreter of its own, which loads the payloads itself. `exec_start` starts it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.watch import StackFile
from loaderpool.system import role
from loaderpool.transport.payload.changes import Change, read_changes
from loaderpool.transport.payload.descriptors import ReceivedDescriptors
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.payload.unship import describe_load_error
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.after_fork import become_worker, serve, settle_libraries
from loaderpool.worker.channels import WorkerChannels
from loaderpool.worker.jobs import WorkFailed
from loaderpool.worker.loop import WorkerLoop


class _LatePayloads(dict[int, dict[str, Any]]):
    """Payloads by loader, each loaded when it is asked for first.

    Not at once: a loader may be unloaded while this process starts, and its place in the arena be another's. Who
    asks has been given work for it, and as long as there is any, the loader stays.
    """

    def __init__(
        self,
        arena: Arena,
        places: Iterable[tuple[int, int, int]],
        files: Iterable[Sequence[int]],
        changes: Sequence[Change],
        worker: int,
    ) -> None:
        super().__init__()
        self._payloads = Payloads(arena, ReceivedDescriptors(None, {loader: found for loader, *found in files}))
        self._places = {loader: (offset, nbytes) for loader, offset, nbytes in places}
        self._changes = changes
        self._worker = worker
        self._failed: dict[int, WorkFailed] = {}

    def __missing__(self, loader: int) -> dict[str, Any]:
        if loader in self._failed:
            raise self._failed[loader]
        try:
            self._payloads.load(loader, *self._places[loader])
            for change in self._changes:
                if change.loader == loader:
                    self._payloads.apply(change)
        except BaseException as error:
            failure = describe_failure(error, epoch=0, worker=self._worker, load_advice=describe_load_error(error))
            self._failed[loader] = WorkFailed(failure, error)
            raise self._failed[loader] from None
        settle_libraries()
        self[loader] = self._payloads.loaded[loader]
        return self[loader]


def main(start: Mapping[str, Any]) -> None:
    """The worker process, from the first import to its end."""
    role.become("worker")
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
    changes = [] if start["changes"] is None else read_changes(start["changes"])
    payloads = _LatePayloads(arena, start["places"], start["files"], changes, start["number"])
    serve(WorkerLoop(start["number"], start["cell"], arena, channels, payloads).run)
