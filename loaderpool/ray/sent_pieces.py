"""Pieces of payloads on their way to hosts: a few at a time, and each watched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from loaderpool.system import clock

# So many are under way at a time, and together they are as large as an object may be.
_AT_ONCE = 4
# How often they are looked at while one waits to be sent.
_LOOK_S = 1.0


class _SentPiece(NamedTuple):
    """A call that brings one."""

    host: int
    since_s: float


class SentPieces:
    """Pieces that are sent and have not arrived.

    Runs in: the thread of a dispatcher that talks with its cluster; `sent` in any thread.

    Args:
        ray: the module.
        timeout_s: a host that a piece has not reached by then is given up.
        is_ended: whether a host has been ended.
        lose: gives a host up, for a reason.
    """

    def __init__(
        self, ray: Any, timeout_s: float, is_ended: Callable[[int], bool], lose: Callable[[int, str], None]
    ) -> None:
        self._ray, self._timeout_s, self._is_ended, self._lose = ray, timeout_s, is_ended, lose
        self._calls: dict[Any, _SentPiece] = {}  # by what comes of them

    def __len__(self) -> int:
        return len(self._calls)

    def objects(self, host: int, pieces: Iterable[tuple[int, Any]], nbytes: int) -> Iterator[tuple[int, Any]]:
        """Put pieces into the store, each as soon as others have arrived; ends when the host is ended.

        Args:
            host: to which they go.
            pieces: where each belongs, and its bytes.
            nbytes: that an object may have.

        Yields:
            Where it belongs, and Ray's reference to it.
        """
        cut = functools.partial(_cut, nbytes // _AT_ONCE)
        for at, view in itertools.chain.from_iterable(map(cut, pieces)):
            while len(self._calls) >= _AT_ONCE:  # of all hosts: they lie in one store here
                self._ray.wait(list(self._calls), timeout=_LOOK_S)
                self.look()
            if self._is_ended(host):
                return
            yield at, self._ray.put(np.frombuffer(view, np.uint8))

    def sent(self, call: Any, host: int) -> None:
        """Note a call that brings one."""
        self._calls[call] = _SentPiece(host, clock.monotonic_s())

    def look(self) -> None:
        """Forget those that have arrived; a host that one does not reach never has its payload, and is given up.

        Of such a call Ray may tell nothing, as where it looks for the piece in vain, and the host lives and answers.
        """
        if not self._calls:
            return
        done, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        late_s = clock.monotonic_s() - self._timeout_s
        for call, piece in list(self._calls.items()):
            if call in done or self._is_ended(piece.host):
                del self._calls[call]
            elif piece.since_s < late_s:
                del self._calls[call]
                self._lose(piece.host, f"function and data have not come there within {self._timeout_s:g} s")


def _cut(nbytes: int, piece: tuple[int, Any]) -> Iterable[tuple[int, memoryview]]:
    at, content = piece
    view = memoryview(content).cast("B")
    return ((at + start, view[start : start + nbytes]) for start in range(0, view.nbytes, nbytes))
