"""Payloads that a worker loads itself, where it is no fork of a process that has loaded them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loaderpool.memory.arena import Arena
from loaderpool.transport.payload.loaded import Change, Payloads, ReceivedDescriptors, describe_load_error
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.after_fork import settle_libraries
from loaderpool.worker.jobs import WorkFailed


class LatePayloads(dict[int, dict[str, Any]]):
    """Payloads by loader, each loaded when it is asked for first.

    Not at once: a loader may be unloaded while this process starts, and its place in the arena be another's. Who
    asks has been given work for it, and as long as there is any, the loader stays.
    """

    def __init__(
        self,
        arena: Arena,
        places: Iterable[tuple[int, int, int]],
        files: Iterable[Sequence[int]],
        changes: dict[int, list[list[bytes | bytearray]]],  # as `plain` has them
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
