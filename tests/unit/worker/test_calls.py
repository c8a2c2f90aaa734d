"""Calls of the user's function: repeated calls, and exceptions that end them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.arguments import check_arguments
from loaderpool.transport.messages import Ticket
from loaderpool.worker.calls import Calls
from loaderpool.worker.own_process import SavedGlobals
from loaderpool.worker.tickets import Opened


def calls_of(fn: Any, **settings: Any) -> Calls:
    loader = lp.Loader(range(20), fn, workers=0, **settings)
    return Calls(check_arguments(loader._core.arguments).payload)


def rows(calls: Calls, indices: Any) -> Opened:
    return calls.reader.open(Ticket(), np.arange(len(indices)), list(indices))


def stopping(times: int) -> Callable[[int], int]:
    """Return a function that raises StopIteration at index 2, the first n times."""
    stops = [StopIteration] * times

    def fn(index: int) -> int:
        if index == 2 and stops:
            raise stops.pop()
        return index

    return fn


@pytest.mark.parametrize(("times", "error"), [(1, RuntimeError), (2, StopIteration)])
@pytest.mark.parametrize("last", [2, 3, 5])
def test_stop_iteration_is_an_error_of_its_own_sample(
    times: int, error: type[Exception], last: int
) -> None:
    results: list[Any] = []
    calls = calls_of(stopping(times))
    with pytest.raises(error):
        calls.block(rows(calls, range(last + 1)), 0, last + 1, results, None)
    assert results == [0, 1]  # their number shows which sample failed


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_error_of_the_function_is_never_met_by_calling_it_again(
    error: type[BaseException],
) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(len(calls))
        random.random()
        raise error

    with SavedGlobals(), pytest.raises(error):
        calls_of(int).watched(work)
    assert calls == [0]


def test_an_error_after_a_draw_is_met_again_with_seeds() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(len(calls))
        random.random()
        raise ValueError(len(calls))

    with SavedGlobals(), pytest.raises(ValueError, match="3"):
        calls_of(int).watched(work)


@pytest.mark.parametrize(
    "source",
    [range(20), range(3, 60, 2), range(10, -10, -1), range(1, 21), list(range(20))],
    ids=str,
)
@pytest.mark.parametrize("fn", [None, str])
def test_a_range_gives_what_its_index_has(source: Any, fn: Any) -> None:
    calls = Calls(check_arguments(lp.Loader(source, fn, workers=0)._core.arguments).payload)
    results: list[Any] = []
    calls.block(rows(calls, [5, 0, 19, 7]), 0, 4, results, None)
    assert results == [(fn or int)(source[index]) for index in (5, 0, 19, 7)]
