"""Reports of exceptions, in a form that can always be sent: texts, and the parts of the exception
that can be pickled.
"""

# The module does not have `from __future__ import annotations`, for the same reason as `messages`.
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
from loaderpool.transport.pickling import receive, send

# Errors that loaderpool raises itself while it reads a stream. Its other errors come from a loader
# that the stream itself reads.
OURS: tuple[type[LoaderpoolError], ...] = (MemoryLimitError, SourceError, UnpicklableError)
# Exit status of a worker whose pipes the user's function has closed. Its writes could reach a file,
# so it ends.
LOST_PIPES_STATUS = 86
# Frames of these modules are left out of remote tracebacks, because the user's own frames explain
# the error.
_OWN_PREFIX = "loaderpool"
_OWN_STACK_FRAME = os.path.join("loaderpool", "worker", "")
_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was created at run time, not in C
_Exception = TypeVar("_Exception", bound=BaseException)


class Original(NamedTuple):
    """Parts of an exception, which `rebuild` assembles without calling its class."""

    cls: type[BaseException]
    args: tuple[Any, ...]  # arguments of the built-in base class
    attributes: dict[str, Any]


def original_of(error: BaseException) -> Original:
    """Return the parts of an exception. Never raises."""
    # The user's class may override `__reduce__` and do anything, so the built-in base class is
    # used.
    _, args, *state = _builtin(type(error)).__reduce__(error)
    return Original(type(error), args, dict(*state))


def rebuild(cls: type[_Exception], original: Original) -> _Exception:
    """Assemble an exception as an instance of `cls`: the original's own class, or one derived from
    it.

    The class itself is not called, because the user's code may do anything. The exceptions of
    other code of the class are raised.
    """
    builtin = _builtin(cls)
    error: _Exception = builtin.__new__(cls, *original.args)
    builtin.__init__(error, *original.args)
    for name, value in original.attributes.items():
        with FailuresIgnored():  # the attribute may be read-only
            object.__setattr__(error, name, value)
    return error


def _builtin(cls: Any) -> Any:
    """Return the built-in class that defines the C struct of a class's instances."""
    while cls.__flags__ & _IS_HEAP_TYPE:
        cls = cls.__base__
    return cls


class Failure(NamedTuple):
    """An exception of the user's code (or of loaderpool about it), as the main process
    receives it.
    """

    type_name: str  # qualified name of the exception's class
    text: str  # `str(exception)`, or a substitute if that raises
    epoch: int
    worker: int | None  # None: the main process
    traceback_text: str = ""  # formatted; only the user's frames, if there are any
    pickled: bytes | None = None  # the `Original`: all parts that can be pickled and read back
    # source index; None if a whole batch failed
    index: int | None = None  # type: ignore[assignment]
    # source indices of the batch, if a whole batch failed (at most 1000)
    indices: tuple[int, ...] = ()
    position: int | None = None  # global position in the epoch, the key of its random stream
    is_setup: bool = False  # True if the `setup` hook raised, not the function
    # True if the sample exceeded `Limits.timeout_s`; the traceback is the worker's stacks
    is_timeout: bool = False
    load_advice: str = ""  # advice, if function and source could not be loaded in the worker
    node: str = ""  # address of the node; empty: this machine
    unseen: str = ""  # path of a FileNotFoundError on a node
    unseen_in: str = ""  # working directory of the process, if that path is relative
    shard: str = ""  # brief text of the generator's shard; empty: there are no shards
    preface: str = ""  # beginning of the message, before the text of the error


class RowFailure(NamedTuple):
    """A row that was left out or replaced."""

    failure: Failure
    row: int  # row in the batch
    batch: int = 0  # batch in the ticket


class GivenUp(enum.Enum):
    """Reason why work was abandoned."""

    ALONE = "alone"  # one sample (or one batch of batch_fn) ends its workers repeatedly
    TOGETHER = "together"  # samples of one task end workers, each time another one
    BEFORE = "before"  # workers end before they start any sample
    NODE = "node"  # nodes died repeatedly with this work, and the last of them had no other work
    STORM = "storm"  # more workers, or nodes, died in a short time than `restarts` allows


