"""What a worker tells of an exception, in a form that always travels: texts, and of the rest whatever pickles."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from loaderpool.errors import LoaderpoolError, MemoryLimitError, SourceError, UnpicklableError
from loaderpool.system import process
from loaderpool.system.interrupts import FailuresIgnored, InterruptsHeld

# What we raise ourselves while a stream is read. Other errors of ours come from a loader that the stream itself reads.
OURS: tuple[type[LoaderpoolError], ...] = (MemoryLimitError, SourceError, UnpicklableError)
# The exit status of a worker whose pipes the user's function has closed: what it would write could reach a file.
LOST_PIPES_STATUS = 86
# Frames of these modules are left out of remote tracebacks: the user's own frames are what explains the error.
_OWN_PREFIX = "loaderpool"
_OWN_STACK_FRAME = os.path.join("loaderpool", "worker", "")
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time, not one of C's own
_Exception = TypeVar("_Exception", bound=BaseException)


class Original(NamedTuple):
    """An exception taken apart, so that it can be put together again without calling its class."""

    cls: type[BaseException]
    args: tuple[
        Any, ...
    ]  # what the class of Python's own, from which its class is derived, is made with
    attributes: dict[str, Any]


def original_of(error: BaseException) -> Original:
    """Take an exception apart; never raises."""
    _, args, *state = _builtin(type(error)).__reduce__(
        error
    )  # not that of the user's class, which may do anything
    return Original(type(error), args, dict(*state))


def rebuild(cls: type[_Exception], original: Original) -> _Exception:
    """Return an exception put together again, as one of this class: the original's own, or one derived from it.

    No class is called, for it may be the user's and do anything. Raises what such a class's parts raise.
    """
    builtin = _builtin(cls)
    error: _Exception = builtin.__new__(cls, *original.args)
    builtin.__init__(error, *original.args)
    for name, value in original.attributes.items():
        with FailuresIgnored():  # read-only
            object.__setattr__(error, name, value)
    return error


def _builtin(cls: Any) -> Any:
    """Return the class of Python's own whose C struct the instances of a class have."""
    while cls.__flags__ & _IS_HEAP_TYPE:
        cls = cls.__base__
    return cls


class Failure(NamedTuple):
    """An exception of the user's code (or of ours about it) as the trainer gets it."""

    type_name: str  # qualified name of its class
    text: str  # str(exception), or a stand-in where that raises
    epoch: int
    worker: int | None  # None: in the caller's process
    traceback_text: str = ""  # formatted, with the user's frames only where there are any
    pickled: bytes | None = None  # the `Original`, as far as it can be pickled and read back
    index: int | None = None  # type: ignore[assignment]  # source index; None where a whole batch failed
    indices: tuple[
        int, ...
    ] = ()  # the batch's source indices, where the whole batch failed (at most 1000)
    position: int | None = None  # global position in the epoch, the key of its random stream
    is_setup: bool = False  # the `setup` hook raised, not the function
    is_timeout: bool = (
        False  # the sample ran past `Limits.timeout_s`; the traceback is the worker's stacks
    )
    load_advice: str = (
        ""  # function and source could not be loaded in the worker, and what to do about it
    )
    node: str = ""  # the address of where it was; empty: this machine
    unseen: str = ""  # the path of a FileNotFoundError on a node
    unseen_in: str = ""  # the directory of that process, if the path is relative


class RowFailure(NamedTuple):
    """A row that was left out or replaced."""

    failure: Failure
    row: int  # within the batch
    batch: int = 0  # within the ticket


class GivenUp(enum.Enum):
    """Why work was given up."""

    ALONE = "alone"  # one sample (or batch_fn's one batch) ends its worker again and again
    TOGETHER = "together"  # all of a task's samples do, now at one of them and now at another
    BEFORE = "before"  # workers end before they have begun any sample
    NODE = "node"  # nodes that had it died again and again, the last while it had nothing else
    STORM = "storm"  # more workers, or nodes, died in a short time than `restarts` allows


class LostReport(NamedTuple):
    """Work that was given up because workers died over it."""

    why: GivenUp
    index: int | None  # type: ignore[assignment]  # source index of the sample that was running, where the board knew
    epoch: int
    exit_code: int | None  # of the last worker: negative is minus a signal's number
    pid: int | None
    deaths: int
    stacks: str = ""  # of the last worker, where its signal let faulthandler write them
    is_out_of_memory: bool = False  # the kernel's count of processes killed for memory went up
    was_stopped: bool = (
        False  # the last worker was stopped (SIGSTOP), and after some seconds ended for it
    )
    in_setup: bool = False  # the last worker died in the user's `setup` hook
    max_restarts: tuple[int, float] | None = None  # the limit that a storm has passed
    batches: range = range(
        0
    )  # of that epoch, over which nodes died; the trainer enters them, and their source indices
    indices: tuple[int, ...] = ()  # where it can name them (at most 1000)
    node: str = ""  # the address of the last worker's node; empty: this machine
    nodes: tuple[tuple[str, str], ...] = ()  # that died: their addresses, and why, the latest last


def shown_name(cls: type) -> str:
    """Return a class's qualified name; of our own classes without the module, which users do not import."""
    module = "loaderpool" if str(cls.__module__).startswith("loaderpool.") else cls.__module__
    return f"{module}.{cls.__qualname__}".removeprefix("builtins.")


