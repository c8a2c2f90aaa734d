"""Whether several results look at one memory: a buffer that the function fills again and again, or a constant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


def share_memory(results: Iterable[Any], but: Iterable[Any] = ()) -> bool:
    """Whether a writable array, a list or a dict stands in more than one of the results, itself or behind a view.

    Args:
        results: what several calls gave.
        but: arrays whose memory may be shared.
    """
    seen: set[int] = set()
    allowed = {root for array in but for root in _roots(array)}
    for result in results:
        roots = set(_roots(result)) - allowed
        if not seen.isdisjoint(roots):
            return True
        seen |= roots
    return False


def _roots(value: Any) -> Iterator[int]:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        if value.flags.writeable:
            yield id(value if value.base is None else value.base)
    elif isinstance(value, dict):
        yield id(value)
        for part in value.values():
            yield from _roots(part)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield id(value)
        for part in value:
            if isinstance(part, (np.ndarray, dict, list, tuple)):
                yield from _roots(part)
