"""Which part of a stack is the user's: what stands behind the call that a worker makes of a function or a source."""

from __future__ import annotations

import functools
import os
from typing import Literal

from loaderpool.system.installed import is_library_file
from loaderpool.tools.profiling.recording import Place, Stack

Kind = Literal["idle", "loaderpool", "function", "other"]

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
# Where workers have nothing to do: they wait for a ticket, for their threads, or as a thread for a call.
_IDLE = {
    ("worker/channels.py", "read"),
    ("worker/connection.py", "read"),
    ("worker/connection.py", "_receive"),
    ("worker/threads.py", "_wait"),
    ("worker/threads.py", "_serve"),
}
# What they call is the user's. Code that any other module of ours calls, in NumPy, say, does our work.
_CALLERS = {
    "worker/calls.py",
    "worker/cached.py",
    "worker/lane.py",
    "worker/lanes.py",
    "worker/work.py",
    "plan/window.py",
}
# Where a call of a function that has no Python code is the innermost place there is.
_CALLS_IN_C = {("worker/calls.py", name) for name in ("samples", "unit", "_plain")}


def part_of(stack: Stack, in_c: str = "") -> tuple[Kind, Stack]:
    """Return what a thread was at, and of a function's stack the places from the first one behind our own on.

    A thread that the function has started has no place of ours; it counts where code of the user's own is on its stack,
    and is "other" where none is: one of a pool that has nothing to do.

    Args:
        stack: all of it.
        in_c: what to call a call of a function that has no Python code; empty: all of them have some.
    """
    ours = [(at, inner) for at, place in enumerate(stack) if (inner := _inner(place.file))]
    if not ours:
        own = [at for at, place in enumerate(stack) if is_own(place)]
        return ("function", stack[own[0] :]) if own else ("other", ())
    entry = _entry(stack)
    if entry is not None:
        return "function", stack[entry:]
    at, inner = ours[-1]
    if inner.startswith("tools/"):
        return "other", ()
    where = inner, stack[at].function.rpartition(".")[2]
    if where in _IDLE:
        return "idle", ()
    if in_c and where in _CALLS_IN_C and at == len(stack) - 1:
        return "function", (Place(in_c, "", 0, 0),)
    return "loaderpool", ()


def _entry(stack: Stack) -> int | None:
    """Return where the first call of the user's stands: of code that is not ours, or of a source."""
    is_called = False
    for at, place in enumerate(stack):
        inner = _inner(place.file)
        if is_called and (not inner or inner.startswith("sources/")):
            return at
        is_called = inner in _CALLERS
    return None


@functools.lru_cache(4096)
def _inner(file: str) -> str:
    """Return a file's path within this package; empty: it is not ours."""
    return file[len(_PACKAGE) :].replace(os.sep, "/") if file.startswith(_PACKAGE) else ""


@functools.lru_cache(4096)
def _is_own_file(file: str) -> bool:
    return bool(file) and not file.startswith("<frozen") and not is_library_file(file)


def is_own(place: Place) -> bool:
    """Whether the code is the user's own, and no library's."""
    return _is_own_file(place.file)
