"""Named places in loaderpool's code where a test can make the running process end, stop or raise.

For tests only. Nothing happens unless the environment variable `LOADERPOOL_FAULTS=/path` names a
directory when this module is imported. A file in that directory with the name of a place contains
the kind of fault. The first process that reaches the place takes the file:

    echo SIGKILL > /path/worker.before_report

A process reaches a place at most once per ticket, never once per row. A file with the name of a
`setting` replaces a number, if a test cannot wait that long. `setting` reads the environment at
each call. `tests/faults/test_matrix.py` lists all places, and the expected outcome of a fault at
each.
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
    """Error that a fault point raises."""


class _UnpicklableFault(_Fault):
    """Error that a fault point raises and that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("this error cannot be pickled")


def arm(faults: str | None) -> None:
    """Use a directory of faults in this process and in those that it starts. None: no faults."""
    global directory
    directory = faults
    if faults is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = faults


def reach(place: str) -> None:
    """Trigger the fault that a test has put at this place, if any. Runs in: any process."""
    if directory is not None:
        _meet(directory, place)


def setting(name: str, value: float) -> float:
    """Return the value, or the one with which a test replaces it."""
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
        os.rename(laid, met)  # only one process succeeds
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
