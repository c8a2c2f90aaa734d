"""A child that the user's function forks in a worker: where it would go on as a second worker, it ends."""

from __future__ import annotations

import os
import sys
import traceback

from loaderpool.system import machine

_is_stray = False


def look_for_strays() -> None:
    """Have a fork of this process be known as one from now on. Runs in: a worker, once."""
    machine.at_forks(after_in_child=_note)


def _note() -> None:
    global _is_stray
    _is_stray = True


def end_stray(error: BaseException | None = None) -> None:
    """End this process where it is a worker's child; returns in every other one.

    Called wherever the user's code gives the word back to ours, before anything is written or told: slot, board and
    pipes are the worker's. A child that ends itself, as those of `multiprocessing` do, never comes here.

    Args:
        error: what the user's code raised. The child's status and texts are those that it would have had alone.
    """
    if not _is_stray:
        return
    status = 0
    try:
        if isinstance(error, SystemExit):
            status = _status_of(error)
        elif error is not None:
            status = 1
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
