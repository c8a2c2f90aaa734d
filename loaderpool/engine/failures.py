"""Make the exceptions for errors in a worker or supervisor. Runs in: the main process.

`transport.reports` describes the errors, and pickles them in the other process.
"""

from __future__ import annotations

import linecache
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from loaderpool import errors
from loaderpool.errors import (
    LoaderpoolError,
    SampleError,
    SampleTimeoutError,
    SetupError,
    SourceError,
    SpecMismatchError,
    WorkerLostError,
    counted,
)
from loaderpool.plan.item_names import generated_item, item_name
from loaderpool.system.interrupts import FailuresIgnored, is_of_a_handler
from loaderpool.transport.reports import (
    LOST_PIPES_STATUS,
    Failure,
    GivenUp,
    LostReport,
    Original,
    how_it_ended,
    original_of,
    rebuild,
    unpickled,
)


def may_pass(packed: bytes) -> bool:
    """Return True if a retry may succeed, for example after the failure of a sample.

    Args:
        packed: Pickled error from a `Filled` or `Status`.
    """
    return pickle.loads(packed)[0] in ("sample", "lost")


def unpack(packed: bytes) -> LoaderpoolError:
    """Return the exception to raise in the main process, a new one at each call.

    Args:
        packed: Pickled error from a `Filled` or `Status`.
    """
    kind, *parts = pickle.loads(packed)
    if kind == "error":
        ours: LoaderpoolError = getattr(errors, parts[0])(parts[1])
        return ours
    makers: dict[str, Callable[..., LoaderpoolError]] = {
        "sample": sample_error,
        "lost": lost_error,
        "setup": setup_error,
    }
    return makers[kind](*parts)


def _node_lost_error(report: LostReport) -> WorkerLostError:
    """Return the exception for work that was abandoned because nodes died (`report.nodes`)."""
    address, why = report.nodes[-1]
    what = "in a row before they started any batch"
    advice = (
        "Check the environment (actor_options=), the versions of Python and Ray, and the memory of "
        "the nodes."
    )
    if report.why is GivenUp.NODE:
        what = f"over {_work(report)}"
        advice = (
            "A crash in a sample ends only a worker, so the node probably ran out of memory. Lower "
            f"{report.batch_argument} or workers_per_node, or reserve more memory on each node "
            "with actor_options=."
        )
    elif report.why is GivenUp.STORM:
        what = f"within {_more_than_allowed(report)}"
        advice = "Check the memory of the nodes, the network, and what else ends processes there."
    times, last = counted(report.deaths, "time"), f"node {address}: {why.rstrip('.')}"
    error = WorkerLostError(f"Nodes were lost {times} {what}. The last was {last}. {advice}")
    error.epoch, error.indices, error.nodes, error.node = (
        report.epoch,
        report.indices,
        report.nodes,
        address,
    )
    error.batch = report.batches.start if report.batches else None
    return error


def _more_than_allowed(report: LostReport) -> str:
    most, seconds = report.max_restarts or (0, 0.0)
    return f"{seconds:g} s, more than restarts=({most}, {seconds:g}) allows"


def _shown(indices: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''}]"


def _work(report: LostReport) -> str:
    batches = report.batches
    what = (
        f"batch {batches.start}"
        if len(batches) == 1
        else f"batches {batches.start} to {batches.stop - 1}"
    )
    work = (
        f"{what} of epoch {report.epoch}" if batches else f"the same task in epoch {report.epoch}"
    )
    if report.indices:
        work += f" (source indices {_shown(report.indices)})"
    return work


# A frame without its source line, as `traceback` writes it, also in an exception group, and as
# faulthandler writes it. faulthandler never writes source lines.
_FRAME = re.compile(r'^([ |]*  )File "([^"]+)", line (\d+),? in .*$(?!\n\1  )', re.MULTILINE)


def with_source_lines(text: str) -> str:
    """Return a text of tracebacks, with missing source lines added if this process has them.

    A worker cannot read the source of notebook cells from a file. IPython keeps it in the
    `linecache` of the main process.
    """
    return _FRAME.sub(_with_source_line, text)


def _with_source_line(frame: re.Match[str]) -> str:
    source = ""
    # "<string>" is the file of `python -c`, dataclasses and namedtuples alike, so a line of it may
    # be that of other code.
    if frame[2] != "<string>":
        with FailuresIgnored():  # other code may have put anything into linecache
            source = linecache.getline(frame[2], int(frame[3])).strip()
    return f"{frame[0]}\n{frame[1]}  {source}" if source else frame[0]


