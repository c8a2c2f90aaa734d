"""Every error loaderpool raises: a `LoaderpoolError` that is also the builtin one would expect.

A message says what happened, to whom, the likely cause, and the setting to change with its present value.
"""

from __future__ import annotations

import itertools
import os
import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

# The public ones; the functions are our own.
__all__ = [
    "ArgumentError", "CacheError", "ClosedError", "ClusterError", "LargeDataWarning", "LoaderpoolError",
    "LoaderpoolWarning", "MemoryLimitError", "PoolBrokenError", "SampleError", "SampleTimeoutError", "SetupError",
    "SourceError", "SpecMismatchError", "StateError", "UnpicklableError", "WorkerLostError",
]  # fmt: skip
# Characters of a value in a message: fewer would hide which one it is, more would bury what is said of it.
_MOST_SHOWN = 200


class LoaderpoolError(Exception):
    """The base of all these errors."""


class ArgumentError(LoaderpoolError, ValueError, TypeError):
    """An argument has a wrong value or type."""


class SourceError(LoaderpoolError, TypeError, RuntimeError):
    """The source cannot be read, or its stream raised; also of that exception's type, where that can be.

    Attributes:
        position: of the first item in the stream that no batch has.
        epoch: in which the stream was read.
        remote_traceback: as text.
        original_type: qualified name of the exception's class.
        signal_name: such as "SIGKILL", where that ended the reading process.
    """

    position: int | None = None
    epoch: int | None = None
    remote_traceback: str = ""
    original_type: str = ""
    signal_name: str = ""


class UnpicklableError(LoaderpoolError, TypeError):
    """Function or source cannot travel to the workers; names the variable."""


class SetupError(LoaderpoolError, RuntimeError):
    """A worker could not load function and source, or `setup` failed."""


class SampleError(LoaderpoolError, RuntimeError):
    """The user's function raised; also of that exception's type, where that can be.

    Attributes:
        index: of the item in the source; None: a whole batch failed.
        epoch: in which it failed.
        worker: its number; None: this process.
        node: address, in a `RayPool`.
        remote_traceback: as text.
        original_type: qualified name of the exception's class.
    """

    index: int | None = None
    epoch: int | None = None
    worker: int | None = None
    node: str = ""
    remote_traceback: str = ""
    original_type: str = ""


class SampleTimeoutError(SampleError, TimeoutError):
    """A sample ran longer than `Limits.timeout_s`; `remote_traceback` is its stack."""


class SpecMismatchError(LoaderpoolError, ValueError):
    """A sample's structure, shape or dtype is not that of the element spec."""


class StateError(LoaderpoolError, ValueError):
    """A position cannot be saved, or a saved one does not fit this loader."""


class CacheError(LoaderpoolError, ValueError):
    """A cache is of another function, or damaged; or the function is random."""


class MemoryLimitError(LoaderpoolError, MemoryError):
    """`Limits.memory`, or what is free, is too small; names the least that works."""


class ClosedError(LoaderpoolError, RuntimeError):
    """The loader or pool was closed, or belongs to another process."""


class _Look(reprlib.Repr):
    """Cuts what would be written, or sorted, before it is cut, also within others."""

    def repr1(self, value: Any, level: int) -> str:
        if isinstance(value, (bytes, bytearray)):
            value = value[: self.maxstring // 2]
        elif type(value) is dict:
            value = dict(itertools.islice(value.items(), self.maxdict + 1))
        elif type(value) in (set, frozenset):
            value = type(value)(itertools.islice(value, self.maxset + 1))
        return super().repr1(value, level)


def brief(value: Any, most: int = _MOST_SHOWN) -> str:
    """Return a value as messages show it: its repr in one line, cut to `most` characters; little of it is looked at."""
    look = _Look()
    look.maxlevel, look.maxstring, look.maxlong, look.maxother = 4, 2 * most, 2 * most, 2 * most
    look.maxlist = look.maxtuple = look.maxdict = look.maxset = look.maxfrozenset = 30
    try:
        text = look.repr(value)
    except Exception:  # an int of more digits than Python writes; a class of the user's by a name that reprlib knows
        text = f"<{type(value).__name__}>"
    return shortened(" ".join(text.split()) if "\n" in text else text, most)


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """Return the text, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def counted(number: float, noun: str) -> str:
    """A number of things: "1 host", "2,000 hosts", "1.5 CPUs"."""
    return f"{number:,.6g} {noun}{'s' * (number != 1)}"


def readable_number(value: float) -> str:
    """A rate: three digits at least, with thousands set apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def readable_s(seconds: float) -> str:
    """A time, in s, ms or µs, whichever has the digits before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def readable_bytes(nbytes: float) -> str:
    """A size in memory, in powers of 1,024."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def closed_error(what: str = "this Loader, or its pool,") -> ClosedError:
    """What is raised where something that was closed is used."""
    return ClosedError(f"{what} is closed; make a new one")


def foreign_error(owner_pid: int) -> ClosedError:
    """What is raised where a fork of the process that owns a loader uses it."""
    return ClosedError(
        f"this loader belongs to process {owner_pid}; process {os.getpid()} is a fork of it and must make a loader of "
        "its own"
    )


class PoolBrokenError(LoaderpoolError, RuntimeError):
    """Something else ended the pool."""


class ClusterError(PoolBrokenError):
    """There is no such cluster, or it is gone. `state_dict()` has what was taken."""


class WorkerLostError(PoolBrokenError):
    """Workers, or hosts of a `RayPool`, died and their work could not be redone.

    Attributes:
        index: of the sample that ran, where known.
        epoch: of that sample.
        signal_name: such as "SIGKILL"; empty: the worker exited by itself.
        node: address of the last host.
        hosts: address of each host that died, and why.
        batch: that hosts died over.
        indices: its rows, at most 1000.
    """

    index: int | None = None
    epoch: int | None = None
    signal_name: str = ""
    node: str = ""
    hosts: tuple[tuple[str, str], ...] = ()
    batch: int | None = None
    indices: tuple[int, ...] = ()


class LoaderpoolWarning(RuntimeWarning):
    """Training goes on, but slower or with something old."""


class LargeDataWarning(LoaderpoolWarning):
    """Each worker copies a large list or dict; the message has the line to write."""
