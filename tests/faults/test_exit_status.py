"""`sys.exit(n)` in the function and `os._exit(n)` end with the same number, and are told apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

import loaderpool as lp


def ending(end: Callable[[], object]) -> Callable[[int], int]:
    def fn(item: int) -> int:
        if item == 5:
            end()
        return item

    return fn


def test_sys_exit_is_the_samples_error_and_names_itself() -> None:
    with lp.Loader(range(20), ending(lambda: sys.exit(123)), batch_size=4, workers=1) as loader:
        with pytest.raises(
            lp.SampleError, match=r"The function called sys\.exit\(123\), which does not end a worker"
        ) as error:
            list(loader)
        assert error.value.index == 5
        assert loader.statistics().restarts == 0


def test_os_exit_is_a_lost_worker_and_says_that_it_was_no_sys_exit() -> None:
    with (
        lp.Loader(range(20), ending(lambda: os._exit(123)), batch_size=4, workers=1) as loader,
        pytest.raises(lp.WorkerLostError, match="exited with status 123 while loading source index 5") as error,
    ):
        list(loader)
    assert "with os._exit or from C code (sys.exit would be" in str(error.value)
