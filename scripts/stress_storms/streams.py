"""Streams as they are compared: a digest for each batch, an epoch at a time, beside those of the crash-free twin."""

from __future__ import annotations

import collections
import hashlib
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.element.ragged import RaggedArray

from .shapes import Faults, Shape, make

__all__ = ["Twin", "compare", "digest"]

_SHOWN = 5  # differences of one pass


def digest(batch: Any) -> bytes:
    """Of structure, dtypes, shapes and every bit."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, batch)
    return state.digest()


def _feed(state: Any, part: Any) -> None:
    if isinstance(part, dict):
        state.update(b"{%d" % len(part))
        for key, value in part.items():
            state.update(repr(key).encode())
            _feed(state, value)
    elif isinstance(part, tuple):
        state.update(b"(%d" % len(part))
        for value in part:
            _feed(state, value)
    elif isinstance(part, RaggedArray):
        state.update(b"R")
        _feed(state, (part.values, part.row_splits))
    else:
        array = np.asarray(part)
        state.update(repr((array.dtype.str, array.shape)).encode())
        state.update(repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).data)


class Twin:
    """The same loader without processes: what each epoch must be.

    Args:
        shape: of both.
        faults: of both; the twin has none.
        seed: of both.
    """

    def __init__(self, shape: Shape, faults: Faults, seed: int) -> None:
        self._shape, self._faults, self._seed = shape, faults, seed
        self._loader = self._make()
        self._epoch = -1
        self._digests: list[bytes] = []
        self._errors = 0

    def epoch(self, epoch: int) -> tuple[list[bytes], int]:
        """Digests of the epoch's batches, and how many of its samples failed. To be asked for in order."""
        if epoch != self._epoch:
            if self._shape.is_one_shot and self._epoch >= 0:
                self._loader.close()
                self._loader = self._make()
            if not self._shape.is_sequence:  # there the hooks count, and every pass is whole
                self._loader.epoch = epoch
            before = self._loader.statistics().errors
            self._digests = [digest(batch) for batch in self._loader]
            self._errors = self._loader.statistics().errors - before
            self._epoch = epoch
        return self._digests, self._errors

    def _make(self) -> lp.Loader:
        return make(self._shape, self._faults, self._seed, workers=0)

    def close(self) -> None:
        """It is needed no more."""
        self._loader.close()


def compare(got: list[bytes], expected: list[bytes], *, is_ordered: bool, is_whole: bool) -> list[str]:
    """One line for each difference; empty where the streams are the same.

    Args:
        got: digests as they were delivered.
        expected: those of the twin's whole epoch.
        is_ordered: whether the order counts.
        is_whole: whether the pass went to its end, so that every batch must be there.
    """
    if is_ordered and got == (expected if is_whole else expected[: len(got)]):
        return []
    counted, wanted = collections.Counter(got), collections.Counter(expected)
    if not is_ordered and not counted - wanted and (not is_whole or not wanted - counted):
        return []
    found = []
    for number, each in enumerate(got):
        if each not in wanted:
            found.append(f"batch {number} as delivered is none of the twin's: corrupted")
        elif counted[each] > wanted[each]:
            found.append(f"batch {number} as delivered comes {counted[each]} times, not {wanted[each]}: doubled")
        elif is_ordered and (number >= len(expected) or each != expected[number]):
            found.append(f"batch {number} as delivered is the twin's {expected.index(each)}: reordered")
    if is_whole:
        found += [f"the twin's batch {number} is lost" for number, each in enumerate(expected) if each not in counted]
    return [*found[:_SHOWN], *([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])] or ["differs"]
