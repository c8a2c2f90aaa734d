"""What a worker tells of an exception, in a form that always travels: texts, and the exception itself if it pickles."""

from __future__ import annotations

import dataclasses
import traceback
from types import TracebackType
from typing import Any

__all__ = ["Failure", "LostReport", "RowFailure", "describe_failure", "unpickled"]

# Frames of these modules are left out of remote tracebacks: the user's own frames are what explains the error.
_OWN_PREFIX = "loaderpool"


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception of the user's code (or of ours about it) as the trainer gets it."""

    type_name: str  # qualified name of its class
    text: str  # str(exception), or a stand-in where that raises
    traceback_text: str  # formatted, with the user's frames only where there are any
    pickled: bytes | None  # the exception itself, where it can be pickled and read back
    index: int | None  # source index; None where a whole batch failed
    indices: tuple[int, ...]  # the batch's source indices, where the whole batch failed (at most 1000)
    epoch: int
    position: int | None  # global position in the epoch, the key of its random stream
    worker: int | None  # None: in the caller's process
    is_setup: bool = False  # the `setup` hook raised, not the function


@dataclasses.dataclass(frozen=True)
class RowFailure:
    """A row that was left out or replaced."""

    failure: Failure
    row: int  # within the batch


@dataclasses.dataclass(frozen=True)
class LostReport:
    """Work that was given up because workers died over it."""

    index: int | None  # source index of the sample that was running, where the board knew
    epoch: int
    exit_code: int | None  # of the last worker: negative is minus a signal's number
    pid: int | None
    deaths: int


def describe_failure(
    error: BaseException,
    *,
    epoch: int,
    worker: int | None,
    index: int | None = None,
    indices: tuple[int, ...] = (),
    position: int | None = None,
) -> Failure:
    """Describe an exception; never raises, whatever the exception's own methods do."""
    return Failure(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        text=_text(error),
        traceback_text=_traceback(error),
        pickled=_pickled(error),
        index=index,
        indices=indices[:1000],
        epoch=epoch,
        position=position,
        worker=worker,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:
        return f"<str() of the {type(error).__name__} raised {type(second).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        shown = _without_own_frames(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, shown))
    except BaseException as second:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"{frames}{type(error).__name__}: <formatting it raised {type(second).__name__}>"


def _without_own_frames(shown: TracebackType | None) -> TracebackType | None:
    first = shown
    while first is not None and first.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _OWN_PREFIX:
        first = first.tb_next
    return first if first is not None else shown


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    from loaderpool.receiving import receive

    try:
        bare = error.with_traceback(None)
        pickled: bytes = cloudpickle.dumps(bare)
        receive(pickled)  # classes that cannot be rebuilt from their args fail here, not in the trainer
    except BaseException:
        return None
    return pickled


def unpickled(failure: Failure) -> Any:
    """The exception object itself, or None."""
    if failure.pickled is None:
        return None
    from loaderpool.receiving import receive

    try:
        return receive(failure.pickled)
    except BaseException:
        return None