command_target = ""  # TARGET of the `loaderpool` command that is running; empty: none is
_Error = TypeVar("_Error", bound=LoaderpoolError)
# Errors of loading whose cause `describe_load_error` names, so no search for a variable is needed.
_ADVISED_ON = frozenset({"AuthenticationError", "ModuleNotFoundError"})


def sample_error(
    failure: Failure, cause: BaseException | None = None, preface: str = ""
) -> LoaderpoolError:
    """Return the exception for a failure of the user's code.

    It is a `SampleError` that is also of the user's type if such a class can be made. Failures of
    `setup` and of loading are a `SetupError`. Errors of this package keep their class.

    Args:
        failure: Failure from the worker.
        cause: Exception object, if the function ran in this process.
        preface: Beginning of the message.
    """
    failure, preface = _with_source_lines(failure), preface + failure.preface
    if failure.is_setup:
        return setup_error(failure, "the setup hook raised")
    if failure.load_advice:
        return setup_error(
            failure, "a worker could not load the function and the source", failure.load_advice
        )
    original = original_of(cause) if cause is not None else unpickled(failure)
    is_of_call = failure.index is not None or bool(failure.indices)
    # A SourceError without a call comes from a dispatcher, or from generators that end too early.
    for ours in (SpecMismatchError, SourceError)[: 1 if is_of_call else 2]:
        if original is not None and issubclass(original.cls, ours):
            return _with_cause(ours(preface + failure.text), cause)
    told = {"index": _index_told(failure.index), "worker": failure.worker, "node": failure.node}
    message = _message(failure)
    error: LoaderpoolError = SampleError(f"{preface}{failure.type_name}: {message}")
    if failure.is_timeout:
        error = SampleTimeoutError(preface + message)
    return _with_cause(_of_both(error, original, failure, preface + message, told), cause)


def _of_both(
    error: _Error, original: Original | None, failure: Failure, message: str, told: dict[str, Any]
) -> _Error:
    """Return an error that is also of the user's type. If that fails, return `error` itself.

    The user's class is not called.

    Args:
        error: Error of this package's type.
        original: The user's exception; None: it could not be unpickled.
        failure: Failure from the worker.
        message: Text of the error.
        told: Attributes of the error.
    """
    told |= {
        "epoch": failure.epoch,
        "remote_traceback": failure.traceback_text,
        "original_type": failure.type_name,
    }
    vars(error).update(told)
    cls = original.cls if original is not None else BaseException
    ours: type[LoaderpoolError] = SourceError if isinstance(error, SourceError) else SampleError
    # An exception that ends loops or programs must not do so here. Only its name is kept.
    if original is None or not issubclass(cls, Exception) or cls in (Exception, ours):
        return error
    if issubclass(cls, (StopIteration, StopAsyncIteration)):
        return error
    # The attributes are in the class, so they hide attributes and properties of the user's class
    # with these names. The message does not repeat the class name, because tracebacks show it.
    members = {**told, "__str__": lambda self: message, "__module__": cls.__module__}
    kept = {name: value for name, value in original.attributes.items() if name not in told}
    try:
        both: Any = type(cls.__name__, (cls,) if issubclass(cls, ours) else (ours, cls), members)
        found: _Error = rebuild(both, original._replace(attributes=kept))
        str(found)
    except Exception as second:
        if is_of_a_handler(second):
            raise
        return error
    return found


def reading_error(ended: Failure | LoaderpoolError, position: int) -> LoaderpoolError:
    """Return the exception for the early end of a stream, a new one for each caller.

    Args:
        ended: Result of `reports.what_ended`.
        position: Position of the first item that is in no batch.
    """
    return source_error(ended, position) if isinstance(ended, Failure) else type(ended)(str(ended))


def source_error(
    failure: Failure, position: int, cause: BaseException | None = None
) -> SourceError:
    """Return the exception for an error that was raised while a stream was read.

    Args:
        failure: The error.
        position: Position of the first item that is in no batch.
        cause: Exception object, if it was raised in this process.
    """
    failure = _with_source_lines(failure)
    original = original_of(cause) if cause is not None else unpickled(failure)
    message = (
        f"{failure.text}\nraised by the source while reading the batch from position {position} "
        f"in epoch {failure.epoch}. All batches before it were delivered.\n\n"
        f"Traceback of the source:\n{failure.traceback_text}"
    )
    error = SourceError(f"{failure.type_name}: {message}")
    return _with_cause(_of_both(error, original, failure, message, {"position": position}), cause)


