"""The function forks. Its child never acts as a worker, however it ends, and the parent's result is
delivered.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp

Ending = Callable[[], Any]


def ends_by(what: BaseException | None) -> Ending:
    """End of a child without `os._exit`: it raises this exception, or returns."""

    def end() -> Any:
        if what is not None:
            raise what
        return -1

    return end


# Ways for a child to end, and the exit status that its parent should get.
ENDINGS: dict[str, tuple[Ending, int]] = {
    "exits": (ends_by(SystemExit()), 0),
    "exits with a status": (ends_by(SystemExit(3)), 3),
    "exits with words": (ends_by(SystemExit("no more")), 1),
    "raises": (ends_by(LookupError("the child's own")), 1),
    "returns": (ends_by(None), 0),
}


def forking(end: Ending, log: Path, bad: int) -> Callable[..., Any]:
    """Return a function whose child ends by `end` at one index. The parent writes the child's
    status to a file.
    """

    def fn(index: int, out: Any = None) -> Any:
        if index == bad:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                return end()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with log.open("a") as file:
                file.write(f"{status}\n")
        return index

    return fn


def with_out(fn: Callable[..., Any]) -> Callable[..., Any]:
    def fill(index: int, out: Any) -> Any:
        return fn(index)

    return fill


def in_batches(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda items: np.array([fn(item) for item in items])


def as_text(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda item: str(fn(item))


KINDS: dict[str, Callable[[Callable[..., Any]], dict[str, Any]]] = {
    "rows": lambda fn: {"fn": lambda item: fn(item)},
    "rows one by one": lambda fn: {"fn": lambda item: fn(item), "limits": lp.Limits(timeout_s=60)},
    "rows on threads": lambda fn: {"fn": lambda item: fn(item), "threads": 4},
    "out": lambda fn: {"fn": with_out(fn)},
    "replace": lambda fn: {"fn": lambda item: fn(item), "on_error": "replace"},
    "skip": lambda fn: {"fn": lambda item: fn(item), "on_error": "skip"},
    "text": lambda fn: {"fn": as_text(fn)},
    "batch_fn": lambda fn: {"batch_fn": in_batches(fn)},
    "elements": lambda fn: {"fn": lambda item: np.array([fn(item)]), "batch_size": None},
}


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *(("rows", ending) for ending in ENDINGS),
        *((kind, "returns") for kind in KINDS if kind != "rows"),
    ],
)
def test_a_child_of_the_function_ends_alone(kind: str, ending: str, tmp_path: Path) -> None:
    end, status = ENDINGS[ending]
    bad = 0 if kind in ("batch_fn", "elements") else 6  # 0, so that the probe forks
    settings = KINDS[kind](forking(end, tmp_path / "log", bad))
    with lp.Loader(range(16), workers=1, **{"batch_size": 4, **settings}) as loader:
        for _ in range(2):
            rows = np.concatenate(list(loader))
            assert rows.astype(int).tolist() == list(range(16))
        statistics = loader.statistics()
        assert statistics.restarts == 0 and statistics.errors == 0
    assert set((tmp_path / "log").read_text().split()) == {str(status)}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_child_of_setup_ends_alone(ending: str, tmp_path: Path) -> None:
    end, status = ENDINGS[ending]
    child = forking(end, tmp_path / "log", 0)
    with lp.Loader(range(16), batch_size=4, workers=1, setup=lambda: child(0)) as loader:
        assert np.concatenate(list(loader)).tolist() == list(range(16))
        assert loader.statistics().restarts == 0
    assert set((tmp_path / "log").read_text().split()) == {str(status)}


def test_what_a_child_says_as_it_ends_is_heard(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for ending in ("raises", "exits with words"):
        fn = forking(ENDINGS[ending][0], tmp_path / "log", 2)
        with lp.Loader(range(8), fn, batch_size=4, workers=1) as loader:
            assert np.concatenate(list(loader)).tolist() == list(range(8))
    said = capfd.readouterr().err
    assert "LookupError: the child's own" in said and "no more" in said
