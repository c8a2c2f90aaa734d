"""What a feed asks of whatever reads a stream; and how it is read on the very thread that asks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from loaderpool.bundling import Frame, frames, what_ended
from loaderpool.errors import LoaderpoolError
from loaderpool.failures import reading_error
from loaderpool.plan.order import Plan

__all__ = ["FrameSource", "NextFrame", "OwnFrames", "StreamFailed"]


class StreamFailed(Exception):
    """The stream ended by an error; it never leaves the feed.

    Attributes:
        make_error: makes that error, anew for each who meets it: a kept exception would keep every frame it passed.
    """

    def __init__(self, make_error: Callable[[], LoaderpoolError]) -> None:
        super().__init__(make_error)
        self.make_error = make_error


class NextFrame(Protocol):
    """The items of one batch."""

    @property
    def first(self) -> int:
        """Position of the first one."""

    @property
    def rows(self) -> int:
        """How many."""

    @property
    def pickling(self) -> int:
        """See `Bundle`."""

    @property
    def buffers(self) -> int:
        """See `Bundle`."""

    @property
    def nbytes(self) -> int:
        """Of the bundle."""

    def write_into(self, view: memoryview, offset: int) -> None:
        """Fill `uint8[nbytes]`, which lies at an offset of the arena; before the next frame is asked for.

        Raises:
            StreamFailed: see `FrameSource.next`.
        """


class FrameSource(Protocol):
    """One pass over a stream. All but `cancel` is called on the feed's thread only."""

    def next(self, batch: int) -> NextFrame | None:
        """The frame of the next batch, which has this number; None: the stream has ended. Blocks until it is read.

        Raises:
            StreamFailed: it has ended by an error.
        """

    def cancel(self) -> None:
        """Nobody wants more: `next` and `write_into` shall end soon. Never blocks; in any thread, also a finalizer."""

    def close(self) -> None:
        """Let go of whatever reads. Called once, last."""


class OwnFrames:
    """Reads on the very thread that asks.

    Args:
        batches: of `read_batches`.
        epoch: that they are of.
        plan: likewise.
    """

    def __init__(self, batches: Iterator[tuple[int, list[Any]]], epoch: int, plan: Plan) -> None:
        self._frames, self._epoch, self._plan = frames(batches), epoch, plan

    def next(self, batch: int) -> Frame | None:
        """See `FrameSource`."""
        try:
            return next(self._frames, None)
        except BaseException as error:
            ended = what_ended(error, self._epoch)
        raise StreamFailed(functools.partial(reading_error, ended, self._plan.start_after(self._epoch, batch)))

    def cancel(self) -> None:
        """See `FrameSource`. Who waits in the user's code goes on waiting there."""

    def close(self) -> None:
        """See `FrameSource`."""
        self._frames.close()
