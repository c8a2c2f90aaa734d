"""Starts workers that are no forks (`exec_worker`), where a fork would not be clean.

They are slower to start (each imports what the supervisor has imported already) and share no memory with the others but
what lies in the arena.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loaderpool.system import role
from loaderpool.transport.payload.loaded import Payloads

if TYPE_CHECKING:
    import subprocess


class CleanStart:
    """Starts workers by exec.

    Runs in: the supervisor. Made before any module of the user's is imported, so that these find the same when they are
    imported once more.

    Args:
        start: the supervisor's own settings.
    """

    def __init__(self, start: Mapping[str, Any]) -> None:
        self._common = {name: start[name] for name in ("path", "argv", "arena", "arena_bytes")}
        self._common["supervisor_pid"], self._common["node"] = os.getpid(), role.node()
        self._environment = dict(os.environ)
        self._directory: str | None = None
        with contextlib.suppress(FileNotFoundError):  # it was deleted: inherited it can still be
            self._directory = os.getcwd()

    def start(
        self, number: int, cell: int, descriptors: Mapping[str, int], payloads: Payloads
    ) -> subprocess.Popen[bytes]:
        """Start a worker; it will load what it gets tickets for.

        Args:
            number: its number.
            cell: its cell of the board.
            descriptors: its ends, by the names that `main` knows.
            payloads: what it shall load.

        Raises:
            OSError: no memory, no more processes, no descriptors, or no interpreter any more.
        """
        import subprocess  # few supervisors ever come here

        from loaderpool.transport import child_process

        changes = payloads.changes.file()
        files = [[loader, *found] for loader, found in payloads.received.by_loader().items()]
        inherited = [self._common["arena"], *descriptors.values(), *([] if changes is None else [changes])]
        inherited += (file for _, *found in files for file in found)
        settings = {**self._common, **descriptors, "number": number, "cell": cell, "changes": changes}
        settings["files"] = files
        settings["places"] = [(loader, *place) for loader, place in payloads.places.items()]
        file, nbytes = child_process.write_settings(settings)
        try:
            return subprocess.Popen(
                child_process.command("loaderpool.supervisor.exec_worker", file, nbytes, f"loaderpool-worker-{number}"),
                pass_fds=[file, *inherited],
                stdin=subprocess.DEVNULL,
                cwd=self._directory if self._directory and os.path.isdir(self._directory) else None,
                env=self._environment,
            )
        finally:
            os.close(file)