def describe_failure(
    error: BaseException,
    *,
    epoch: int,
    worker: int | None,
    index: int | None = None,
    indices: tuple[int, ...] = (),
    position: int | None = None,
    load_advice: str = "",
) -> Failure:
    """Describe an exception, whatever the exception's own methods raise.

    Signals' handlers run when that is done: what they raise would be dropped with the rest.
    """
    with InterruptsHeld():
        unseen = _unseen(error) if process.node() and isinstance(error, FileNotFoundError) else ""
        unseen_in = _working_directory() if unseen and not os.path.isabs(unseen) else ""
        text = _text(error)
        if unseen_in:
            text += f"\nThe path {unseen} is relative, and node {process.node()} looked for it in {unseen_in}. Pass an "
            text += "absolute path that exists on all nodes."
        return Failure(
            type_name=shown_name(type(error)),
            text=text,
            traceback_text=_traceback(error),
            pickled=_pickled(error),
            index=index,
            indices=indices[:1000],
            epoch=epoch,
            position=position,
            worker=worker,
            load_advice=load_advice,
            node=process.node(),
            unseen=unseen,
            unseen_in=unseen_in,
        )


def what_ended(error: BaseException, epoch: int) -> Failure | LoaderpoolError:
    """What is told of an error that ended a stream; without the error, which holds every frame that it passed."""
    if isinstance(error, LoaderpoolError) and type(error) in OURS:
        return type(error)(str(error))
    return describe_failure(error, epoch=epoch, worker=None)


def describe_timeout(
    *,
    index: int,
    epoch: int,
    worker: int | None,
    ran_s: float,
    timeout_s: float,
    stacks: str,
    in_generator: bool = False,
) -> Failure:
    """Describe a sample or generator that ran past its time; of its thread's stack the user's frames are kept."""
    what = "generator has not yielded" if in_generator else "sample ran"
    text = f"the {what} for {ran_s:.1f} s, longer than Limits(timeout_s={timeout_s:g}), and its worker was replaced"
    if in_generator:
        text += ". A generator cannot continue after this, so on_error= does not apply"
    shown = "\n\n".join(filter(None, map(_users_frames, stacks.split("\n\n")))) or stacks
    return Failure(
        "TimeoutError",
        text,
        epoch,
        worker,
        shown,
        index=index,
        is_timeout=True,
        node=process.node(),
    )


def _users_frames(stack: str) -> str:
    """Return one thread's stack down to where our code called the user's; "": the thread is in our code."""
    lines = stack.strip().splitlines()
    own = next(
        (number for number, line in enumerate(lines) if _OWN_STACK_FRAME in line), len(lines)
    )
    return "\n".join(lines[:own]) if own > 1 else ""


def how_it_ended(exit_code: int) -> str:
    """Return an exit status in words."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _unseen(error: FileNotFoundError) -> str:
    name = error.filename
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else ""


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a directory that was deleted"


def _text(error: BaseException) -> str:
    try:
        return "".join(
            [str(error)]
        )  # a plain str, also where __str__ returns one of a class of its own
    except BaseException as second:
        return f"<str() of {type(error).__name__} raised {type(second).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        shown = _without_own_frames(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, shown))
    except BaseException as second:
        frames = "".join(traceback.format_tb(_without_own_frames(error.__traceback__)))
        return f"{frames}{type(error).__name__}: <formatting it raised {type(second).__name__}>"


def _without_own_frames(shown: TracebackType | None) -> TracebackType | None:
    first = shown
    while (
        first is not None
        and first.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _OWN_PREFIX
    ):
        first = first.tb_next
    return first if first is not None else shown


def _pickled(error: BaseException) -> bytes | None:
    """Return the original as it travels: never the exception itself, for a class need not be callable with its args."""
    cls, args, attributes = original_of(error)
    kept = {name: value for name, value in attributes.items() if _travels(value)}
    return _travels(Original(cls, args if _travels(args) else (), kept))


def _travels(value: Any) -> bytes | None:
    """Return the value's pickle, where it can be read back."""
    from loaderpool.transport.pickling import receive, send

    with contextlib.suppress(BaseException):
        pickled = send(value)
        receive(pickled)
        return pickled
    return None


def unpickled(failure: Failure) -> Original | None:
    """Return what travelled of the exception itself, or None."""
    from loaderpool.transport.pickling import receive

    with InterruptsHeld(), contextlib.suppress(BaseException):
        original: Original | None = receive(failure.pickled) if failure.pickled else None
        return original
    return None


def _packed(kind: str, *parts: Any) -> bytes:
    return pickle.dumps((kind, *parts), 5)


# Sent where the user's code raised or took too long, where workers died, and where something failed before that,
# with what, advice and place as `setup_error` has them. `core.failures.unpack` makes an exception of it.
of_sample: Callable[[Failure], bytes] = functools.partial(_packed, "sample")
of_deaths: Callable[[LostReport], bytes] = functools.partial(_packed, "lost")
of_setup: Callable[[Failure, str, str, str | None], bytes] = functools.partial(_packed, "setup")


def of_error(error: LoaderpoolError) -> bytes:
    """Return what is sent of an error of ours."""
    return _packed("error", type(error).__name__, str(error))
