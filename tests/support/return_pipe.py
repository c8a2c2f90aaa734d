"""A `ReturnPipe` and the end that the supervisor would read."""

from __future__ import annotations

import fcntl
import os

from loaderpool.memory.extents import PAGE_BYTES
from loaderpool.trainer.session.lease import ReturnPipe
from loaderpool.transport.messages import MESSAGE_BYTES, decode_all

__all__ = ["Pipe"]


class Pipe:
    """A ReturnPipe and its other end."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.room = fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PAGE_BYTES) // MESSAGE_BYTES
        self.pipe = ReturnPipe(write_end)

    def read(self) -> list[tuple[int, ...]]:
        """The messages that are in it."""
        try:
            return [tuple(words) for words in decode_all(os.read(self._read_end, 1 << 20))]
        except BlockingIOError:
            return []

    def numbers(self) -> list[int]:
        return [words[1] for words in self.read()]

    def close(self) -> None:
        if self._read_end >= 0:
            os.close(self._read_end)
            self._read_end = -1