def setup_error(
    failure: Failure, what: str, advice: str = "", place: str | None = ""
) -> SetupError:
    """Return the exception for a failure before the first sample.

    Args:
        failure: The failure.
        what: First words of the message, such as "the setup hook raised".
        advice: Advice for the user.
        place: Process of the failure; empty: the worker of `failure`. None: the user's code was not
            involved, so no traceback is shown, because it would hide the advice.
    """
    text = f"{what}: {failure.type_name}: {failure.text}"
    if advice:
        text += f"\n{advice}"
    if place is not None:
        text += (
            f"\n\nTraceback in {place or _place(failure)}:\n"
            f"{with_source_lines(failure.traceback_text)}"
        )
    error = SetupError(text)
    if advice and place is not None and failure.type_name.rpartition(".")[2] not in _ADVISED_ON:
        error._load_error, error._advice = failure.type_name, advice
    return error


def lost_error(report: LostReport) -> WorkerLostError:
    """Return the exception for work that was abandoned because workers or nodes died."""
    if report.nodes:
        return _node_lost_error(report)
    ended, name = _ending(report)
    worker = (
        f"A worker (pid {report.pid}{f', node {report.node}' if report.node else ''})"
        f"{' was' * bool(name)} {ended}"
    )
    if report.why is GivenUp.STORM:
        text = (
            f"{counted(report.deaths, 'worker')} crashed within {_more_than_allowed(report)}. The "
            f"last one {worker.removeprefix('A worker ')}. A single sample is probably not the "
            "cause."
        )
    elif report.in_setup:
        text = (
            f"{worker} in the setup hook. {report.deaths} workers in a row crashed before their "
            "first sample."
        )
    elif report.why is GivenUp.BEFORE:
        text = (
            f"{worker} before it started any sample, like {counted(report.deaths - 1, 'worker')} "
            "before it."
        )
    else:
        where = f"in epoch {report.epoch}"
        if report.why is GivenUp.ALONE and report.index is not None:
            where = f"while loading {item_name(report.index)} (epoch {report.epoch})"
        text = f"{worker} {where}. {report.deaths} workers crashed on this task"
        is_together = report.why is GivenUp.TOGETHER
        text += (
            ", at changing samples: together they may need too much memory." if is_together else "."
        )
    text += "\n" + _likely_cause(report, name, "setup hook" if report.in_setup else "function")
    if report.why is GivenUp.ALONE and report.index is not None:
        text += _how_to_replay(report.index, report.epoch)
    if report.stacks.strip():
        text += f"\n\nLast output of the worker:\n{with_source_lines(report.stacks).strip()}"
    error = WorkerLostError(text)
    error.index, error.epoch, error.signal_name = _index_told(report.index), report.epoch, name
    error.node = report.node
    return error


def reader_lost_error(report: LostReport, position: int) -> SourceError:
    """Return the exception for the death of the process that reads a stream."""
    ended, name = _ending(report)
    text = (
        f"The stream process (pid {report.pid}) {'was ' if name else ''}{ended} while reading the "
        f"batch from position {position} in epoch {report.epoch}. All batches before it were "
        f"delivered.\n{_likely_cause(report, name, 'source')}\nThe next iteration reads the stream "
        "from the beginning in a new process. To read it once, in this process, pass iter(source)."
    )
    error = SourceError(text)
    error.position, error.epoch, error.signal_name = position, report.epoch, name
    return error


def _ending(report: LostReport) -> tuple[str, str]:
    """Return a phrase for the end of a process, and the name of its signal ("" if none)."""
    ended = how_it_ended(report.exit_code or 0)
    return ended, ended.removeprefix("killed by ") if (report.exit_code or 0) < 0 else ""


def _likely_cause(report: LostReport, signal_name: str, culprit: str) -> str:
    if report.was_stopped:
        return (
            "It was stopped (SIGSTOP) for 5 s, by your code or from outside, so loaderpool "
            "replaced it."
        )
    if report.is_out_of_memory:
        return (
            "The kernel killed it because memory ran out (its count of such kills increased). "
            f"Lower workers, {report.batch_argument} or Limits.memory, or give the machine (or its "
            "cgroup) more memory."
        )
    if signal_name == "SIGKILL":
        return (
            "SIGKILL usually means that memory ran out, although the kernel's counter of such "
            "kills did not increase, or that a user ran kill -9. Check `dmesg`, or lower workers "
            f"or {report.batch_argument}."
        )
    if signal_name in ("SIGABRT", "SIGBUS", "SIGSEGV"):
        return f"{signal_name} is a crash inside a C extension that the {culprit} uses."
    if report.exit_code == LOST_PIPES_STATUS:
        return (
            "The function (or setup) closed file descriptors that loaderpool uses, for example "
            "with os.closerange. Close only the descriptors that you opened."
        )
    how = (
        ""
        if signal_name
        else " with os._exit or from C code (sys.exit would be reported as an exception)"
    )
    return f"The {culprit} (or a library that it uses) ended the process{how}."


