"""Raises in the trainer what happened in a worker."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

from loaderpool.errors import (
    LoaderpoolError,
    SampleError,
    SetupError,
    SpecMismatchError,
    WorkerLostError,
)
from loaderpool.worker.failures import Failure, LostReport, unpickled

__all__ = ["lost_error", "sample_error", "setup_error"]

_Error = TypeVar("_Error", bound=LoaderpoolError)


def sample_error(failure: Failure, cause: BaseException | None = None) -> LoaderpoolError:
    """The exception for a failure: a SampleError that is also of the user's type where such a class can be made.

    Args:
        failure: as it came from the worker.
        cause: the exception object itself, where the function ran in this process.
    """
    original = cause if cause is not None else unpickled(failure)
    if failure.is_setup:
        return setup_error(failure, "the setup hook raised")
    if isinstance(original, SpecMismatchError):
        mismatch = SpecMismatchError(str(original))
        mismatch.__cause__ = cause
        return _with_context(mismatch, failure)
    message = _message(failure)
    error = _dual(type(original), message, original) if original is not None else SampleError(message)
    error.index, error.epoch, error.worker = failure.index, failure.epoch, failure.worker
    error.remote_traceback, error.original_type = failure.traceback_text, failure.type_name
    return _with_context(error, failure, cause)


def setup_error(failure: Failure, what: str, advice: str = "") -> SetupError:
    """The exception for code of the user that failed before any sample."""
    text = f"{what}: {failure.type_name}: {failure.text}"
    if advice:
        text += f"\n{advice}"
    return SetupError(f"{text}\n\nTraceback in {_place(failure)}:\n{failure.traceback_text}")


def lost_error(report: LostReport) -> WorkerLostError:
    """The exception for work given up because workers died over it."""
    code = report.exit_code
    name = ""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
    how = f"was killed by {name}" if name else f"exited with code {code}"
    where = f"at source index {report.index}" if report.index is not None else "at an unknown place"
    likely = {
        "SIGKILL": "SIGKILL usually is the kernel's OOM killer: lower `workers` or `batch_size`, or look at `dmesg`.",
        "SIGSEGV": "SIGSEGV is a fault inside a C extension that the function uses.",
        "SIGABRT": "SIGABRT is an abort inside a C extension that the function uses.",
        "SIGBUS": "SIGBUS usually is a mapped file that became shorter, or memory that ran out.",
    }.get(name, "The function (or a library that it uses) ended its process.")
    error = WorkerLostError(
        f"a worker (pid {report.pid}) {how} {where}, epoch {report.epoch}; {report.deaths} workers in a row died over "
        f"this work, so it was given up. {likely} With workers=0 the same sample runs in this process, for a debugger."
    )
    error.index, error.epoch, error.signal_name = report.index, report.epoch, name
    return error


def _message(failure: Failure) -> str:
    if failure.index is not None:
        where = f"source index {failure.index}"
    elif failure.indices:
        shown = ", ".join(map(str, failure.indices[:8])) + (", ..." if len(failure.indices) > 8 else "")
        where = f"the batch of source indices [{shown}]"
    else:
        where = "a batch"
    return (
        f"{failure.type_name}: {failure.text}\nraised for {where}, epoch {failure.epoch}, in {_place(failure)}. "
        "With workers=0 the same sample runs in this process, with the same random streams, for a debugger."
        f"\n\nTraceback in {_place(failure)}:\n{failure.traceback_text}"
    )


def _place(failure: Failure) -> str:
    return f"worker {failure.worker}" if failure.worker is not None else "this process"


def _dual(user_type: type[BaseException], message: str, original: BaseException) -> SampleError:
    """An instance of a class that is both a SampleError and the user's type, made without calling the user's class."""
    if issubclass(user_type, SampleError):
        return SampleError(message)
    try:

        def show(self: Any) -> str:
            return message

        # An exception that ends loops or programs must not do so here: only its name travels.
        if not issubclass(user_type, Exception) or issubclass(user_type, (StopIteration, StopAsyncIteration)):
            return SampleError(message)
        name = user_type.__name__
        members = {"__str__": show, "__module__": user_type.__module__}
        both: Any = type(name, (SampleError, user_type), members)
        error: SampleError = both.__new__(both)
        error.args = (message,)
        for key, value in vars(original).items():
            error.__dict__.setdefault(key, value)
        str(error)
        return error
    except Exception:
        return SampleError(message)


def _with_context(error: _Error, failure: Failure, cause: BaseException | None = None) -> _Error:
    error.__dict__["failure"] = failure
    if cause is not None:
        error.__cause__ = cause
    return error
