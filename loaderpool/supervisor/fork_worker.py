"""A worker that is a fork of the supervisor: which inherits what that has loaded."""

from __future__ import annotations

import os
from collections.abc import Callable

from loaderpool.system import machine
from loaderpool.worker.after_fork import serve


class ForkedProcess:
    """A forked worker, from its first line to its exit status; methods are named as in `subprocess.Popen`.

    By `os.fork` itself: a library for it costs its import in every supervisor
    (docs/decisions/0018-workers-are-forked-plainly.md).

    Args:
        run: what it does; then it ends, and never returns to what is on the supervisor's stack.

    Raises:
        OSError: no memory, or no more processes.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        machine.flush_standard_streams()  # or both would write what waits in them
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
            serve(run)

    def poll(self) -> int | None:
        """Return its exit status, minus the signal's number where one ended it; None: it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Return its exit status once it has ended. Blocks until then."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another caller was told how it ended, or SIGCHLD is ignored
                self._status = 0
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status
