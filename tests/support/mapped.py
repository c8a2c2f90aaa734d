"""Arrays that malloc has mapped separately, so that loaderpool can adopt them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt


def mapped(make: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return an array in pages of its own.

    Earlier tests may have left free memory in the heap, which malloc uses first, whatever the size.

    Args:
        make: makes the array, of more than 32 MiB.
    """
    made = [make()]
    while _is_in_heap(made[-1].ctypes.data):
        made.append(make())
    return made[-1]


def _is_in_heap(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, end = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= address < end:
                return True
    return False