class LostReport(NamedTuple):
    """Work that was abandoned because workers died with it."""

    why: GivenUp
    # source index of the running sample, if the board had it
    index: int | None  # type: ignore[assignment]
    epoch: int
    exit_code: int | None  # exit code of the last worker; negative: minus a signal's number
    pid: int | None
    deaths: int
    stacks: str = ""  # stacks of the last worker, if its signal let faulthandler write them
    # True if the kernel's count of processes killed for memory has increased
    is_out_of_memory: bool = False
    # True if the last worker was stopped (SIGSTOP), and ended some seconds later because of it
    was_stopped: bool = False
    in_setup: bool = False  # True if the last worker died in the user's `setup` hook
    max_restarts: tuple[int, float] | None = None  # exceeded limit of `restarts`, for `STORM`
    # Batches of the epoch with which nodes died. The main process sets these and their source
    # indices.
    batches: range = range(0)
    # source indices of the batches, if the main process knows them (at most 1000)
    indices: tuple[int, ...] = ()
    node: str = ""  # address of the last worker's node; empty: this machine
    batch_argument: str = "batch_size"  # as in `LoaderSettings`
    nodes: tuple[tuple[str, str], ...] = ()  # addresses of dead nodes and the reasons, latest last


def shown_name(cls: type) -> str:
    """Return the qualified name of a class. Classes of loaderpool have no module, because users do
    not import it.
    """
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
    """Describe an exception, even if its own methods raise.

    Handlers of signals run afterwards; otherwise their exceptions would be dropped with those of
    the methods.
    """
    with InterruptsHeld():
        unseen = _unseen(error) if process.node() and isinstance(error, FileNotFoundError) else ""
        unseen_in = _working_directory() if unseen and not os.path.isabs(unseen) else ""
        text = _text(error)
        if unseen_in:
            text += (
                "\n"
                f"The path {unseen} is relative, and node {process.node()} looked for it in "
                f"{unseen_in}. Pass an "
            )
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
    """Return the report of an error that ended a stream.

    It does not refer to the error, whose traceback holds all frames it passed.
    """
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
    stacks: str = "",
    in_generator: bool = False,
    canceled: BaseException | None = None,
    rows: int = 1,
) -> Failure:
    """Describe a sample or generator that exceeded its time limit. Only the user's frames of the
    stacks are kept.

    Args:
        index: source index of the sample.
        epoch: epoch of the sample.
        worker: number of the worker; None: the main process.
        ran_s: seconds that the sample ran.
        timeout_s: its limit.
        stacks: stacks of the worker's threads.
        in_generator: True if a generator ran.
        canceled: the exception that ended a coroutine. None: the worker was replaced.
        rows: number of rows that one call of the source was reading, from `index` on.
    """
    what = "generator has not yielded" if in_generator else "sample ran"
    if rows > 1 and not in_generator:
        what = f"read of {rows} rows from there on (source.__getitems__) ran"
    text = (
        f"the {what} for {ran_s:.1f} s, longer than Limits(timeout_s={timeout_s:g}), and its "
        f"{'worker was replaced' if canceled is None else 'coroutine was canceled'}"
    )
    if in_generator:
        text += ". A generator cannot continue after this, so on_error= does not apply"
    shown = "\n\n".join(filter(None, map(_users_frames, stacks.split("\n\n")))) or stacks
    if canceled is not None:
        shown = _traceback(canceled)
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
    """Return the user's frames of one thread's stack; empty if the thread runs loaderpool's
    code.
    """
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
        # A plain str, even if `__str__` returns an instance of a subclass.
        return "".join([str(error)])
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
    """Return a pickle of the original's parts.

    The exception itself is not pickled, because its class need not accept its `args`.
    """
    cls, args, attributes = original_of(error)
    kept = {name: value for name, value in attributes.items() if _travels(value)}
    return _travels(Original(cls, args if _travels(args) else (), kept))


def _travels(value: object) -> bytes | None:
    """Return a pickle of the value; None if it cannot be pickled and read back."""
    with contextlib.suppress(BaseException):
        pickled = send(value)
        receive(pickled)
        return pickled
    return None


def unpickled(failure: Failure) -> Original | None:
    """Return the parts of the exception that were sent, or None."""
    with InterruptsHeld(), contextlib.suppress(BaseException):
        original: Original | None = receive(failure.pickled) if failure.pickled else None
        return original
    return None


def _packed(kind: str, *parts: object) -> bytes:
    return pickle.dumps((kind, *parts), 5)


# Packed reports, which `engine.failures.unpack` converts to exceptions. `of_sample`: the user's
# code raised, or took too long. `of_deaths`: workers died. `of_setup`: an earlier step failed; the
# texts are the subject, the advice and the place, as in `engine.failures.setup_error`.
of_sample: Callable[[Failure], bytes] = functools.partial(_packed, "sample")
of_deaths: Callable[[LostReport], bytes] = functools.partial(_packed, "lost")
of_setup: Callable[[Failure, str, str, str | None], bytes] = functools.partial(_packed, "setup")


def of_error(error: LoaderpoolError) -> bytes:
    """Return the packed report of one of loaderpool's own errors."""
    return _packed("error", type(error).__name__, str(error))
