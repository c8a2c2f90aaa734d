"""How an error travels from workers and supervisor to the main process."""

from __future__ import annotations

import pickle
from typing import Any

from loaderpool import errors
from loaderpool.errors import LoaderpoolError
from loaderpool.transport.reports import Failure, LostReport


def of_sample(failure: Failure) -> bytes:
    """Return what is sent where the user's code raised, or took too long."""
    return pickle.dumps(("sample", failure), 5)


def of_deaths(report: LostReport) -> bytes:
    """Return what is sent where workers died."""
    return pickle.dumps(("lost", report), 5)


def of_load(failure: Failure, advice: str) -> bytes:
    """Return what is sent where function and source could not be loaded."""
    return pickle.dumps(("load", failure, advice), 5)


def of_start(failure: Failure, advice: str) -> bytes:
    """Return what is sent where no worker could be started."""
    return pickle.dumps(("start", failure, advice), 5)


def of_error(error: LoaderpoolError) -> bytes:
    """Return what is sent of an error of ours."""
    return pickle.dumps(("error", type(error).__name__, str(error)), 5)


def may_pass(packed: bytes) -> bool:
    """Whether the same may go well another time: a sample that failed, say."""
    return pickle.loads(packed)[0] in ("sample", "lost")


def unpack(packed: bytes) -> LoaderpoolError:
    """Return the exception to be raised in the main process, a new one each time."""
    from loaderpool.trainer.session.remote_errors import lost_error, sample_error, setup_error

    kind, *parts = pickle.loads(packed)
    found: Any
    if kind == "sample":
        return sample_error(parts[0])
    if kind == "lost":
        return lost_error(parts[0])
    if kind == "error":
        found = getattr(errors, parts[0])(parts[1])
        return found  # type: ignore[no-any-return]
    failure, advice = parts
    if kind == "load":
        where = f" on node {failure.node}" if failure.node else ""
        place = f"the supervisor{where}"
        return setup_error(failure, f"{place} could not load the function and the source", advice, place)
    return setup_error(failure, "no worker could be started", advice, has_traceback=False)
