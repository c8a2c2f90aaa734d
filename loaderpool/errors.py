"""Errors that loaderpool raises. Each is a `LoaderpoolError` and the matching builtin error.

A message contains the event, the thing concerned, the likely cause, and the setting to change with
its current value.
"""

from __future__ import annotations

import os
import reprlib
import sys
import warnings

# Public names. The functions of this module are internal.
__all__ = [
    "ArgumentError", "CacheError", "ClosedError", "ClusterError", "LargeDataWarning",
    "LoaderpoolError", "LoaderpoolWarning", "MemoryLimitError", "PoolBrokenError", "SampleError",
    "SampleTimeoutError", "SetupError", "SourceError", "SpecMismatchError", "StateError",
    "UnpicklableError", "WorkerLostError",
]  # fmt: skip
# Characters of a value in a message. Smaller: the value may not be recognized. Larger: the value
# hides the rest of the message.
_MOST_SHOWN = 200


class LoaderpoolError(Exception):
    """Base class of all loaderpool errors."""


class ArgumentError(LoaderpoolError, ValueError, TypeError):
    """Raised when an argument has a wrong value or type; the message names the argument."""


class SourceError(LoaderpoolError, TypeError, RuntimeError):
    """Raised when the source cannot be read or its stream raises; also of the original exception's
    type if possible.

    Attributes:
        position: Position in the stream of the first item that is in no batch, or `None`.
        epoch: Epoch in which the stream was read.
        remote_traceback: Traceback of the stream process, as a string.
        original_type: Qualified name of the original exception's class.
        signal_name: Signal that killed the stream process, such as `"SIGKILL"`, or empty.
    """

    position: int | None = None
    epoch: int | None = None
    remote_traceback: str = ""
    original_type: str = ""
    signal_name: str = ""


class UnpicklableError(LoaderpoolError, TypeError):
    """Raised when the function or the source cannot be pickled; the message names the variable."""


class SetupError(LoaderpoolError, RuntimeError):
    """Raised when a worker cannot load the function and the source, or when `setup` raises."""

    _load_error = ""  # class of the exception that loading them raised
    _advice = ""  # part of the message with the reason why loading failed


class SampleError(LoaderpoolError, RuntimeError):
    """Raised when your function raises; also of the original exception's type if possible.

    Attributes:
        index: Source index of the sample; `None` if a whole batch failed.
        epoch: Epoch of the sample.
        worker: Number of the worker; `None` for the main process.
        node: Address of the node of a `RayPool`, or empty.
        remote_traceback: Traceback in the worker, as a string.
        original_type: Qualified name of the original exception's class.
    """

    index: int | None = None
    epoch: int | None = None
    worker: int | None = None
    node: str = ""
    remote_traceback: str = ""
    original_type: str = ""


class SampleTimeoutError(SampleError, TimeoutError):
    """Raised when a sample runs longer than `Limits.timeout_s`; `remote_traceback` shows where it
    was.
    """


class SpecMismatchError(LoaderpoolError, ValueError):
    """Raised when the structure, shape or dtype of a sample does not match the element spec."""


class StateError(LoaderpoolError, ValueError):
    """Raised when a position cannot be saved, or when a saved position does not fit this loader."""


class CacheError(LoaderpoolError, ValueError):
    """Raised when a cache is damaged or belongs to another function, or when the cached function is
    random.
    """


class MemoryLimitError(LoaderpoolError, MemoryError):
    """Raised when `Limits.memory` or the free memory is too small; the message names the smallest
    limit that works.
    """


class ClosedError(LoaderpoolError, RuntimeError):
    """Raised when a loader or pool is used after it was closed, or in a process that does not own
    it.
    """


def add_note(error: BaseException, text: str) -> None:
    """Add a line to an error's traceback. Before Python 3.11, do nothing."""
    if hasattr(error, "add_note"):
        error.add_note(text)


def brief(value: object, most: int = _MOST_SHOWN) -> str:
    """Return the text of a value for messages: its repr in one line, cut to `most` characters."""
    look = reprlib.Repr()
    look.maxlevel, look.maxstring, look.maxlong, look.maxother = 4, 2 * most, 2 * most, 2 * most
    look.maxlist = look.maxtuple = look.maxdict = look.maxset = look.maxfrozenset = 30
    try:
        text = look.repr(value)
    # For example, an int is too long for Python to print, or reprlib mistakes a user's class for
    # a built-in one of that name.
    except Exception:
        text = f"<{type(value).__name__}>"
    return shortened(" ".join(text.split()) if "\n" in text else text, most)


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """Return the text, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def counted(number: float, noun: str) -> str:
    """Return a number with a noun: "1 node", "2,000,000 items", "1.5 CPUs"."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"
    return f"{digits} {noun}{'s' * (number != 1)}"


def readable_number(value: float) -> str:
    """Return a rate as text: with at least three digits and a separator of thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def readable_s(seconds: float) -> str:
    """Return a time as text in the largest of s, ms and µs in which it is at least 1."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def readable_bytes(nbytes: float) -> str:
    """Return a size in memory as text, in powers of 1,024."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def closed_error(what: str = "this Loader or its pool") -> ClosedError:
    """Return the error for the use of a closed object."""
    return ClosedError(f"{what} is closed: create a new one")


def foreign_error(owner_pid: int) -> ClosedError:
    """Return the error for the use of a loader in a fork of its owner."""
    return ClosedError(
        f"This loader belongs to process {owner_pid}. Process {os.getpid()} is a fork of it and "
        "must create its own loader."
    )


class PoolBrokenError(LoaderpoolError, RuntimeError):
    """Raised when the pool failed unexpectedly."""


class ClusterError(PoolBrokenError):
    """Raised when a Ray cluster is missing or lost; `state_dict()` then returns the position to
    resume from.
    """


class WorkerLostError(PoolBrokenError):
    """Raised when workers, or nodes of a `RayPool`, crash and their work cannot be repeated.

    Attributes:
        index: Source index of the sample that was running, or `None` if unknown.
        epoch: Epoch of that sample.
        signal_name: Signal that killed the worker, such as `"SIGKILL"`; empty if the worker exited
            by itself.
        node: Address of the node that was lost last, or empty.
        nodes: Address of each lost node, and the cause.
        batch: Number of the batch that was lost with the nodes, or `None`.
        indices: Source indices of its rows, at most 1000.
    """

    index: int | None = None
    epoch: int | None = None
    signal_name: str = ""
    node: str = ""
    nodes: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    indices: tuple[int, ...] = ()


class LoaderpoolWarning(RuntimeWarning):
    """Base class of all loaderpool warnings: training continues, but it is slower or uses outdated
    values.
    """


class LargeDataWarning(LoaderpoolWarning):
    """Issued when each worker copies a large list or dict; the message contains the line to
    write.
    """


def warn(what: str | Warning, through: str = "loaderpool") -> None:
    """Issue a warning at the innermost line of the user's code that led here.

    Args:
        what: text or warning.
        through: another package whose lines are skipped.

    Raises:
        Warning: a filter turns the warning into an error.
    """
    level, frame = 2, sys._getframe(1)
    packages = ("loaderpool", through)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(what, LoaderpoolWarning, stacklevel=level)
