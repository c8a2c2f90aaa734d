"""A worker that is no fork: an interpreter of its own, which loads payloads itself. `Processes` starts it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from loaderpool.core.channel import Channel
from loaderpool.core.processes import StackFile
from loaderpool.core.worker import Worker
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.system import process
from loaderpool.transport.payload.loaded import Change, Payloads, describe_load_error
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.own_process import become_worker, serve, settle_libraries
from loaderpool.worker.tickets import WorkFailed


class LatePayloads(dict[int, dict[str, Any]]):
    """Payloads by loader, each loaded when it is asked for first.

    Not at once: a loader may be unloaded while this process starts, and its place in the arena be another's. Who asks
    has a ticket for it.

    Args:
        arena: where they are.
        start: as `main` is told it.
    """

    def __init__(self, arena: Arena, start: Mapping[str, Any]) -> None:
        super().__init__()
        self._payloads = Payloads(arena, start["files"])
        self._places, self._changes, self._worker = start["places"], start["changes"], start["number"]
        self._failed: dict[int, WorkFailed] = {}

    def __missing__(self, loader: int) -> dict[str, Any]:
        if loader in self._failed:
            raise self._failed[loader]
        try:
            self._payloads.load(loader, *self._places[loader])
            if parts := self._changes.pop(loader, ()):  # they may be large
                pickled, *buffers = (bytearray().join(pieces) for pieces in parts)
                self._payloads.apply(loader, Change(bytes(pickled), buffers))
        except BaseException as error:
            failure = describe_failure(error, epoch=0, worker=self._worker, load_advice=describe_load_error(error))
            self._failed[loader] = WorkFailed(failure, error)
            raise self._failed[loader] from None
        settle_libraries()
        self[loader] = self._payloads.loaded[loader]
        return self[loader]


def main(start: Mapping[str, Any]) -> None:
    """The worker process, from the first import to its end."""
    process.become("worker", start["node"])
    become_worker(start["supervisor_pid"])
    inherited = [start[name] for name in ("arena", "slots", "channel", "stacks")]
    for descriptor in [*inherited, *(file for files in start["files"].values() for file in files)]:
        os.set_inheritable(descriptor, False)  # the exec needed it inheritable; what the function starts needs none
    sys.argv = list(start["argv"])
    StackFile(start["stacks"]).arm()
    arena, slots = Arena(start["arena"], start["arena_bytes"]), SlotFile(start["slots"])
    channel = Channel(socket.socket(fileno=start["channel"]))
    payloads = LatePayloads(arena, start)
    serve(Worker(start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]).run)
