"""An exception of a signal handler is not a failure of the user's code, and is never dropped.

Each object sends SIGALRM from one of its methods, whose errors loaderpool catches.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp


class LimitError(Exception):
    """The exception of a time limit."""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    def limit(*_: object) -> Any:
        raise LimitError

    before = signal.signal(signal.SIGALRM, limit)
    list(lp.Loader([1], workers=0))  # from now on handlers are gated, as in every training
    yield
    signal.signal(signal.SIGALRM, before)


def strike() -> None:
    signal.raise_signal(signal.SIGALRM)


class Struck:
    """Sends the signal when it is pickled."""

    def __reduce__(self) -> Any:
        strike()
        return Struck, ()


# ---- with workers=0: results and errors of the function ----


class Arrays:
    def __array__(self, *_: Any, **__: Any) -> Any:
        strike()
        return np.zeros(2)


class SpeakingError(Exception):
    def __str__(self) -> str:
        strike()
        return "spoken"


class CarryingError(Exception):
    def __init__(self) -> None:
        super().__init__("carried")
        self.cargo = Struck()


class Loaded:
    """Sends the signal when it is unpickled for the twelfth time, from the cache."""

    times = 0

    def __reduce__(self) -> Any:
        return loaded, ()


def loaded() -> int:
    Loaded.times += 1
    if Loaded.times == 12:
        strike()
    return 7


class Files(lp.FileSource):
    def index(self, path: str) -> int:
        return 3

    def read(self, handle: Any, record: Any) -> Any:
        strike()


class Batches:
    """A Sequence whose `__len__` sends the signal."""

    @property
    def num_batches(self) -> int:
        strike()
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.zeros(2)


class Hooked:
    """A Sequence with a part that sends the signal when it is pickled after a hook."""

    def __init__(self) -> None:
        self.part: Any = 1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return np.zeros(2)

    def on_epoch_end(self) -> None:
        self.part = Struck()


def failing(error: type[Exception]) -> Callable[[int], Any]:
    def fn(item: int) -> Any:
        raise error()

    return fn


def ended(struck: list[int]) -> Iterator[int]:
    try:
        yield from range(8)
    finally:
        struck.append(len(struck))
        if len(struck) == 1:
            strike()


def local(fn: Any, **settings: Any) -> None:
    with lp.Loader(range(8), fn, batch_size=4, workers=0, **settings) as loader:
        for _ in range(2):
            list(loader)


def left(folder: Path) -> None:
    struck: list[int] = []
    loader = lp.Loader.from_generator(ended, shards=[struck], batch_size=2, workers=0)
    with loader:
        batches: Any = iter(loader)
        next(batches)
        batches.close()
        list(loader)


def hooked(folder: Path) -> None:
    with lp.Loader.from_sequence(Hooked(), workers=1) as loader:
        list(loader)
        list(loader)


def unpicklable(folder: Path) -> None:
    found = [open(folder / "held", "w"), Struck()]  # noqa: SIM115

    class Second:
        """Sends the signal when it is pickled for the second time, to find the variable that cannot
        be pickled.
        """

        times = 0

        def __reduce__(self) -> Any:
            Second.times += 1
            if Second.times > 1:
                strike()
            return int, ()

    with found[0]:
        part = [Second(), found[0]]
        lp.Loader(range(8), lambda item: part, workers=1)


CASES: dict[str, Callable[[Path], object]] = {
    "an array": lambda folder: local(lambda item: Arrays()),
    "parts of an array": lambda folder: local(lambda item: [Arrays(), Arrays()]),
    "an error's text": lambda folder: local(failing(SpeakingError), on_error="skip"),
    "an error's attribute": lambda folder: local(failing(CarryingError), on_error="skip"),
    "a cache's entry": lambda folder: local(lambda item: Loaded(), cache="memory"),
    "a result for a cache": lambda folder: local(lambda item: Struck(), cache="memory"),
    "a file source": lambda folder: list(lp.Loader(Files(str(folder / "file")), workers=0)),
    "a number of batches": lambda folder: lp.Loader.from_sequence(Batches(), workers=0),
    "a generator's end": left,
    "a hook's change": hooked,
    "the search for what cannot be sent": unpicklable,
}


@pytest.mark.parametrize("case", CASES)
def test_a_handlers_exception_comes_out(case: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    Loaded.times = 0
    with pytest.raises(LimitError):
        CASES[case](tmp_path)


class Shown:
    def __repr__(self) -> str:
        strike()
        return "shown"


def test_a_handler_in_a_repr_for_a_message_runs_a_moment_later() -> None:
    with pytest.raises(LimitError):
        try:
            lp.Loader(range(8), workers=0, batch_size=Shown())  # type: ignore[arg-type]
        except lp.ArgumentError:
            time.sleep(5)


# ---- the identity of a cache ----


@pytest.mark.parametrize("part", ["function", "source"])
def test_no_cache_is_made_with_half_an_identity(part: str, tmp_path: Path) -> None:
    struck = Struck()
    source = [struck] * 8 if part == "source" else range(8)
    where = tmp_path / "cache"
    with pytest.raises(LimitError):
        lp.Loader(source, lambda item: (struck, 1)[1], workers=0, cache=where)
    assert not where.exists()
