"""What a feed asks of whatever reads a stream; and how it is read on the very thread that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from loaderpool.errors import LoaderpoolError
from loaderpool.transport.bundles import Frame, frames


class StreamFailed(Exception):
    """The stream ended by an error; it never leaves the feed.

    Attributes:
        make_error: makes a new error for each that meets it: a kept exception would keep every frame it passed.
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
        """As its bundle has it."""

    @property
    def buffers(self) -> int:
        """As its bundle has it."""

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

    reads_here: bool  # in this process, where reading tells itself how far it is

    def next(self, batch: int) -> NextFrame | None:
        """The frame of the next batch, which has this number; None: the stream has ended. Blocks until it is read.

        Raises:
            StreamFailed: it has ended by an error, which this makes.
            BaseException: reading it has raised that, here.
        """

    def cancel(self) -> None:
        """The pass is over: `next` and `write_into` shall end soon. Never blocks; in any thread, also a finalizer."""

    def close(self) -> None:
        """Let go of whatever reads. Called once, last."""


class OwnFrames:
    """Reads on the very thread that asks.

    Args:
        batches: of `read_batches`.
    """

    reads_here = True

    def __init__(self, batches: Iterator[tuple[int, list[Any]]]) -> None:
        self._frames = frames(batches)

    def next(self, batch: int) -> Frame | None:
        return next(self._frames, None)

    def cancel(self) -> None:
        """Have no more read. A thread that waits in the user's code goes on waiting there."""

    def close(self) -> None:
        self._frames.close()
