"""Raises in the trainer what happened in a worker."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

from loaderpool.errors import (
    LoaderpoolError,
    SampleError,
    SampleTimeoutError,
    SetupError,
    SourceLostError,
    SourceReadError,
    SpecMismatchError,
    WorkerLostError,
)
from loaderpool.plan.generator_positions import generated_item, item_name
from loaderpool.trainer.session.host_errors import host_lost_error
from loaderpool.trainer.session.source_lines import with_source_lines
from loaderpool.transport.bundles import OURS, OwnError
from loaderpool.transport.reports import (
    LOST_PIPES_STATUS,
    Failure,
    LostReport,
    Original,
    Verdict,
    how_it_ended,
    original_of,
    rebuild,
    unpickled,
)

_Error = TypeVar("_Error", bound=LoaderpoolError)


def sample_error(
    failure: Failure, cause: BaseException | None = None, preface: str = "", can_replay: bool = True
) -> LoaderpoolError:
    """Return the exception for a failure: a SampleError that is also of the user's type where such a class can be made.

    Args:
        failure: as it came from the worker.
        cause: the exception object itself, where the function ran in this process.
        preface: begins the message.
        can_replay: `replay` can run it.
    """
    failure = _with_source_lines(failure)
    original = original_of(cause) if cause is not None else unpickled(failure)
    if failure.is_setup:
        return setup_error(failure, "the setup hook raised")
    if failure.load_advice:
        return setup_error(failure, "a worker could not load function and source", failure.load_advice)
    if original is not None and issubclass(original.cls, SpecMismatchError):
        return _with_context(SpecMismatchError(preface + failure.text), failure, cause)
    message = preface + _message(failure, can_replay)
    told = {
        "index": _index_told(failure.index),
        "epoch": failure.epoch,
        "worker": failure.worker,
        "node": failure.node,
        "remote_traceback": failure.traceback_text,
        "original_type": failure.type_name,
    }
    error = _dual(SampleError, original, message, told) if original is not None else None
    if error is None:
        error = SampleTimeoutError(message) if failure.is_timeout else SampleError(message)
        vars(error).update(told)
    return _with_context(error, failure, cause)


def reading_error(ended: Failure | OwnError, position: int) -> LoaderpoolError:
    """Return the exception for what ended a stream.

    Args:
        ended: as `bundles.what_ended` told it.
        position: of the first item that no batch has.
    """
    return OURS[ended.kind](ended.text) if isinstance(ended, OwnError) else source_error(ended, position)


def source_error(failure: Failure, position: int, cause: BaseException | None = None) -> SourceReadError:
    """Return the exception for what reading a stream raised: also of that type where such a class can be made.

    Args:
        failure: what it was.
        position: of the first item that no batch has.
        cause: the exception object itself, where it is at hand.
    """
    failure = _with_source_lines(failure)
    original = original_of(cause) if cause is not None else unpickled(failure)
    message = (
        f"{failure.type_name}: {failure.text}\nraised by the source, while the batch from position {position} on was "
        f"read in epoch {failure.epoch}; all batches before it were delivered.\n\n"
        f"Traceback where the source is read:\n{failure.traceback_text}"
    )
    told = {
        "position": position,
        "epoch": failure.epoch,
        "remote_traceback": failure.traceback_text,
        "original_type": failure.type_name,
    }
    error = _dual(SourceReadError, original, message, told) if original is not None else None
    if error is None:
        error = SourceReadError(message)
        vars(error).update(told)
    return _with_context(error, failure, cause)


def setup_error(
    failure: Failure, what: str, advice: str = "", place: str = "", has_traceback: bool = True
) -> SetupError:
    """Return the exception for what failed before any sample, in the named place or else a worker's.

    Where it was no code of the user's, a traceback would only hide the advice.
    """
    failure = _with_source_lines(failure)
    text = f"{what}: {failure.type_name}: {failure.text}"
    if advice:
        text += f"\n{advice}"
    if has_traceback:
        text += f"\n\nTraceback in {place or _place(failure)}:\n{failure.traceback_text}"
    return SetupError(text)


def lost_error(report: LostReport, preface: str = "", can_replay: bool = True) -> WorkerLostError:
    """The exception for work given up because workers died over it; `preface` and `can_replay` as in `sample_error`."""
    if report.hosts:
        return host_lost_error(report, preface, _how_to_replay(None, report.epoch))
    ended = how_it_ended(report.exit_code or 0)
    name = ended.removeprefix("killed by ") if (report.exit_code or 0) < 0 else ""
    worker = f"a worker (pid {report.pid}{f', node {report.node}' if report.node else ''}){' was' * bool(name)} {ended}"
    if report.in_setup and report.verdict is not Verdict.STORM:
        text = f"{worker} in the setup hook; {report.deaths} in a row died before their first sample. "
    elif report.verdict is Verdict.ALONE and report.index is not None:
        text = (
            f"{worker} at {item_name(report.index)}, epoch {report.epoch}; {report.deaths} in a row died "
            "over this work, at last while this sample ran alone. "
        )
    elif report.verdict is Verdict.ALONE:
        text = f"{worker} in epoch {report.epoch}; {report.deaths} in a row died over the same work. "
    elif report.verdict is Verdict.TOGETHER:
        text = (
            f"{worker} in epoch {report.epoch}; {report.deaths} died over the same samples, though each of them ran "
            "alone without harm: together they are too much. "
        )
    elif report.verdict is Verdict.STORM:
        assert report.max_restarts is not None
        most, seconds = report.max_restarts
        text = (
            f"{report.deaths} workers died within {seconds:g} s, more than restarts=({most}, {seconds:g}) allows; "
            f"the last, {worker.removeprefix('a worker ')}. So many mean that the fault is general, not one sample's. "
        )
    else:
        text = f"{worker} before it had begun any sample, and so did {report.deaths - 1} before it. "
    text += _likely_cause(report, name, "setup hook" if report.in_setup else "function")
    if report.verdict is Verdict.ALONE and report.index is not None:
        text += _how_to_replay(report.index if can_replay else None, report.epoch)
    if report.stacks.strip():
        text += f"\n\nThe worker's last words:\n{with_source_lines(report.stacks).strip()}"
    error = WorkerLostError(preface + text)
    error.index, error.epoch, error.signal_name = _index_told(report.index), report.epoch, name
    error.node = report.node
    error.__dict__["report"] = report
    return error


def reader_lost_error(report: LostReport, position: int) -> SourceLostError:
    """Return the exception for the death of the process that reads a stream.

    Args:
        report: how it died, and in which epoch.
        position: of the first item that no batch has.
    """
    ended = how_it_ended(report.exit_code or 0)
    name = ended.removeprefix("killed by ") if (report.exit_code or 0) < 0 else ""
    text = (
        f"the process that reads the source's stream (pid {report.pid}) {'was ' if name else ''}{ended}, while the "
        f"batch from position {position} on was read in epoch {report.epoch}; all batches before it were delivered. "
        f"{_likely_cause(report, name, 'source')} The next pass reads the stream from its beginning, in a new process. "
        "To have it read in this process instead, once, pass iter(source)."
    )
    error = SourceLostError(text)
    error.position, error.epoch, error.signal_name = position, report.epoch, name
    return error


def _likely_cause(report: LostReport, signal_name: str, culprit: str) -> str:
    if report.was_stopped:
        return "It had been stopped (SIGSTOP) for 5 s, by the function or by somebody else, and was ended for it."
    if report.is_out_of_memory:
        return (
            "The kernel killed it for lack of memory (its count of such kills went up): lower `workers`, `batch_size` "
            "or `Limits.memory`, or give the machine (or its cgroup) more memory."
        )
    by_signal = {
        "SIGKILL": "SIGKILL usually is the kernel's OOM killer, whose counters however did not move, or somebody's "
        "kill -9: look at `dmesg`, or lower `workers` or `batch_size`.",
        "SIGSEGV": f"SIGSEGV is a fault inside a C extension that the {culprit} uses.",
        "SIGABRT": f"SIGABRT is an abort inside a C extension that the {culprit} uses.",
        "SIGBUS": "SIGBUS usually is a mapped file that became shorter, or memory that ran out.",
    }
    by_status = {
        LOST_PIPES_STATUS: "The function (or setup) closed file descriptors that are not its own, such as with "
        "os.closerange: among them were the worker's pipes. Close only what you opened.",
    }
    how = "" if signal_name else ", by os._exit or from C: sys.exit is an error as any exception is"
    return (
        by_signal.get(signal_name)
        or by_status.get(report.exit_code or 0)
        or f"The {culprit} (or a library that it uses) ended its process{how}."
    )


def _message(failure: Failure, can_replay: bool) -> str:
    if failure.index is not None:
        where = item_name(failure.index)
    elif failure.indices and (generated := generated_item(failure.indices[0])) is not None:
        where = f"a batch of generator {generated[0]}, from its item {generated[1]} on"
    elif failure.indices:
        shown = ", ".join(map(str, failure.indices[:8])) + (", ..." if len(failure.indices) > 8 else "")
        where = f"the batch of source indices [{shown}]"
    else:
        where = "a batch"
    first = failure.index if failure.index is not None else failure.indices[0] if failure.indices else None
    replay = ""
    if first is not None:
        replay = _how_to_replay(first if can_replay else None, failure.epoch, was_here=failure.worker is None)
    is_exit = failure.type_name == SystemExit.__name__
    called = f" The function called sys.exit({failure.text}), which ends no worker." if is_exit else ""
    return (
        f"{failure.type_name}: {failure.text}\nraised for {where}, epoch {failure.epoch}, in {_place(failure)}.{called}"
        f"{replay}\n\nTraceback in {_place(failure)}:\n{failure.traceback_text}"
    )


def _how_to_replay(index: int | None, epoch: int, was_here: bool = False) -> str:
    """Return a sentence with a space before it; nothing where there is nothing to say.

    Args:
        index: source index of the sample; None: `replay` cannot run it.
        epoch: of the sample.
        was_here: it ran in this process already.
    """
    command = ""
    if index is not None and generated_item(index) is None:
        command = f"`loaderpool replay TARGET --index {index} --epoch {epoch}`"
        script = str(getattr(sys.modules.get("__main__"), "__file__", None) or "<notebook>")
        if script.startswith("<"):  # also Python's own "<stdin>": there is no module to be named as TARGET
            command = f"`loaderpool.replay(loader, index={index}, epoch={epoch})`"
    if was_here:
        return command and f" To run it alone: {command}."
    return f" To run it in this process, for a debugger: {command}{', or ' if command else ''}workers=0."


def _index_told(index: int | None) -> int | None:
    """Return the attribute of an error: of what a generator yields its number there."""
    generated = None if index is None else generated_item(index)
    return index if generated is None else generated[1]


def _with_source_lines(failure: Failure) -> Failure:
    return dataclasses.replace(failure, traceback_text=with_source_lines(failure.traceback_text))


def _place(failure: Failure) -> str:
    if failure.worker is None:
        return "this process"
    return f"worker {failure.worker}" + (f" on node {failure.node}" if failure.node else "")


def _dual(ours: type[_Error], original: Original, message: str, told: dict[str, Any]) -> _Error | None:
    """Return an error of our type and the user's, made without calling the user's class; None where that fails."""
    user_type = original.cls
    # An exception that ends loops or programs must not do so here: only its name travels.
    if (
        not issubclass(user_type, Exception)
        or issubclass(user_type, (StopIteration, StopAsyncIteration, ours))
        or user_type is Exception
    ):
        return None
    try:
        # In the class, where they hide whatever the user's class has under these names, properties too.
        members = {**told, "__str__": lambda self: message, "__module__": user_type.__module__}
        both: Any = type(user_type.__name__, (ours, user_type), members)
        kept = {name: value for name, value in original.attributes.items() if name not in told}
        error: _Error = rebuild(both, original._replace(attributes=kept))
        str(error)
    except Exception:
        return None
    return error


def _with_context(error: _Error, failure: Failure, cause: BaseException | None = None) -> _Error:
    error.__dict__["failure"] = failure
    if cause is not None:
        error.__cause__ = cause
    return error
