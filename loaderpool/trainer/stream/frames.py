"""What a feed asks of whatever reads a stream; and how it is read on the very thread that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from loaderpool.errors import LoaderpoolError
from loaderpool.transport.pickling import frames


class StreamFailed(Exception):
    """The stream ended by an error; it never leaves the feed.

    Attributes:
        make_error: makes a new error for each that meets it: a kept exception would keep every frame it passed.
    """

    def __init__(self, make_error: Callable[[], LoaderpoolError]) -> None:
        super().__init__(make_error)
        self.make_error = make_error


class NextFrame(NamedTuple):
    """The items of one batch."""

    first: int  # position of the first one
    rows: int
    buffers: int  # as its bundle has it
    nbytes: int  # of the bundle
    # Fills `uint8[nbytes]`, which lies at an offset of the arena, before the next frame is asked for; `StreamFailed` as
    # in `FrameSource.next`.
    write_into: Callable[[memoryview, int], None]


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

    def next(self, batch: int) -> NextFrame | None:
        frame = next(self._frames, None)
        if frame is None:
            return None
        return NextFrame(frame.first, frame.rows, frame.buffers, frame.nbytes, frame.write_into)

    def cancel(self) -> None:
        """Have no more read. A thread that waits in the user's code goes on waiting there."""

    def close(self) -> None:
        self._frames.close()