def _message(failure: Failure) -> str:
    if failure.index is not None:
        where = item_name(failure.index)
    elif failure.indices and (generated := generated_item(failure.indices[0])) is not None:
        where = f"a batch of generator {generated[0]} that starts at item {generated[1]}"
    elif failure.indices:
        where = f"the batch of source indices {_shown(failure.indices)}"
    else:
        where = "a batch"
    first = (
        failure.index
        if failure.index is not None
        else failure.indices[0]
        if failure.indices
        else None
    )
    replay = ""
    if first is not None:
        replay = _how_to_replay(first, failure.epoch, was_here=failure.worker is None)
    shown = (
        f"\n\nTraceback in {_place(failure)}:\n{failure.traceback_text}"
        if failure.traceback_text
        else ""
    )
    shard = f", shard {failure.shard}" * bool(failure.shard)
    told = (
        f"raised for {where}, epoch {failure.epoch}, in {_place(failure)}{shard}.{_hint(failure)}"
    )
    return f"{failure.text}\n{told}{replay}{shown}"


def _hint(failure: Failure) -> str:
    """Return a hint on the cause of a failure, with a leading space, or "" if none is known."""
    if failure.type_name == SystemExit.__name__:
        return f" The function called sys.exit({failure.text}), which does not end a worker."
    if (
        failure.worker is not None
        and failure.type_name == "OSError"
        and "image file is truncated" in failure.text
    ):
        return (
            " If your script sets PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True, set it in a function "
            "that you pass as setup= instead: workers do not have the script's settings."
        )
    if failure.unseen and not os.path.isabs(failure.unseen):
        return (
            " The path is relative. Use absolute paths, such as Path(path).resolve(), to files "
            "that all nodes have."
        )
    if failure.unseen and os.path.exists(failure.unseen):
        return (
            " This machine has the file. Mount the same file system at the same path on all nodes."
        )
    return ""


def _how_to_replay(index: int | None, epoch: int, was_here: bool = False) -> str:
    """Return a line on how to run a sample alone, after a line end. "" if there is no way.

    Args:
        index: Source index of the sample; None: unknown, so `replay` cannot run it.
        epoch: Epoch of the sample.
        was_here: True if the sample ran in this process already.
    """
    call = ""
    if index is not None and generated_item(index) is None:
        if target := command_target or _target():
            call = f"run `loaderpool replay {target} --index {index} --epoch {epoch}`"
        else:
            script = str(getattr(sys.modules.get("__main__"), "__file__", None) or "<notebook>")
            # In a notebook, and in "<stdin>" as Python calls it, the session survives the error.
            under_try = "" if script.startswith("<") else "catch the error and "
            call = f"{under_try}call `loaderpool.replay(loader, index={index}, epoch={epoch})`"
    if was_here:
        return call and f"\nTo run it alone, {call}."
    return f"\nTo debug it in this process, {call}{', or ' if call else ''}set workers=0."


def _target() -> str:
    """Return the TARGET of the loader that is iterated, if it is a variable of a module; else "".

    `__main__` has no TARGET, because importing a script runs it.
    """
    kind = getattr(sys.modules.get("loaderpool.trainer.loader"), "Loader", ())
    targets: dict[int, str] = {}
    for module in sys.modules.copy():
        # `sys.modules` may have another object in a module's place.
        names = dict(getattr(sys.modules.get(module), "__dict__", ()))
        # A quick check of the types, because few modules have a loader.
        if not any(issubclass(each, kind) for each in set(map(type, names.values()))):
            continue
        for name, loader in names.items():
            if (
                issubclass(type(loader), kind)
                and loader._core.tracker.iterations.live
                and not targets.get(id(loader))
            ):
                targets[id(loader)] = "" if module == "__main__" else f"{module}:{name}"
    return targets.popitem()[1] if len(targets) == 1 else ""


def _index_told(index: int | None) -> int | None:
    """Return the `index` of an error; for an item of a generator, its number in the generator."""
    generated = None if index is None else generated_item(index)
    return index if generated is None else generated[1]


def _with_source_lines(failure: Failure) -> Failure:
    return failure._replace(traceback_text=with_source_lines(failure.traceback_text))


def _place(failure: Failure) -> str:
    if failure.worker is None:
        return "this process"
    return f"worker {failure.worker}" + (f" on node {failure.node}" if failure.node else "")


def _with_cause(error: _Error, cause: BaseException | None) -> _Error:
    if cause is not None:
        error.__cause__ = cause
    return error
