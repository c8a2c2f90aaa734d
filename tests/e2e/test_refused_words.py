"""Messages if a container refuses system calls for memory, and for values that cannot be pickled or
cached.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
from typing import Any

import pytest

import loaderpool as lp


def refusal(number: int) -> Any:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def first_batch(workers: int = 1) -> Any:
    with lp.Loader(range(8), lambda i: i, batch_size=4, workers=workers) as loader:
        return next(iter(loader))


def test_a_lack_of_memory_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refusal(errno.ENOSPC))
    with pytest.raises(lp.MemoryLimitError, match=r"set a smaller Limits\.memory"):
        first_batch()


def test_a_captured_array_of_ctypes_is_named() -> None:
    numbers = (ctypes.c_int * 3)(1, 2, 3)
    with (
        pytest.raises(lp.UnpicklableError, match=r"variable 'numbers' .*numpy\.array"),
        lp.Loader(range(8), lambda item: numbers[item % 3], batch_size=4, workers=1) as loader,
    ):
        next(iter(loader))


def test_a_pool_is_not_pickled() -> None:
    with lp.Pool(1) as pool:
        with pytest.raises(lp.UnpicklableError, match=r"^a Pool cannot be pickled"):
            pickle.dumps(pool)
        with (
            pytest.raises(lp.UnpicklableError, match=r"variable 'pool' .*a Pool cannot be pickled"),
            lp.Loader(range(8), lambda item: (pool, item)[1], batch_size=4, workers=1) as loader,
        ):
            next(iter(loader))
