"""Named places in our own code where a test can have the process that passes by end, stop or raise.

For tests only: nothing happens unless the environment names a directory, `LOADERPOOL_FAULTS=/path`, when this module is
imported. A file in it with the name of a place says how, and is taken by the first process that reaches the place:

    echo SIGKILL > /path/worker.before_report

A place is passed once a ticket or less often, never for each row. A file with the name of a `setting` replaces a number
that a test cannot wait for. `tests/faults/test_matrix.py` has all places, and what users get where one fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal

_VARIABLE = "LOADERPOOL_FAULTS"
_EXIT_STATUS = 23

directory = os.environ.get(_VARIABLE)


class _Fault(RuntimeError):
    """What a fault point raises."""


class _UnpicklableFault(_Fault):
    """What a fault point raises of a class whose instances cannot travel."""

    def __reduce__(self) -> str:
        raise TypeError("this error cannot be pickled")


def arm(faults: str | None) -> None:
    """Have this process, and those that it starts from now on, look into a directory; None: none any more."""
    global directory
    directory = faults
    if faults is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = faults


def reach(place: str) -> None:
    """Pass this place: meet the fault that is laid there, if any. Runs in: any process."""
    if directory is not None:
        _meet(directory, place)


def setting(name: str, value: float) -> float:
    """Return the value, or the one that a test wants instead."""
    directory = os.environ.get(_VARIABLE)
    if directory is not None:
        with (
            contextlib.suppress(OSError),
            open(os.path.join(directory, name), encoding="utf-8") as file,
        ):
            return float(file.read())
    return value


def _meet(directory: str, place: str) -> None:
    laid = os.path.join(directory, place)
    met = f"{laid}.met"
    try:
        os.rename(laid, met)  # one process takes it
    except OSError:
        return
    with open(met, encoding="utf-8") as file:
        how = file.read().strip()
    text = f"the fault that was laid at {place}"
    raised: dict[str, BaseException] = {
        "raise": _Fault(text),
        "unpicklable": _UnpicklableFault(text),
        "MemoryError": MemoryError(text),
        "ENOMEM": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        "sys.exit": SystemExit(_EXIT_STATUS),
    }
    if how in raised:
        raise raised[how]
    if how == "os._exit":
        os._exit(_EXIT_STATUS)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[how])
