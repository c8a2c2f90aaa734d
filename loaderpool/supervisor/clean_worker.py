"""A worker that is no fork: an interpreter of its own, which loads the payloads itself.

The supervisor's side is `CleanStart`; `main` is what the new process runs. It is slower to start (it imports what the
supervisor has imported already) and shares no memory with the others but what lies in the arena.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loaderpool import boot, role
from loaderpool.memory.arena import Arena
from loaderpool.supervisor.changes import Change, read_changes
from loaderpool.supervisor.loading import Payloads
from loaderpool.supervisor.parcels import Parcels
from loaderpool.supervisor.shipping import describe_load_error
from loaderpool.supervisor.watch import StackFile
from loaderpool.worker.failures import describe_failure
from loaderpool.worker.hygiene import become_worker, serve, settle_libraries
from loaderpool.worker.jobs import WorkFailed
from loaderpool.worker.loop import WorkerChannels, WorkerLoop

__all__ = ["CleanProcess", "CleanStart", "main"]


class CleanProcess:
    """A started one, with what the supervisor asks of a `multiprocess` process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit status, minus the signal's number where one ended it; None: it runs."""
        return self._process.poll()

    def join(self) -> None:
        """Reap it. Blocks until it has ended."""
        self._process.wait()


class CleanStart:
    """Starts workers by exec.

    Runs in: the supervisor. Made before any module of the user's is imported, so that these find the same when they are
    imported once more.

    Args:
        start: the supervisor's own settings.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._common = {name: start[name] for name in ("path", "argv", "arena", "arena_bytes")}
        self._common["supervisor_pid"] = os.getpid()
        self._environment = dict(os.environ)
        self._directory: str | None = None
        with contextlib.suppress(FileNotFoundError):  # it was deleted: inherited it can still be
            self._directory = os.getcwd()

    def start(self, number: int, cell: int, descriptors: Mapping[str, int], payloads: Payloads) -> CleanProcess:
        """Start a worker; it will load what it gets tickets for.

        Args:
            number: its number.
            cell: its cell of the board.
            descriptors: its ends, by the names that `main` knows.
            payloads: what it shall load.

        Raises:
            OSError: no memory, no more processes, no descriptors, or no interpreter any more.
        """
        changes = payloads.changes.file()
        files = [[loader, *found] for loader, found in payloads.parcels.by_loader().items()]
        inherited = [self._common["arena"], *descriptors.values(), *([] if changes is None else [changes])]
        inherited += (file for _, *found in files for file in found)
        settings = {**self._common, **descriptors, "number": number, "cell": cell, "changes": changes}
        settings["files"] = files
        settings["places"] = [(loader, *place) for loader, place in payloads.places.items()]
        file, nbytes = boot.write_settings(settings)
        try:
            process = subprocess.Popen(
                boot.command(__name__, file, nbytes, f"loaderpool-worker-{number}"),
                pass_fds=[file, *inherited],
                stdin=subprocess.DEVNULL,
                cwd=self._directory if self._directory and os.path.isdir(self._directory) else None,
                env=self._environment,
            )
        finally:
            os.close(file)
        return CleanProcess(process)


class _LatePayloads(dict[int, dict[str, Any]]):
    """Payloads by loader, each loaded when it is asked for first.

    Not at once: a loader may be unloaded while this process starts, and its place in the arena be somebody else's. Who
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
        self._payloads = Payloads(arena, Parcels(None, {loader: found for loader, *found in files}))
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
