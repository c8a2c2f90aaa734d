"""Named places in our own code where a test can have the process that passes by end, stop or raise.

For tests only: nothing happens unless the environment names a directory, `LOADERPOOL_FAULTS=/path`, when this module is
imported. A file in it with the name of a place says how, and is taken by the first process that reaches the place:

    echo SIGKILL > /path/worker.before_report

So "between the note and the completion" is exact, however many processes run; and since files come and go, one pool
serves many faults. A place is passed once a ticket or less often, never for each row: what an unarmed one costs is a
call that looks at one variable. A file with the name of a `setting` replaces a number that a test cannot wait for.

| place | who | when |
|---|---|---|
| `worker.idle` | worker | before each read of its pipe |
| `worker.ticket_taken` | worker | a ticket was read, nothing is noted yet |
| `worker.before_note` | worker | rows are in the slot, *finished* is not on the board |
| `worker.before_completion` | worker | *finished* is on the board, the completion is not sent |
| `worker.before_sending` | worker | *sending* is on the board, the completion with its bytes is not sent |
| `worker.after_sending` | worker | it is sent, *finished* is not on the board |
| `worker.before_report`, `worker.after_report` | worker | around the report to the supervisor |
| `supervisor.loading` | supervisor | before function and source are unpickled |
| `supervisor.forking`, `supervisor.forked` | supervisor | around the fork of a worker, before the trainer is told |
| `supervisor.dealing` | supervisor | before a worker is told something |
| `supervisor.burying` | supervisor | a worker was reaped, and nothing followed from it yet |
| `trainer.launched` | trainer | a supervisor was started, nothing is done with it yet |
| `trainer.waiting` | trainer | it was found that nothing is there yet, and nothing waits yet |
| `trainer.taken_in` | trainer | messages were read, and not looked at yet |
| `trainer.delivering` | trainer | a batch is off the shelf, and not the consumer's yet |
| `trainer.reader_launched` | trainer | a stream's reader was started and is not registered yet |
| `feed.before_entry` | trainer | a stream's items are in the arena, their batch is not entered |
| `feed.entered` | trainer | it is, and the supervisor is not told |
| `feed.at_end` | trainer | a stream has ended, and no listener is told |
| `reader.loading` | reader | before its stream is unpickled |
| `reader.pass_taken` | reader | it was told to read a pass |
| `reader.before_sending`, `reader.after_sending` | reader | around the items of a batch |
| `reader.before_end`, `reader.after_end` | reader | around the word that its stream has ended |
| `machine.reserve` | any process | before pages are reserved; how = ENOMEM stands for a machine that has none |
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal

_VARIABLE = "LOADERPOOL_FAULTS"
_EXIT_STATUS = 23

_directory = os.environ.get(_VARIABLE)


class _Fault(RuntimeError):
    """What a fault point raises."""


class _UnpicklableFault(_Fault):
    """What a fault point raises of a class whose instances cannot travel."""

    def __init__(self, text: str, needed: object) -> None:
        super().__init__(text)
        self.needed = needed
        self.held = lambda: None  # no pickle takes a function without a name

    def __reduce__(self) -> str:
        raise TypeError("this error cannot be pickled")


def arm(directory: str | None) -> None:
    """Have this process, and those that it starts from now on, look into a directory; None: none any more."""
    global _directory
    _directory = directory
    if directory is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = directory


def reach(place: str) -> None:
    """Pass this place: meet the fault that is laid there, if any. Runs in: any process."""
    if _directory is not None:
        _meet(_directory, place)


def setting(name: str, value: float) -> float:
    """Return the value, or the one that a test wants instead."""
    directory = os.environ.get(_VARIABLE)
    if directory is not None:
        with contextlib.suppress(OSError), open(os.path.join(directory, name), encoding="utf-8") as file:
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
    if how == "raise":
        raise _Fault(text)
    if how == "unpicklable":
        raise _UnpicklableFault(text, object())
    if how == "MemoryError":
        raise MemoryError(text)
    if how == "ENOMEM":
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if how == "sys.exit":
        raise SystemExit(_EXIT_STATUS)
    if how == "os._exit":
        os._exit(_EXIT_STATUS)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[how])
