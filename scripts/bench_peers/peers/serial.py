"""The serial loop: batches made one after the other in the trainer. Nobody's loader; what there is without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchlib.work import Array, Work, make_batch


class Loop:
    def __init__(self, work: Work) -> None:
        self.work = work

    def __iter__(self) -> Iterator[Array]:
        return (make_batch(self.work, position) for position in range(self.work.batches))


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    yield Loop(work)
