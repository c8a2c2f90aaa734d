"""What a worker does right after its start, before any user code: alone with its own pipes, quiet, and mortal."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from loaderpool.system import machine

_is_stray = False


def _note_stray() -> None:
    global _is_stray
    _is_stray = True


def end_stray(error: BaseException | None = None) -> None:
    """End this process where it is a worker's child; returns in every other one.

    Called wherever the user's code gives the word back to ours, before anything is written or told: slot, board and
    pipes are the worker's. A child that ends itself, as those of `multiprocessing` do, never comes here. After an
    error of the user's code, the child's status and texts are those that it would have had alone.
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


def become_worker(supervisor_pid: int, close_descriptors: Iterable[int] = ()) -> None:
    """Cut the ties to supervisor and trainer that a fork leaves; `close_descriptors` are those of others.

    Runs in: a worker, first thing. The supervisor is single-threaded, so its one thread is the one whose end kills us.
    """
    machine.die_with_parent(supervisor_pid)
    machine.raise_oom_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for descriptor in close_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    settle_process()


def settle_process() -> None:
    """Set this process up for the user's code, whichever way it was started."""
    # What the function frees is there for the next sample: fresh pages for each decoded image cost a third of the time.
    machine.keep_freed_blocks()
    # What the function prints is seen at once, and not lost in a buffer when the worker is ended.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    machine.at_forks(after_in_child=_note_stray)
    settle_libraries()
    gc.enable()


def settle_libraries() -> None:
    """Have libraries that are imported by now start no threads of their own."""
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def serve(run: Callable[[], None]) -> NoReturn:
    """Be a worker to the end, and end the process."""
    status = 1
    try:
        run()
        status = 0
    except (BrokenPipeError, ConnectionResetError):  # the supervisor is gone: all is over
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by the interpreter's own end, which would wait for threads that the function has left running.
        machine.flush_standard_streams()
        os._exit(status)
