"""A worker that is a fork of the supervisor: which inherits what that has loaded."""

from __future__ import annotations

import os
from collections.abc import Callable

from loaderpool import machine
from loaderpool.worker.hygiene import serve

__all__ = ["ForkedProcess"]


class ForkedProcess:
    """A forked one, from its first line to its exit status.

    By `os.fork` itself: a library for it costs its import in every supervisor
    (docs/decisions/0018-workers-are-forked-plainly.md).

    Args:
        run: what it does; then it ends, and never returns to what is on the supervisor's stack.

    Raises:
        OSError: no memory, or no more processes.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        machine.flush_standard_streams()  # or both would write what waits in them
        self._exitcode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            serve(run)

    @property
    def exitcode(self) -> int | None:
        """Its exit status, minus the signal's number where one ended it; None: it runs."""
        if self._exitcode is None:
            self._reap(os.WNOHANG)
        return self._exitcode

    def join(self) -> None:
        """Reap it. Blocks until it has ended."""
        if self._exitcode is None:
            self._reap(0)

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # it is gone, and how it ended was told to somebody else (or SIGCHLD is ignored)
            self._exitcode = 0
            return
        if pid:
            self._exitcode = os.waitstatus_to_exitcode(status)
